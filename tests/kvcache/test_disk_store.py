"""The block store on disk: a read returns exactly what was written, or nothing."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import ConfigError, StoreInUseError, StoreUnavailableError
from quire.kvcache.offload.disk import segments
from quire.kvcache.offload.disk import store as stores
from quire.kvcache.offload.disk.segments import file_bytes
from quire.kvcache.offload.disk.store import DiskStore

BLOCK = 192
KEYS = [blake3(bytes([i])).digest() for i in range(12)]


def payload_of(key: bytes, size: int = BLOCK) -> memoryview:
    return memoryview(blake3(key).digest(size))


def read(store: DiskStore, key: bytes) -> bytes | None:
    into = bytearray(store.block_bytes)
    return bytes(into) if store.read(key, memoryview(into)) else None


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks a file, so that a few blocks make several files."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", file_bytes(BLOCK, 3))
    monkeypatch.setattr(segments, "LARGEST_SEGMENT_BYTES", file_bytes(BLOCK, 3))


@pytest.fixture
def store(tmp_path: Path, small_segments: None) -> Iterator[DiskStore]:
    with DiskStore.open(tmp_path / "kv", b"model", BLOCK, 2 * file_bytes(BLOCK, 3)) as store:
        yield store


class StoreMachine(RuleBasedStateMachine):
    """Blocks are written, read, pinned, evicted and found again after restarts; the model knows the right content."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="quire-kv-"))
        self.capacity = 2 * file_bytes(BLOCK, 3) + 10
        self.sizes = segments.SEGMENT_BYTES, segments.LARGEST_SEGMENT_BYTES
        segments.SEGMENT_BYTES = segments.LARGEST_SEGMENT_BYTES = file_bytes(BLOCK, 3)
        self.present: list[bytes] = []
        """Unpinned and pinned blocks, the least recently used first."""
        self.pins: dict[bytes, int] = {}
        self.store = self.open()

    def open(self) -> DiskStore:
        return DiskStore.open(self.folder, b"model", BLOCK, self.capacity)

    def teardown(self) -> None:
        self.store.close()
        segments.SEGMENT_BYTES, segments.LARGEST_SEGMENT_BYTES = self.sizes
        shutil.rmtree(self.folder)

    @rule(key=st.sampled_from(KEYS))
    def write(self, key: bytes) -> None:
        kept = self.store.write(key, payload_of(key))
        if key in self.present:
            self.present.remove(key)
        elif len(self.present) == 6:
            unpinned = [other for other in self.present if other not in self.pins]
            if unpinned:
                self.present.remove(unpinned[0])
            elif key in self.pins:
                self.present.remove(self.present[0])
            else:
                assert not kept, "an unpinned block never replaces a pinned one"
                return
        assert kept
        self.present.append(key)

    @rule(key=st.sampled_from(KEYS))
    def read(self, key: bytes) -> None:
        found = read(self.store, key)
        assert found == (payload_of(key) if key in self.present else None)
        if key in self.present:
            self.present.remove(key)
            self.present.append(key)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: bytes) -> None:
        self.store.pin([key])
        self.pins[key] = self.pins.get(key, 0) + 1
        if self.pins[key] == 1 and key in self.present:
            self.present.remove(key)
            self.present.append(key)

    @rule(key=st.sampled_from(KEYS))
    def unpin(self, key: bytes) -> None:
        if key not in self.pins:
            with pytest.raises(RuntimeError):
                self.store.unpin([key])
            return
        self.store.unpin([key])
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            if key in self.present:
                self.present.remove(key)
                self.present.append(key)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: bytes) -> None:
        self.store.discard([key])
        if key in self.present:
            self.present.remove(key)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        # Unpinned blocks come back before pinned ones, each in its order; sessions pin theirs again.
        self.present.sort(key=lambda key: key in self.pins)
        for key, count in self.pins.items():
            self.store.pin([key] * count)
        self.present.sort(key=lambda key: list(self.pins).index(key) if key in self.pins else -1)

    @invariant()
    def the_store_holds_what_the_model_holds_within_its_budget(self) -> None:
        assert {key for key in KEYS if self.store.has(key)} == set(self.present)
        assert len(self.store) == len(self.present)
        assert disk_bytes(self.folder) <= self.capacity
        assert self.store.stats().used_bytes == disk_bytes(self.folder)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_of_another_model_block_size_or_version_are_never_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, size = KEYS[0], 1 << 20
    with DiskStore.open(tmp_path, b"model", BLOCK, size) as store:
        assert store.write(key, payload_of(key))
    for fingerprint, block in ((b"model2", BLOCK), (b"", BLOCK), (b"model", BLOCK + 1), (b"model", BLOCK - 1)):
        with DiskStore.open(tmp_path, fingerprint, block, size) as store:
            assert read(store, key) is None
    with monkeypatch.context() as patch:
        patch.setattr(stores, "VERSION", 2)
        with DiskStore.open(tmp_path, b"model", BLOCK, size) as store:
            assert read(store, key) is None
    with DiskStore.open(tmp_path, b"model", BLOCK, size) as store:
        assert read(store, key) == payload_of(key)


def test_a_file_from_another_models_folder_is_removed(tmp_path: Path) -> None:
    for model in (b"one", b"two"):
        with DiskStore.open(tmp_path / model.decode(), model, BLOCK, 1 << 20) as store:
            store.write(KEYS[0], payload_of(KEYS[0 if model == b"one" else 1]))
    (theirs,) = (tmp_path / "one").rglob("*.kv")
    (ours,) = (tmp_path / "two").rglob("*.kv")
    shutil.copy(theirs, ours)
    with DiskStore.open(tmp_path / "two", b"two", BLOCK, 1 << 20) as store:
        assert read(store, KEYS[0]) is None
        assert store.write(KEYS[0], payload_of(KEYS[0]))


def test_files_of_other_models_are_removed_first_the_oldest_before_others(tmp_path: Path, small_segments: None) -> None:
    capacity = 2 * file_bytes(BLOCK, 3)
    with DiskStore.open(tmp_path, b"old", BLOCK, capacity) as store:
        for key in KEYS[:6]:
            assert store.write(key, payload_of(key))
    with DiskStore.open(tmp_path, b"new", BLOCK, capacity) as store:
        assert store.write(KEYS[0], payload_of(KEYS[0]))
        assert disk_bytes(tmp_path) <= capacity
    with DiskStore.open(tmp_path, b"old", BLOCK, capacity) as store:
        assert len(store) == 3
        assert all(read(store, key) == payload_of(key) for key in KEYS[:6] if store.has(key))


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_anywhere_costs_blocks_but_never_changes_one(
    tmp_path: Path, seed: int, small_segments: None
) -> None:
    rng = random.Random(seed)
    capacity = 2 * file_bytes(BLOCK, 3)
    with DiskStore.open(tmp_path, b"model", BLOCK, capacity) as store:
        for key in KEYS[:6]:
            store.write(key, payload_of(key))
    files = sorted(tmp_path.rglob("*.kv"))
    pristine = [path.read_bytes() for path in files]
    survivors = 0
    for _ in range(60):
        for path, data in zip(files, pristine, strict=True):
            path.write_bytes(data)
        victim = rng.randrange(len(files))
        data = bytearray(pristine[victim])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        files[victim].write_bytes(data)
        with DiskStore.open(tmp_path, b"model", BLOCK, capacity) as store:
            found = [read(store, key) for key in KEYS[:6]]
            assert all(block in (None, payload_of(key)) for key, block in zip(KEYS, found, strict=False))
            survivors += sum(block is not None for block in found)
            assert all(store.write(key, payload_of(key)) for key in KEYS[:6]), "a lost block can be written again"
            assert all(read(store, key) == payload_of(key) for key in KEYS[:6])
    assert survivors >= 60 * 3, "a flip costs at most one file, mostly one block"


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200, 300, 500, 700])
def test_a_truncated_file_loses_the_truncated_blocks(tmp_path: Path, length: int) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, file_bytes(BLOCK, 3)) as store:
        for key in KEYS[:3]:
            store.write(key, payload_of(key))
    (path,) = tmp_path.rglob("*.kv")
    os.truncate(path, length)
    with DiskStore.open(tmp_path, b"model", BLOCK, file_bytes(BLOCK, 3)) as store:
        found = [read(store, key) for key in KEYS[:3]]
        assert all(block in (None, payload_of(key)) for key, block in zip(KEYS, found, strict=False))
        assert all(store.write(key, payload_of(key)) for key in KEYS[:3])
        assert all(read(store, key) == payload_of(key) for key in KEYS[:3])


def test_a_block_half_overwritten_at_a_crash_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"""
import os, sys
from quire.kvcache.offload.disk import segments
from tests.kvcache.test_disk_store import *
store = DiskStore.open({str(tmp_path)!r}, b"model", BLOCK, file_bytes(BLOCK, 1))
assert store.write(KEYS[0], payload_of(KEYS[0]))
whole = segments.write_all
def half(fd, data, offset):
    whole(fd, bytes(data)[: len(data) // 2], offset)
    os.kill(os.getpid(), 9)
segments.write_all = half
store.write(KEYS[1], payload_of(KEYS[1]))
"""
    assert subprocess.run([sys.executable, "-c", child], cwd=Path(__file__).parents[2]).returncode == -9
    with DiskStore.open(tmp_path, b"model", BLOCK, file_bytes(BLOCK, 1)) as store:
        assert read(store, KEYS[0]) is None
        assert read(store, KEYS[1]) is None
        assert store.write(KEYS[1], payload_of(KEYS[1]))
        assert read(store, KEYS[1]) == payload_of(KEYS[1])


def test_a_full_disk_stops_growth_and_nothing_else(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 10 * file_bytes(BLOCK, 3)) as store:
        assert all(store.write(key, payload_of(key)) for key in KEYS[:3])

        def full(fd: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(segments, "reserve", full)
        assert all(store.write(key, payload_of(key)) for key in KEYS[3:6]), "older blocks are evicted"
        assert len(store) == 3
        assert store.stats().is_paused
        assert [path.name for path in (tmp_path).rglob("*") if path.name.endswith(".new")] == []
        assert read(store, KEYS[5]) == payload_of(KEYS[5])
        monkeypatch.undo()
        store._files.full_until = 0.0
        assert store.write(KEYS[6], payload_of(KEYS[6]))
        assert len(store) == 4, "it grows again when the disk has space again"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_is_a_block_not_kept(store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert store.write(KEYS[0], payload_of(KEYS[0]))

    def fail(fd: int, data: object, offset: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_all", fail)
        assert not store.write(KEYS[1], payload_of(KEYS[1]))
    assert not store.has(KEYS[1])
    assert store.stats().failed == 1
    assert not store.write(KEYS[1], payload_of(KEYS[1])), "nothing is written for a while after an error"
    assert read(store, KEYS[0]) == payload_of(KEYS[0])
    store._paused_until = 0.0
    assert store.write(KEYS[1], payload_of(KEYS[1]))


def test_a_failed_read_is_an_absent_block(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(KEYS[0], payload_of(KEYS[0]))

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "read_into", fail)
        assert read(store, KEYS[0]) is None
    assert not store.has(KEYS[0])


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_an_error_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailableError, match=str(tmp_path)):
        DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20)


def test_a_path_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailableError, match="file"):
        DiskStore.open(tmp_path / "file", b"model", BLOCK, 1 << 20)
    with pytest.raises(ConfigError, match="kv_disk_size"):
        DiskStore.open(tmp_path / "kv", b"model", BLOCK, BLOCK)


def test_a_second_process_gets_an_error_that_names_the_owner(tmp_path: Path) -> None:
    child = f"""
from quire.kvcache.offload.disk.store import DiskStore
store = DiskStore.open({str(tmp_path)!r}, b"model", {BLOCK}, 1 << 20)
print("open", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    with pytest.raises(StoreInUseError, match=f"process {process.pid}") as caught:
        DiskStore.open(tmp_path, b"other model", BLOCK, 1 << 20)
    assert caught.value.pid == process.pid
    process.kill()
    process.communicate()
    store = DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20)
    with pytest.raises(StoreInUseError, match=f"process {os.getpid()}"):
        DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20)
    store.close()
    DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20).close()


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path, small_segments: None) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 4 * file_bytes(BLOCK, 3)) as store:
        for key in KEYS:
            store.write(key, payload_of(key))
    with DiskStore.open(tmp_path, b"model", BLOCK, 2 * file_bytes(BLOCK, 3)) as store:
        assert disk_bytes(tmp_path) <= 2 * file_bytes(BLOCK, 3)
        assert len(store) == 6
        assert all(read(store, key) == payload_of(key) for key in KEYS if store.has(key))


def test_freed_space_is_free_on_the_disk_and_pinned_blocks_stay_longest(store: DiskStore, tmp_path: Path) -> None:
    store.pin(KEYS[:3])
    for key in KEYS[:6]:
        store.write(key, payload_of(key))
    before = disk_bytes(tmp_path)
    freed = store.free_space(1)
    assert freed == file_bytes(BLOCK, 3) == before - disk_bytes(tmp_path)
    assert [key for key in KEYS if store.has(key)] == KEYS[:3]
    assert not store.write(KEYS[7], payload_of(KEYS[7])), "freed space is not used again at once"


def test_threads_read_and_write_at_once_and_none_gets_a_wrong_block(store: DiskStore) -> None:
    wrong: list[bytes] = []
    hits: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        count = 0
        for _ in range(300):
            key = rng.choice(KEYS)
            if rng.random() < 0.5:
                store.write(key, payload_of(key))
            else:
                found = read(store, key)
                count += found is not None
                if found not in (None, payload_of(key)):
                    wrong.append(key)
        hits.append(count)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert not wrong
    assert stats.damaged == 0, "a slot is not reused while it is being read"
    assert stats.hits == sum(hits) > 0
    assert stats.evicted > 0


def test_a_block_of_another_size_is_refused(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="192"):
        store.write(KEYS[0], memoryview(bytes(BLOCK + 1)))
    with pytest.raises(ValueError, match="192"):
        store.read(KEYS[0], memoryview(bytearray(BLOCK - 1)))
    with pytest.raises(ValueError, match="32 bytes"):
        store.write(b"short", payload_of(KEYS[0]))
