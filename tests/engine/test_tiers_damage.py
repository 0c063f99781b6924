"""Disks that are full, read-only, truncated or flip bits: a clear error or a recompute, and the engine continues."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import SessionLostError, StoreError, StoreFullError, StoreUnavailableError, ValidationError
from quire.kvcache.offload.block_store import StoreStats
from quire.kvcache.offload.disk import segments
from tests.conftest import assert_idle, write_tiny_model
from tests.sessions.test_session_damage import SmallDisk, cut, flip, remove, wipe

LENGTHS = {"long": 100, "short": 9, "other": 60}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "swap_space": 0.002, "kv_disk_size": 0.001,
}  # fmt: skip
"""Host memory holds 260 blocks, the disk 125."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Harm = Callable[[Path, random.Random], None]
Start = Callable[..., LLM]


def answers(llm: LLM, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tokens after the prompts in an engine without caching."""
    llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts.values()], GREEDY, use_tqdm=False)
    return {name: list(output.outputs[0].token_ids) for name, output in zip(prompts, outputs, strict=True)}


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    """Starts engines over a folder. They are checked to be idle after the test."""
    running: list[LLM] = []

    def begin(folder: Path, model: Path = tiny_model, **settings: Any) -> LLM:
        while running:
            running.pop().shutdown()
        running.append(LLM(str(model), kv_disk=str(folder), **(SETTINGS | settings)))
        return running[-1]

    yield begin
    while running:
        assert_idle(running[-1])
        running.pop().shutdown()


class SuspendedSessions:
    """Sessions that had a turn each and are suspended in a folder, and how they must continue."""

    def __init__(self, tiny_model: Path, reference: LLM, folder: Path) -> None:
        self.folder = folder
        rng = random.Random(5)
        self.tokens = {name: [rng.randrange(4, 110) for _ in range(length)] for name, length in LENGTHS.items()}
        with LLM(str(tiny_model), kv_disk=str(folder), **SETTINGS) as llm:
            for name, tokens in self.tokens.items():
                session = llm.sessions.create(name, tokens)
                session.generate(GREEDY)
                session.suspend()
                self.tokens[name] = session.tokens
        self.next = answers(reference, self.tokens)

    def copy(self, to: Path) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.folder, to)
        return to

    def continue_all(self, llm: LLM, *but: str) -> int:
        """Each session takes a turn and must give the expected tokens; returns how many of their tokens were
        recomputed."""
        again = 0
        for name in self.tokens.keys() - set(but):
            session = llm.sessions.resume(name)
            output = session.generate(GREEDY)
            assert session.tokens == self.tokens[name] + self.next[name]
            again += len(self.tokens[name]) - 1 - (output.num_cached_tokens or 0)
        return again


@pytest.fixture(scope="module")
def suspended(tiny_model: Path, shared_tiny: LLM, tmp_path_factory: pytest.TempPathFactory) -> SuspendedSessions:
    return SuspendedSessions(tiny_model, shared_tiny, tmp_path_factory.mktemp("asleep") / "kv")


def block_files(folder: Path) -> list[Path]:
    return sorted((folder / "blocks").rglob("*.kv"))


def disk_stats(llm: LLM) -> StoreStats:
    tiers = llm.llm_engine.core.scheduler.tiers
    assert tiers is not None and tiers.store is not None
    return tiers.store.stats()


def drop_caches(llm: LLM) -> None:
    """Drop everything cached on the device and in host memory."""
    tiers = llm.llm_engine.core.scheduler.tiers
    assert tiers is not None
    llm.reset_prefix_cache()
    tiers.host.discard(list(tiers.host.oldest()))


def flip_used(path: Path, rng: random.Random) -> None:
    """Flip a bit in the first part of the table or the slots, where blocks are stored."""
    data = path.stat().st_size
    slots = segments.HEADER.unpack(path.read_bytes()[: segments.HEADER.size])[2]
    at = rng.choice([rng.randrange(64 + 64 * 12), 64 + 64 * slots + rng.randrange(12 * 8192)])
    with path.open("r+b") as file:
        file.seek(min(at, data - 1))
        byte = file.read(1)[0]
        file.seek(min(at, data - 1))
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def cut_used(path: Path, rng: random.Random) -> None:
    slots = segments.HEADER.unpack(path.read_bytes()[: segments.HEADER.size])[2]
    os.truncate(path, rng.choice([rng.randrange(64 + 64 * 12), 64 + 64 * slots + rng.randrange(12 * 8192)]))


def test_an_undamaged_folder_recomputes_nothing(suspended: SuspendedSessions, start: Start, tmp_path: Path) -> None:
    assert suspended.continue_all(start(suspended.copy(tmp_path / "kv"))) == 0


@pytest.mark.parametrize("harm", [flip_used, cut_used, remove])
def test_damaged_blocks_are_recomputed(suspended: SuspendedSessions, start: Start, tmp_path: Path, harm: Harm) -> None:
    rng, again = random.Random(1), 0
    for _ in range(2 if harm is remove else 8):
        folder = suspended.copy(tmp_path / "kv")
        for path in block_files(folder):
            harm(path, rng)
        llm = start(folder)
        again += suspended.continue_all(llm)
        llm.shutdown()
    assert again > 0, "the damage affected a session"


def test_blocks_damaged_while_the_engine_runs_are_recomputed(
    suspended: SuspendedSessions, start: Start, tmp_path: Path
) -> None:
    folder = suspended.copy(tmp_path / "kv")
    llm = start(folder)
    for path in block_files(folder):
        slots = segments.HEADER.unpack(path.read_bytes()[: segments.HEADER.size])[2]
        with path.open("r+b") as file:
            for slot in range(30):
                file.seek(64 + 64 * slots + 8192 * slot + 77)
                file.write(b"\x55\xaa")
    assert suspended.continue_all(llm) > 0
    assert disk_stats(llm).damaged > 0
    for name in suspended.tokens:
        llm.sessions.get(name).suspend()
    llm.reset_prefix_cache()
    llm.shutdown()
    llm = start(folder)  # recomputed blocks were written again
    for name, tokens in suspended.tokens.items():
        session = llm.sessions.resume(name)
        out = session.generate(SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert out.num_cached_tokens == len(tokens) + 7


@pytest.mark.parametrize("harm", [flip, cut, wipe])
def test_a_damaged_log_loses_sessions_and_names_them(
    suspended: SuspendedSessions, start: Start, tmp_path: Path, harm: Harm
) -> None:
    rng, lost = random.Random(3), 0
    for _ in range(12):  # about one flipped bit in four is one that a session needs
        folder = suspended.copy(tmp_path / "kv")
        path = rng.choice([path for path in (folder / "sessions").iterdir() if path.suffix == ".log"])
        # Space is reserved ahead: after the last frame there are zeros.
        used = len(path.read_bytes().rstrip(b"\0"))
        os.truncate(path, used)
        harm(path, rng)
        llm = start(folder)
        gone = {info.name for info in llm.sessions if info.lost}
        assert {info.name for info in llm.sessions} == set(LENGTHS), "no session is missing without an error"
        for name in gone:
            with pytest.raises(SessionLostError, match=f"'{name}'"):
                llm.sessions.resume(name)
            llm.sessions.delete(name)
        suspended.continue_all(llm, *gone)
        session = llm.sessions.create("after", [5, 6, 7])
        session.generate(GREEDY)
        lost += len(gone)
        llm.shutdown()
    assert lost > 0, "the damage affected a session"


def test_a_disk_tier_too_small_for_all_blocks(suspended: SuspendedSessions, start: Start, tmp_path: Path) -> None:
    llm = start(tmp_path / "kv", kv_disk_size=6 * 8300 / 2**30, swap_space=8 * 8192 / 2**30)
    for name, tokens in suspended.tokens.items():
        llm.sessions.create(name, tokens)
    suspended.continue_all(llm)
    for name in suspended.tokens:
        llm.sessions.get(name).suspend()
    stats = disk_stats(llm)
    assert stats.evicted + stats.refused > 0 and stats.used_bytes <= stats.capacity
    llm.reset_prefix_cache()
    for name, tokens in suspended.tokens.items():
        assert llm.sessions.get(name).tokens == tokens + suspended.next[name]
        llm.sessions.get(name).generate(GREEDY)


def test_a_disk_full_of_blocks_while_the_engine_runs(
    suspended: SuspendedSessions, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(tmp_path / "kv")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments, "write_all", full)
    monkeypatch.setattr(segments, "reserve", full)
    for name, tokens in suspended.tokens.items():
        llm.sessions.create(name, tokens[: LENGTHS[name]])
        llm.sessions.get(name).generate(GREEDY)
        info = llm.sessions.get(name).suspend()
        assert info.phase == "asleep", "suspended although the disk is full"
    assert disk_stats(llm).failed > 0 and disk_stats(llm).blocks == 0
    assert suspended.continue_all(llm) == 0, "host memory still has them"
    for name, tokens in suspended.tokens.items():
        fork = llm.sessions.get(name).fork(f"{name}-again", len(tokens))
        llm.sessions.delete(name)
        drop_caches(llm)
        fork.generate(GREEDY)
        assert fork.tokens == tokens + suspended.next[name], "computed again"


def test_a_disk_full_of_tokens_is_an_error_and_changes_nothing(
    suspended: SuspendedSessions, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = suspended.copy(tmp_path / "kv")
    llm = start(folder)
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    disk = SmallDisk(monkeypatch, folder, used)
    monkeypatch.setattr(segments, "reserve", lambda fd, size: os.posix_fallocate(fd, 0, size))
    made = 0
    with pytest.raises(StoreFullError, match="disk is full"):
        while True:
            llm.sessions.create(f"filler-{made}", [5 + made % 100] * 200)
            made += 1
    assert f"filler-{made}" not in llm.sessions
    with pytest.raises(StoreFullError):
        llm.sessions.get("short").append([5] * 120)
    assert llm.sessions.get("short").tokens == suspended.tokens["short"]
    llm.generate("hello", GREEDY, use_tqdm=False)
    disk.size += 10 << 20
    suspended.continue_all(llm)


def test_a_folder_that_cannot_be_written(
    suspended: SuspendedSessions, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match=r"file.*Choose a folder that can be written"):
        start(tmp_path / "file")
    folder, real = suspended.copy(tmp_path / "kv"), os.open

    def refuse(path: Any, flags: int, *rest: int, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY) and str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreUnavailableError, match="read-only file system"):
            start(folder)
    assert suspended.continue_all(start(folder)) == 0


def test_a_disk_that_becomes_read_only_while_the_engine_runs(
    suspended: SuspendedSessions, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(suspended.copy(tmp_path / "kv"))

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        for act in (lambda: llm.sessions.get("short").append([5]), lambda: llm.sessions.create("new", [5])):
            with pytest.raises(StoreError):
                act()
        llm.generate("hello", GREEDY, use_tqdm=False)
        output = llm.sessions.get("short").generate(GREEDY)
        assert output.error is not None and "not appended to session 'short'" in output.error
        assert output.outputs[0].finish_reason == "error"
        assert llm.sessions.get("short").tokens == suspended.tokens["short"]
        llm.sessions.get("short").suspend()


def test_another_dtype_block_size_or_model_finds_no_blocks_but_all_tokens(
    suspended: SuspendedSessions, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    folder = suspended.copy(tmp_path / "kv")
    sibling = write_tiny_model(tmp_path / "sibling")
    config = json.loads((sibling / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0  # same shapes, other weights
    (sibling / "config.json").write_text(json.dumps(config))
    for settings in ({"block_size": 8}, {"dtype": "bfloat16"}, {"model": sibling}):
        llm = start(folder, **settings)
        expected = answers(llm, suspended.tokens)
        llm.reset_prefix_cache()
        if "block_size" in settings:
            assert expected == suspended.next
        for name, tokens in suspended.tokens.items():
            fork = llm.sessions.get(name).fork("fork")
            output = fork.generate(GREEDY)
            assert output.num_cached_tokens == 0, f"{settings} used blocks of another configuration"
            assert fork.tokens == tokens + expected[name]
            fork.delete()
            llm.reset_prefix_cache()
    assert suspended.continue_all(start(folder)) == 0, "blocks of the first are still there"
    (sibling / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    llm = start(folder, sibling, load_format="dummy")
    with pytest.raises(ValidationError, match="another model"):
        llm.sessions.get("short").generate(GREEDY)
    assert llm.sessions.get("short").tokens == suspended.tokens["short"] + suspended.next["short"]


def test_a_second_process_gets_an_error_that_names_the_owner(
    suspended: SuspendedSessions, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    folder = suspended.copy(tmp_path / "kv")
    llm = start(folder)
    program = f"""
from quire import LLM
LLM({str(tiny_model)!r}, swap_space=0.002, kv_disk={str(folder)!r}, device="cpu", num_gpu_blocks_override=64)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "StoreInUseError" in line and f"in use by process {os.getpid()}" in line and "another folder" in line
    assert suspended.continue_all(llm) == 0
