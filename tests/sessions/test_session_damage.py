"""Sessions on a failing disk: whole, or lost and named; never wrong."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import SessionLostError, StoreError, StoreFullError, StoreUnavailableError
from quire.kvcache.offload.disk import files
from quire.kvcache.offload.disk.store import DiskStore
from quire.sessions.log import SessionStore
from quire.sessions.log import format as formats
from quire.sessions.log import log as logs
from quire.sessions.log.format import Frame, FrameKind, encode, scan
from tests.sessions import storm

NONCE = bytes(range(32))


def make(folder: Path, seed: int, operations: int) -> storm.Model:
    """A store after some random operations, closed."""
    rng, model = random.Random(seed), storm.Model()
    with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as store:
        for _ in range(operations):
            operation = storm.choose(rng, model)
            storm.perform(operation, store, durable=False)
            storm.apply(operation, model)
    return model


def check(folder: Path, model: storm.Model) -> set[str]:
    """Each session is unchanged, or lost by name; returns the lost ones. The store still works."""
    with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as store:
        lost = set(storm.lost(store))
        assert lost <= set(model), "only sessions that were there can be lost"
        for name, session in model.items():
            if name in lost:
                with pytest.raises(SessionLostError, match=name):
                    store.tokens(name)
            else:
                assert store.tokens(name).tolist() == session["tokens"]
        assert len(store) == len(model), "no session is missing"
        store.create("after", [1, 2, 3])
    with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as store:
        assert set(storm.lost(store)) == lost, "a lost session stays lost"
        for name in lost:
            left = store.recover(name)
            assert store.tokens(name).tolist() == model[name]["tokens"][: left.num_tokens], "what is left is a prefix"
            store.append(name, [5])
            store.delete(name)
        assert storm.lost(store) == {}
        assert store.tokens("after").tolist() == [1, 2, 3]
    return lost


def damage_everywhere(tmp_path: Path, seed: int, rounds: int, harm: Callable[[Path, random.Random], None]) -> int:
    model = make(tmp_path / "whole", seed, operations=60)
    rng, lost = random.Random(seed), 0
    for i in range(rounds):
        folder = tmp_path / f"copy-{i}"
        shutil.copytree(tmp_path / "whole", folder)
        victims = [path for path in folder.iterdir() if path.suffix in (".log", ".sum")]
        harm(rng.choice(victims), rng)
        lost += len(check(folder, model))
        shutil.rmtree(folder)
    return lost


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def wipe(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    size = min(rng.choice([64, 512, 4096]), len(data) - start)
    data[start : start + size] = rng.choice([bytes(size), rng.randbytes(size)])
    path.write_bytes(data)


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [flip, cut, wipe, remove])
def test_a_damaged_file_loses_named_sessions_and_no_others(
    tmp_path: Path, harm: Callable[[Path, random.Random], None]
) -> None:
    lost = damage_everywhere(tmp_path, seed=3, rounds=40 if harm is flip else 20, harm=harm)
    assert lost > 0, "some damage lost a session"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
@pytest.mark.parametrize("harm", [flip, cut, wipe, remove])
def test_more_damage(tmp_path: Path, harm: Callable[[Path, random.Random], None], seed: int) -> None:
    assert damage_everywhere(tmp_path, seed, 150, harm) > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_after_a_crash_loses_a_named_session_or_the_last_operation(tmp_path: Path, seed: int) -> None:
    rng, model, before = random.Random(seed), storm.Model(), storm.Model()
    store = SessionStore.open(tmp_path / "whole", file_bytes=storm.FILE_BYTES)
    for _ in range(40):
        before = {name: dict(session) for name, session in model.items()}
        operation = storm.choose(rng, model)
        storm.perform(operation, store, durable=True)
        storm.apply(operation, model)
    for i in range(25):
        folder = tmp_path / f"copy-{i}"
        shutil.copytree(tmp_path / "whole", folder)
        flip(rng.choice([path for path in folder.iterdir() if path.suffix in (".log", ".sum")]), rng)
        with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as after:
            lost = storm.lost(after)
            found = {s.name: after.tokens(s.name).tolist() for s in after.page(limit=100).sessions if not s.lost}
        for state in (model, before):
            if {*found, *lost} == set(state) and all(found[name] == state[name]["tokens"] for name in found):
                break
        else:
            raise AssertionError(f"neither the last state nor the one before, with {lost} lost")
        shutil.rmtree(folder)
    store.close()


def test_a_flipped_bit_outside_a_payload_loses_nothing() -> None:
    frames = [
        Frame(FrameKind.STATE, 1, 0, b"first", "a"),
        Frame(FrameKind.APPEND, 1, 1, b"second"),
        Frame(FrameKind.CHUNK, 2, 0, b"x"),
    ]
    data = b"".join(encode(frame, 0, NONCE) for frame in frames)
    whole = list(scan(data, 0, NONCE))
    assert [(f.kind, f.id, f.seq, f.payload, f.name) for f in whole] == [tuple(f) for f in
        [(f.kind, f.id, f.seq, f.payload, f.name) for f in frames]]  # fmt: skip
    for bit in range(8 * len(data)):
        harmed = bytearray(data)
        harmed[bit // 8] ^= 1 << bit % 8
        found = list(scan(bytes(harmed), 0, NONCE))
        assert [(f.kind, f.id, f.seq, f.name) for f in found] == [(f.kind, f.id, f.seq, f.name) for f in whole]
        bad = [f for f in found if not f.whole]
        assert len(bad) <= 1
        for before, after in zip(whole, found, strict=True):
            assert after.payload == (before.payload if after.whole else b"")
            if not after.whole:
                assert before.offset + 56 <= bit // 8 < before.end - 56, "only a payload, or its padding, is ever lost"


def test_a_payload_that_looks_like_a_frame_is_not_parsed_as_one() -> None:
    forged = encode(Frame(FrameKind.STATE, 99, 0, b"not mine", "victim"), 0, bytes(32))
    data = bytearray(encode(Frame(FrameKind.APPEND, 1, 1, b"." * 3 + forged), 0, NONCE))
    assert [f.id for f in scan(bytes(data), 0, NONCE)] == [1]
    data[0] ^= 1
    data[-1] ^= 1
    assert [f.kind for f in scan(bytes(data), 0, NONCE)] == [None]


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_loss_everything_durable_is_there(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any part of the unsynced data may be there; all synced data is."""
    rng = random.Random(seed)
    synced: dict[int, bytes] = {}
    """inode → durable content"""

    def note(fd: int) -> None:
        synced[os.fstat(fd).st_ino] = os.pread(fd, os.fstat(fd).st_size, 0)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None if os.path.isdir(f"/proc/self/fd/{fd}") else note(fd))
    model, states = storm.Model(), [storm.Model()]
    folder = tmp_path / "sessions"
    store = SessionStore.open(folder, file_bytes=storm.FILE_BYTES)
    promised = 0
    for round_ in range(80):
        operation = storm.choose(rng, model)
        durable = rng.random() < 0.3
        storm.perform(operation, store, durable)
        storm.apply(operation, model)
        states.append({name: dict(session) for name, session in model.items()})
        promised = len(states) - 1 if durable else promised
        if rng.random() < 0.25:
            broken = tmp_path / f"after-{round_}"
            broken.mkdir()
            for path in folder.iterdir():
                before, now = synced.get(path.stat().st_ino, b""), path.read_bytes()
                (broken / path.name).write_bytes(_partly(before, now, rng))
            with SessionStore.open(broken, file_bytes=storm.FILE_BYTES) as after:
                assert storm.lost(after) == {}
                assert storm.observe(after) in states[promised:]
    store.close()


def _partly(before: bytes, now: bytes, rng: random.Random) -> bytes:
    """Sectors that changed since the last sync, each old or new; the length likewise."""
    size = rng.choice([len(before), len(now)])
    before, now = before.ljust(size, b"\0"), now.ljust(size, b"\0")
    sectors = range(0, size, 512)
    return b"".join((rng.choice([before, now]))[i : min(i + 512, size)] for i in sectors)


class SmallDisk:
    """A disk of `size` bytes, as the session log sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, size: int) -> None:
        self.root = root
        self.size = size
        real_write, real_reserve = logs.write_all, os.posix_fallocate

        def write(fd: int, data: bytes, offset: int) -> None:
            try:
                self.grow(fd, offset + len(data))
            except OSError:
                real_write(fd, data[: len(data) // 2], offset)
                raise
            real_write(fd, data, offset)

        def reserve(fd: int, offset: int, size: int) -> None:
            self.grow(fd, offset + size)
            real_reserve(fd, offset, size)

        monkeypatch.setattr(logs, "write_all", write)
        monkeypatch.setattr(files, "write_all", write)
        monkeypatch.setattr(os, "posix_fallocate", reserve)

    def grow(self, fd: int, size: int) -> None:
        used = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used + max(0, size - os.fstat(fd).st_size) > self.size:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seed", range(4))
def test_on_a_full_disk_a_refused_operation_changes_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, model = random.Random(seed), storm.Model()
    disk = SmallDisk(monkeypatch, tmp_path, 30_000)
    refused = 0
    store = SessionStore.open(tmp_path, file_bytes=storm.FILE_BYTES)
    for i in range(150):
        operation = storm.choose(rng, model)
        try:
            storm.perform(operation, store, durable=rng.random() < 0.5)
        except StoreFullError as error:
            assert "disk is full" in str(error)
            refused += 1
            assert operation[0] != "delete", "deletions can use the reserve"
            if refused % 20 == 0:
                disk.size += 10_000
        else:
            storm.apply(operation, model)
        if i % 10 == 0:
            assert storm.observe(store) == model
        if i % 30 == 29:
            store.close()
            store = SessionStore.open(tmp_path, file_bytes=storm.FILE_BYTES)
            assert storm.observe(store) == model
    store.close()
    assert refused > 0


def test_a_full_disk_drops_kv_and_never_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes([1]) * 32
    with DiskStore.open(tmp_path / "kv", b"model", 4096, 1 << 20) as kv:
        assert kv.write(key, memoryview(bytes(4096)))
        SmallDisk(monkeypatch, tmp_path, kv.stats().used_bytes)
        with SessionStore.open(tmp_path / "sessions", make_room=kv.free_space) as store:
            store.create("a", range(1000))
            assert store.tokens("a").tolist() == list(range(1000))
        assert not kv.has(key)


def test_deleting_on_a_full_disk_frees_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(monkeypatch, tmp_path, 100_000)
    with SessionStore.open(tmp_path, file_bytes=storm.FILE_BYTES) as store:
        made = 0
        with pytest.raises(StoreFullError, match="delete sessions"):
            while True:
                store.create(f"s{made}", range(made, made + 300))
                made += 1
        for i in range(0, made, 2):
            store.delete(f"s{i}")
        for i in range(made // 8):
            store.create(f"t{i}", range(5000 + i, 5300 + i))
        assert all(store.tokens(f"s{i}").tolist() == list(range(i, i + 300)) for i in range(1, made, 2))


def test_a_disk_that_cannot_sync_accepts_no_writes_and_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SessionStore.open(tmp_path) as store:
        store.create("a", range(300))

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreError, match="cannot sync"):
                store.append("a", [1])
        with pytest.raises(StoreError, match="read-only until"):
            store.append("a", [2])
        assert store.tokens("a").tolist()[:300] == list(range(300))
    with SessionStore.open(tmp_path) as store:
        assert store.tokens("a").tolist()[:300] == list(range(300))
        store.append("a", [3])


def test_a_read_only_folder_is_an_error_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailableError, match="read-only"):
        SessionStore.open(tmp_path)


def test_a_log_of_a_newer_quire_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(formats, "FILE_VERSION", 2)
        with SessionStore.open(tmp_path) as store:
            store.create("a", [1])
    before = (tmp_path / "00000001.log").read_bytes()
    with pytest.raises(StoreUnavailableError, match="format 2"):
        SessionStore.open(tmp_path)
    assert (tmp_path / "00000001.log").read_bytes() == before


def test_tokens_damaged_while_the_store_is_open_are_noticed_when_read(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.create("a", range(600))
        store.create("b", range(10))
        path = tmp_path / "00000001.log"
        data = path.read_bytes()
        at = data.index((300).to_bytes(4, "little"))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        with pytest.raises(SessionLostError, match="'a'"):
            store.tokens("a")
        assert list(storm.lost(store)) == ["a"]
        assert store.tokens("b").tolist() == list(range(10))
        store.recover("a")
        assert store.tokens("a").tolist() == list(range(256))
