"""Blocks, sessions and exports written by an earlier quire are still read. `tests/data/before_renames` was written by
the code before modules and classes got their present names."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.tiers import kv_fingerprint
from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.model_config import tokens_fingerprint
from quire.sessions.log import SessionStore, import_session, session_key
from quire.sessions.pinned_blocks import PinnedBlocks

DATA = Path(__file__).parents[1] / "data" / "before_renames"
TOKENS = [(31 * i * i + 7 * i) % 32000 for i in range(600)]
KV, IDS = b"model and KV layout", b"token ids"
KEYS = ContentKeys(16, KV)
NOW = 1_790_000_000.0


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy: opening a store writes to its folder."""
    shutil.copytree(DATA, tmp_path / "stored")
    return tmp_path / "stored"


def test_keys_are_unchanged() -> None:
    assert KEYS.of(TOKENS[:64], "salt")[-1].hex() == "b8345be09773a686c5eafa8eb8c63cad8441bddb0757f956e353604a06b60b69"


def test_blocks_are_found_with_their_bytes(stored: Path) -> None:
    with DiskStore.open(stored / "blocks", KV, 256, 4096) as store:
        assert len(store) == 4
        for i, key in enumerate(KEYS.of(TOKENS[:64], "salt")):
            into = bytearray(256)
            assert store.read(key, memoryview(into))
            assert into == bytes(range(i, 256)) + bytes(range(i))


def test_sessions_are_found_with_tokens_forks_and_metadata(stored: Path) -> None:
    with SessionStore.open(stored / "sessions", clock=lambda: NOW) as store:
        first, fork, other = store.page().sessions
        assert (first.id, first.name, first.num_tokens, first.salt) == (2, "agent-7", 310, "salt")
        assert (first.fingerprint, first.meta, first.created) == (IDS, {"title": "Léo"}, NOW)
        assert (first.kv_tokens, first.kv_fingerprint) == (64, KV)
        assert store.tokens("agent-7").tolist() == TOKENS[:310]
        assert (fork.name, fork.parent, fork.forked_at) == ("agent-7b", "agent-7", 280)
        assert store.tokens("agent-7b").tolist() == [*TOKENS[:280], 1, 2, 3]
        assert store.chain("agent-7b") == store.chain("agent-7"), "they share their full chunk"
        assert (other.name, other.expires) == (session_key("tenant", "other"), NOW + 60)
        assert store.tokens(other.name).tolist() == [4, 5]
        assert not any(session.lost for session in (first, fork, other))
        store.append("agent-7", [7])
    with SessionStore.open(stored / "sessions") as store:
        assert store.tokens("agent-7").tolist() == [*TOKENS[:310], 7]


def test_a_session_finds_its_blocks(stored: Path) -> None:
    with (
        SessionStore.open(stored / "sessions") as sessions,
        DiskStore.open(stored / "blocks", KV, 256, 4096) as store,
    ):
        blocks = PinnedBlocks(sessions, store, KEYS, KV)
        blocks.pin("agent-7")
        keys = blocks.keys_of("agent-7")
        assert keys == KEYS.of(TOKENS[:64], "salt") and all(map(store.has, keys))


def test_an_exported_session_is_imported(stored: Path, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "new") as store:
        session = import_session(store, stored / "agent-7.session", fingerprint=IDS)
        assert (session.name, session.meta) == ("agent-7", {"title": "Léo"})
        assert store.tokens("agent-7").tolist() == TOKENS[:310]


def test_fingerprints_of_a_model_are_the_same() -> None:
    model: Any = SimpleNamespace(
        raw={"hidden_size": 64, "layers": [1, 2]}, architecture="LlamaForCausalLM", vocab_size=257, hidden_size=64,
        num_layers=2,
    )  # fmt: skip
    files: Any = SimpleNamespace(kind=None)
    one = kv_fingerprint(EngineConfig(model="m"), files, model, "bfloat16")
    two = kv_fingerprint(EngineConfig(model="m", tensor_parallel_size=2), files, model, "bfloat16")
    assert two == one + b"|2|1|None"
    assert one == bytes.fromhex("477ec00a9935baff0e64ac8ee6123af5ef41d44c19316106668e09cb8b9ac60e") + b"|bfloat16|16|1"
    assert tokens_fingerprint(model).hex() == "5112fc6b66633e2ff83841dd04ffbb54fab35e75a63adc6f9b50163dfb627732"
