"""The ring in shared memory: every reader gets every message whole and in order, and none blocks the writer."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RankLostError
from quire.executor import links, wire
from quire.executor.links import RankLinks
from quire.executor.liveness import MemoryHeartbeats
from quire.executor.rank import RankLink
from quire.executor.shared_ring import RingReader, RingWriter

SIZE = 64


@settings(deadline=None)
@given(
    readers=st.integers(1, 3),
    acts=st.lists(st.one_of(st.binary(max_size=SIZE + 8), st.integers(0, 2)), max_size=120),
)
def test_messages_arrive_whole_at_any_reader_speed(readers: int, acts: list[bytes | int]) -> None:
    """An act is a message to write, or a reader that reads its oldest. Compared with plain queues."""
    writer = RingWriter(readers, SIZE)
    ends = [RingReader.inherit(os.dup(writer.fileno()), readers, reader) for reader in range(readers)]
    queues: list[deque[tuple[int, bytes]]] = [deque() for _ in range(readers)]
    try:
        for act in acts:
            if isinstance(act, bytes):
                at = writer.put(act)
                assert at is not None or len(act) > SIZE or any(queues), "an empty ring accepts any message that fits"
                for queue in queues:
                    if at is not None:
                        queue.append((at, act))
            elif act < readers and queues[act]:
                at, message = queues[act].popleft()
                assert ends[act].take(at, len(message)) == message
        for end, queue in zip(ends, queues, strict=True):
            for at, message in queue:
                assert end.take(at, len(message)) == message
    finally:
        writer.close()


class Listeners:
    """Ranks as threads of the test, each with its end of a socket and of a ring."""

    def __init__(self, count: int, ring_bytes: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.sockets = [ours for ours, _ in pairs]
        self.ring = RingWriter(count, ring_bytes)
        self.links = [
            RankLink(theirs, RingReader.inherit(os.dup(self.ring.fileno()), count, rank))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        self.theirs = [theirs for _, theirs in pairs]
        self.liveness = MemoryHeartbeats(count)
        self.pids, self.resources, self.rendezvous = [0] * count, [], ""
        self.kill = _Kill(self.sockets)

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def describe_exit(self, rank: int) -> str:
        return f"rank {rank} has gone"

    def wait(self, seconds: float) -> None: ...


class _Kill:
    alive = True

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets

    def __call__(self) -> None:
        self.alive = False
        for sock in self._sockets:
            sock.close()


def test_slow_readers_get_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the ring or, while a reader is behind or a message is too long, over the sockets."""
    monkeypatch.setattr(links, "MIN_BYTES", 100)
    ranks = Listeners(3, ring_bytes=50_000)
    chance = random.Random(3)
    plans = [chance.randbytes(chance.choice([10, 1000, 20_000, 60_000])) for _ in range(200)]
    got: list[list[bytes]] = [[] for _ in range(3)]

    def listen(rank: int) -> None:
        pauses = random.Random(rank)
        while len(got[rank]) < len(plans):
            got[rank] += [message.plan for message in ranks.links[rank].receive(None)]  # type: ignore[union-attr]
            time.sleep(pauses.choice([0, 0, 0.001 * rank]))

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    senders = RankLinks(ranks)
    through_ring = 0
    for plan in plans:
        before = ranks.ring._end
        senders.send(wire.Step(plan))
        through_ring += ranks.ring._end > before
    for thread in threads:
        thread.join()
    assert got == [plans] * 3
    assert 0 < through_ring < sum(len(plan) >= 100 for plan in plans)


def test_a_dead_reader_does_not_block_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_BYTES", 100)
    ranks = Listeners(2, ring_bytes=10_000)
    senders = RankLinks(ranks)
    for _ in range(3):
        senders.send(wire.Step(bytes(4000)))  # without a reader: the third does not fit and goes over the sockets
    assert len([message for message in ranks.links[0].receive(None) if isinstance(message, wire.Step)]) == 3
    ranks.theirs[1].close()
    with pytest.raises(RankLostError, match="rank 1 has gone"):
        senders.send(wire.Step(bytes(4000)))


def test_a_message_above_the_bound_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGEST", 1000)
    ranks = Listeners(1, ring_bytes=1000)
    senders = RankLinks(ranks)
    ranks.links[0].send(wire.StartRefused("A", "b" * 1000))
    with pytest.raises(
        RankLostError, match="rank 0 of 1 sent an unreadable message: a message of 1.* bytes is announced"
    ):
        senders.receive(lambda: False, lambda rank, message: None)
