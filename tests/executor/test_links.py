"""The engine's links to its ranks: every wait ends, and the first loss is the one reported."""

from __future__ import annotations

import threading
import time

import pytest

from quire.errors import RankLostError
from quire.executor import links, liveness, wire
from quire.executor.links import RankLinks
from tests.executor.test_shared_ring import Listeners

LONG = bytes(4 << 20)
"""More than a socket holds."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.2)


def send_long(ranks: Listeners) -> str:
    """The error of a long message to ranks that do not read."""
    senders = RankLinks(ranks)
    raised: list[str] = []

    def send() -> None:
        try:
            senders.send(wire.Step(LONG))
        except RankLostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a rank that never reads"
    return raised[0]


def test_a_send_notices_a_stopped_rank() -> None:
    assert send_long(Listeners(2, ring_bytes=1000)) == "rank 0 hangs: it is stopped or blocked"


def test_a_send_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 60)
    ranks = Listeners(1, ring_bytes=1000)
    senders = RankLinks(ranks)
    threading.Timer(0.2, lambda: setattr(senders, "given_up", "it takes too long")).start()
    with pytest.raises(RankLostError, match="the ranks do not respond: it takes too long"):
        senders.send(wire.Step(LONG))


def test_long_messages_both_ways_at_once() -> None:
    """A rank blocked in a send does not read."""
    ranks = Listeners(1, ring_bytes=1000)
    senders = RankLinks(ranks)
    got: list[wire.Down] = []

    def serve() -> None:
        ranks.links[0].send(wire.Done(1, 0, [], LONG))
        while not got:
            got.extend(ranks.links[0].receive(None))

    thread = threading.Thread(target=serve, daemon=True)
    beats = threading.Thread(target=_beat, args=(ranks, thread), daemon=True)
    thread.start()
    beats.start()
    senders.send(wire.Step(LONG))
    received: list[wire.Up] = []
    senders.receive(lambda: bool(received), lambda rank, message: received.append(message))
    thread.join(10)
    assert isinstance(received[0], wire.Done) and received[0].result == LONG
    assert got == [wire.Step(LONG)]


def _beat(ranks: Listeners, while_alive: threading.Thread) -> None:
    while while_alive.is_alive():
        ranks.liveness._memory.data[0] = (ranks.liveness._memory.data[0] + 1) % 256
        time.sleep(0.05)


def test_later_calls_report_the_first_loss() -> None:
    ranks = Listeners(2, ring_bytes=1000)
    senders = RankLinks(ranks)
    ranks.theirs[1].close()
    for attempt in (
        lambda: senders.poll(lambda rank, message: None),
        lambda: senders.poll(lambda rank, message: None),
        lambda: senders.receive(lambda: False, lambda rank, message: None),
        lambda: senders.send(wire.CountExperts()),
    ):
        with pytest.raises(RankLostError, match="rank 1 has gone"):
            attempt()


def test_messages_that_arrive_with_the_first_are_kept() -> None:
    ranks = Listeners(1, ring_bytes=1000)
    ranks.sockets[0].sendall(wire.encode(wire.CountExperts()) + wire.encode(wire.ShutdownRank()))
    assert ranks.links[0].next() == wire.CountExperts()
    assert ranks.links[0].receive(1.0) == [wire.ShutdownRank()]
