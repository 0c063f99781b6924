"""Reads and writes beside the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from quire.kvcache.offload.disk.io_threads import DiskIO, Ticket
from quire.kvcache.offload.disk.store import DiskStore

BLOCK = 4096
KEYS = [blake3(bytes([i])).digest() for i in range(16)]


def payload_of(key: bytes) -> memoryview:
    return memoryview(blake3(key).digest(BLOCK))


def finish(transfers: DiskIO) -> list[Ticket]:
    done, end = [], time.monotonic() + 20
    while transfers.pending and time.monotonic() < end:
        done += transfers.wait(1)
    return done


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[DiskIO]:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        transfers = DiskIO(store)
        yield transfers
        transfers.close()


def test_what_was_written_is_read_and_every_ticket_comes_back_once(transfers: DiskIO) -> None:
    written = [transfers.submit_write(key, payload_of(key)) for key in KEYS[:8]]
    done = finish(transfers)
    assert {id(ticket) for ticket in done} == {id(ticket) for ticket in written}
    assert len(done) == 8 and all(ticket.ok for ticket in done)
    buffers = {key: bytearray(BLOCK) for key in KEYS}
    read = [transfers.submit_read(key, memoryview(buffers[key])) for key in KEYS]
    finish(transfers)
    assert [ticket.ok for ticket in read] == [True] * 8 + [False] * 8
    assert all(buffers[key] == payload_of(key) for key in KEYS[:8])
    assert transfers.poll() == [] == transfers.wait()


def test_the_loop_never_waits_and_reads_overtake_writes(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        store.write(KEYS[0], payload_of(KEYS[0]))
        woken = threading.Event()
        transfers = DiskIO(store, threads=1, on_finished=woken.set)
        gate = threading.Event()
        blocked = transfers.submit_call(gate.wait)
        writes = [transfers.submit_write(key, payload_of(key)) for key in KEYS[1:4]]
        into = bytearray(BLOCK)
        read = transfers.submit_read(KEYS[0], memoryview(into))
        assert transfers.poll() == []
        assert transfers.wait(0.01) == []
        gate.set()
        done = finish(transfers)
        assert done == [blocked, read, *writes]
        assert woken.is_set()
        transfers.close()


def test_a_call_that_fails_says_so_and_the_thread_lives_on(transfers: DiskIO) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    ticket = transfers.submit_call(fail)
    finish(transfers)
    assert not ticket.ok and str(ticket.error) == "no"
    assert transfers.submit_write(KEYS[0], memoryview(b"too short")).error is None
    finish(transfers)
    good = transfers.submit_write(KEYS[0], payload_of(KEYS[0]))
    finish(transfers)
    assert good.ok


def test_closing_finishes_what_was_submitted(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path, b"model", BLOCK, 1 << 20) as store:
        transfers = DiskIO(store)
        tickets = [transfers.submit_write(key, payload_of(key)) for key in KEYS]
        transfers.close()
        assert all(ticket.ok for ticket in tickets)
        with pytest.raises(RuntimeError, match="closed"):
            transfers.submit_write(KEYS[0], payload_of(KEYS[0]))
