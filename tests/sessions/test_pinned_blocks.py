"""Which blocks on disk are pinned for sessions."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.offload.page_keys import page_key
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.caches import FULL, CacheGroup
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks
from quire.sessions.session_kv import SessionKV

MODEL = b"model"
BLOCK = 64


def expected_keys(keys: ContentKeys, tokens: list[int], salt: str) -> list[bytes]:
    """Keys of the full blocks, and of the rest as a partial block."""
    full = keys.of(tokens, salt)
    rest = tokens[keys.block_size * len(full) :]
    return [*full, keys.key_after(full[-1] if full else keys.root(salt), rest)] if rest else full


@pytest.mark.parametrize("block_size", [16, 48, 256, 300])
def test_the_blocks_of_pinned_sessions_are_pinned_and_no_others(tmp_path: Path, block_size: int) -> None:
    rng = random.Random(block_size)
    keys = ContentKeys(block_size, MODEL)
    with (
        SessionStore.open(tmp_path / "sessions") as sessions,
        DiskStore.open(tmp_path / "kv", MODEL, BLOCK, 1 << 20) as disk,
    ):
        blocks = PinnedBlocks(sessions, disk, keys, MODEL)
        pinned: dict[str, list[bytes]] = {}
        for i in range(120):
            names = sorted(pinned)
            kind = rng.choice(["create", "fork", "grow", "delete"]) if names else "create"
            name = rng.choice(names) if names else ""
            if kind == "delete":
                sessions.delete(name, durable=False)
                blocks.unpin(name)
                del pinned[name]
            else:
                if kind == "create":
                    name = f"s{i}"
                    sessions.create(name, range(rng.randrange(900)), salt=rng.choice(["", "t"]), durable=False)
                elif kind == "fork":
                    length = sessions.get(name).num_tokens
                    name = sessions.fork(name, f"s{i}", rng.randint(0, length), durable=False).name
                else:
                    sessions.append(name, range(rng.randrange(300)), durable=False)
                session = sessions.get(name)
                count = rng.randint(session.num_tokens // 2, session.num_tokens)
                sessions.set_kv(name, count, MODEL)
                blocks.pin(name)
                pinned[name] = expected_keys(keys, sessions.tokens(name).tolist()[:count], session.salt)
                assert blocks.keys_of(name) == pinned[name]
            assert set(disk._blocks.pins) == {key for own in pinned.values() for key in own}
        second = DiskStore.open(tmp_path / "kv2", MODEL, BLOCK, 1 << 20)
        again = PinnedBlocks(sessions, second, keys, MODEL)
        assert again.pin_loaded(1) == (len(sessions) > 1), "a part at a time"
        while again.pin_loaded(3):
            pass
        assert set(second._blocks.pins) == set(disk._blocks.pins)
        second.close()
        for name in pinned:
            blocks.unpin(name)
        assert disk._blocks.pins == {}


def test_kv_of_another_model_is_not_pinned(tmp_path: Path) -> None:
    with (
        SessionStore.open(tmp_path / "sessions") as sessions,
        DiskStore.open(tmp_path / "kv", MODEL, BLOCK, 1 << 20) as disk,
    ):
        sessions.create("a", range(100))
        sessions.set_kv("a", 100, b"other model")
        blocks = PinnedBlocks(sessions, disk, ContentKeys(16, MODEL), MODEL)
        assert not blocks.pin_loaded(100)
        assert blocks.keys_of("a") == []
        assert disk._blocks.pins == {}


def test_a_sessions_blocks_outlast_a_flood_of_unpinned_ones(tmp_path: Path) -> None:
    keys = ContentKeys(16, MODEL)
    with (
        SessionStore.open(tmp_path / "sessions") as sessions,
        DiskStore.open(tmp_path / "kv", MODEL, BLOCK, 8192) as disk,
    ):
        sessions.create("a", range(40))
        sessions.set_kv("a", 40, MODEL)
        blocks = PinnedBlocks(sessions, disk, keys, MODEL)
        blocks.pin("a")
        own = blocks.keys_of("a")
        assert len(own) == 3
        for key in own:
            assert disk.write(key, memoryview(key * 2))
        for flood in keys.of(range(1000, 1000 + 16 * 400)):
            disk.write(flood, memoryview(flood * 2))
        assert all(map(disk.has, own))
        blocks.unpin("a")
        for flood in keys.of(range(9000, 9000 + 16 * 400)):
            disk.write(flood, memoryview(flood * 2))
        assert not any(map(disk.has, own))


def test_each_cache_group_pins_what_a_session_needs_to_continue(tmp_path: Path) -> None:
    """All blocks of full groups, those that the window before the next token reaches, and the state at the end."""
    size, length, window = 16, 700, 40
    groups = (FULL, FULL, CacheGroup("window", (), window=window), CacheGroup("state", (), pages=3))
    keys = ContentKeys(size, MODEL)
    with (
        SessionStore.open(tmp_path / "sessions") as sessions,
        DiskStore.open(tmp_path / "kv", MODEL, BLOCK, 1 << 20) as disk,
    ):
        blocks = PinnedBlocks(sessions, disk, keys, MODEL, BlockTables(9, size, groups=groups))
        for name, kv_tokens in (("within-a-block", 689), ("at-a-boundary", 688), ("short", 5)):
            sessions.create(name, range(length), durable=False)
            sessions.set_kv(name, kv_tokens, MODEL)
            blocks.pin(name)
            own = expected_keys(keys, list(range(kv_tokens)), "")
            needed = {page_key(key, group) for key in own for group in (0, 1)}
            needed |= {page_key(own[read // size], 2) for read in range(max(0, kv_tokens - window + 1), kv_tokens)}
            needed |= {page_key(own[-1], 3, i) for i in range(3)}
            assert set(disk._blocks.pins) == needed
            assert blocks.keys_of(name) == own
            blocks.unpin(name)
            assert not disk._blocks.pins


def test_a_damaged_session_does_not_keep_others_from_being_pinned(tmp_path: Path) -> None:
    keys = ContentKeys(16, MODEL)
    with SessionStore.open(tmp_path / "sessions") as sessions:
        for number, name in enumerate("abc"):
            sessions.create(name, range(1000 * number, 1000 * number + 600))
            sessions.set_kv(name, 600, MODEL)
    log = tmp_path / "sessions" / "00000001.log"
    times, data = log.stat(), bytearray(log.read_bytes())
    data[data.index((1100).to_bytes(4, "little") + (1101).to_bytes(4, "little"))] ^= 1
    log.write_bytes(data)
    os.utime(log, ns=(times.st_atime_ns, times.st_mtime_ns))  # the index stays valid: found when it is read
    with (
        SessionStore.open(tmp_path / "sessions") as sessions,
        DiskStore.open(tmp_path / "kv", MODEL, BLOCK, 1 << 20) as disk,
    ):
        kv = SessionKV(BlockTables(9, 16), keys, sessions, MODEL, pinned=PinnedBlocks(sessions, disk, keys, MODEL))
        rounds = 0
        while kv.pin_loaded(1):
            rounds += 1
            assert rounds < 10
        assert [session.name for session in sessions.page().sessions if session.lost] == ["b"]
        assert set(disk._blocks.pins) == {
            key for start in (0, 2000) for key in expected_keys(keys, list(range(start, start + 600)), "")
        }
