"""Reads and writes while the loop continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.offload.io_threads import IOTask, IOThreads

BLOCK = 4096
KEYS = [blake3(bytes([i])).digest() for i in range(16)]


def payload_of(key: bytes) -> memoryview:
    return memoryview(blake3(key).digest(BLOCK))


def finish(io: IOThreads) -> list[IOTask]:
    done, end = [], time.monotonic() + 20
    while io.pending and time.monotonic() < end:
        io.sleep(1)
        done += io.poll()
    return done


@pytest.fixture
def io(tmp_path: Path) -> Iterator[IOThreads]:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        io = IOThreads(store)
        yield io
        io.close()


def test_written_blocks_are_read_and_every_task_is_reported_once(io: IOThreads) -> None:
    written = [io.submit_write(key, payload_of(key)) for key in KEYS[:8]]
    done = finish(io)
    assert {id(task) for task in done} == {id(task) for task in written}
    assert len(done) == 8 and all(task.ok for task in done)
    buffers = {key: bytearray(BLOCK) for key in KEYS}
    read = [io.submit_read(key, memoryview(buffers[key])) for key in KEYS]
    finish(io)
    assert [task.ok for task in read] == [True] * 8 + [False] * 8
    assert all(buffers[key] == payload_of(key) for key in KEYS[:8])
    assert io.poll() == []


def test_the_loop_never_waits_and_reads_overtake_writes(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        store.write(KEYS[0], payload_of(KEYS[0]))
        io = IOThreads(store, threads=1)
        gate = threading.Event()
        blocked = io.submit_call(gate.wait)
        writes = [io.submit_write(key, payload_of(key)) for key in KEYS[1:4]]
        into = bytearray(BLOCK)
        read = io.submit_read(KEYS[0], memoryview(into))
        assert io.poll() == []
        io.sleep(0.01)
        assert io.poll() == []
        gate.set()
        begin = time.monotonic()
        io.sleep(20)
        assert time.monotonic() - begin < 10, "a finished task ends the sleep"
        done = finish(io)
        assert done == [blocked, read, *writes]
        io.close()


def test_a_failed_call_is_reported_and_the_thread_continues(io: IOThreads) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    task = io.submit_call(fail)
    finish(io)
    assert not task.ok and str(task.error) == "no"
    assert io.submit_write(KEYS[0], memoryview(b"too short")).error is None
    finish(io)
    good = io.submit_write(KEYS[0], payload_of(KEYS[0]))
    finish(io)
    assert good.ok


def test_closing_finishes_submitted_tasks(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        io = IOThreads(store)
        tasks = [io.submit_write(key, payload_of(key)) for key in KEYS]
        io.close()
        assert all(task.ok for task in tasks)
        with pytest.raises(RuntimeError, match="closed"):
            io.submit_write(KEYS[0], payload_of(KEYS[0]))
