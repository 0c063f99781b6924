"""What fronts share: counters of limits, sums of metrics, and the connection to the hub."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from quire.messages.histogram import Histogram
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.fronts import link as link_module
from quire.server.fronts.counts import Count, FrontCounts, make_memory
from quire.server.fronts.hub import front_count
from quire.server.fronts.link import FrontLink
from quire.server.limits import AdmissionLimiter, OpenBodies
from quire.server.observability.snapshots import (
    HistogramCounts,
    MetricsSnapshot,
    merged_snapshots,
    with_counts,
    with_histograms,
)

FRONTS = 3


@pytest.fixture
def counts() -> Iterator[list[FrontCounts]]:
    """The counters as each of three processes has them."""
    memory = make_memory(FRONTS)
    yield [FrontCounts(FRONTS, number, memory) for number in range(FRONTS)]
    os.close(memory)


def test_a_queue_is_as_long_for_three_fronts_as_for_one(counts: list[FrontCounts]) -> None:
    fronts = [AdmissionLimiter(rows=4, max_requests=2, max_tokens=100, counts=each) for each in counts]
    tickets = [fronts[i % FRONTS].enter([(1, 5)])[0] for i in range(6)]
    for front in fronts:
        assert (front.requests, front.sequences, front.queued_tokens) == (6, 6, 30)
        with pytest.raises(ApiError, match="2 requests are waiting; at most 2 may"):
            front.enter([(1, 5)])
        assert front.sequences == 6  # a refused request holds nothing
    tickets[0].leave()
    with pytest.raises(ApiError, match="25 prompt tokens are waiting; at most 100 may"):
        fronts[1].enter([(1, 76)])
    fronts[2].enter([(1, 75)])
    assert [front.rejected for front in fronts] == [{"requests": 3, "tokens": 1}] * 3


def test_bodies_of_all_fronts_are_limited_together(counts: list[FrontCounts]) -> None:
    fronts = [OpenBodies(100, each) for each in counts]
    fronts[0].take(60)
    fronts[1].take(40)
    with pytest.raises(ApiError, match="holds 100 bytes of request bodies; at most 100"):
        fronts[2].take(1)
    fronts[0].release(60)
    fronts[2].take(60)
    assert [front.held for front in fronts] == [100] * 3


def test_what_a_front_held_is_free_when_it_has_exited(counts: list[FrontCounts]) -> None:
    fronts = [AdmissionLimiter(rows=1, max_requests=1, max_tokens=100, counts=each) for each in counts]
    fronts[0].enter([(1, 5)])
    fronts[1].enter([(1, 5)])
    for front in fronts:
        with pytest.raises(ApiError):
            front.enter([(1, 5)])
    counts[0].end(1)
    assert (fronts[0].requests, fronts[0].queued_tokens, fronts[0].rejected["requests"]) == (1, 5, 3)
    fronts[2].enter([(1, 5)])


@pytest.mark.parametrize(("cores", "fronts"), [(1, 1), (2, 1), (8, 2), (16, 4), (224, 8)])
def test_zero_means_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, fronts: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert front_count(ServerConfig(api_server_count=0)) == fronts
    assert front_count(ServerConfig()) == 1 and front_count(ServerConfig(api_server_count=5)) == 5


def test_metrics_of_fronts_are_summed() -> None:
    draw = random.Random(3)
    bounds = (1.0, 2.0, 5.0)
    counters: Counter[tuple[str, ...]] = Counter()
    values: dict[tuple[str, ...], list[float]] = {}
    parts = []
    for _ in range(4):
        mine: Counter[tuple[str, ...]] = Counter()
        histograms: dict[tuple[str, ...], Histogram] = {}
        for _ in range(20):
            labels = (draw.choice("ab"), draw.choice("xy"))
            mine[labels] += draw.randrange(5)
            value = float(draw.randrange(8))
            histograms.setdefault(labels, Histogram(bounds)).add(value)
            values.setdefault(labels, []).append(value)
        counters.update(mine)
        series = [(labels, HistogramCounts(one.counts, one.total)) for labels, one in histograms.items()]
        parts.append(MetricsSnapshot({"requests": [*mine.items()]}, {"seconds": series}))
    merged = merged_snapshots(parts[1:])
    first = {labels: Histogram(bounds) for labels, _ in parts[0].histograms["seconds"]}
    for labels, given in parts[0].histograms["seconds"]:
        first[labels].counts, first[labels].total = given.counts, given.total
    assert with_counts(dict(parts[0].counts["requests"]), merged.counts["requests"]) == counters
    found = with_histograms(first, merged.histograms["seconds"], bounds)
    assert set(found) == set(values)
    for labels, histogram in found.items():
        wanted = Histogram(bounds)
        for value in values[labels]:
            wanted.add(value)
        assert (histogram.counts, histogram.total) == (wanted.counts, wanted.total)


def test_a_peer_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 1 << 20)

    async def work() -> None:
        ours, theirs = socket.socketpair()
        closed: list[bool] = []
        link = FrontLink(ours)
        link.on_close = lambda: closed.append(True)
        link.attach()
        sent = 0
        while not closed and sent < 64 << 20:
            link.send(bytes(1 << 16))
            sent += 1 << 16
        assert closed == [True] and sent < 8 << 20
        link.send(b"more")  # of no effect
        theirs.close()

    asyncio.run(work())


def test_counters_that_only_grow_are_kept() -> None:
    counts = FrontCounts(2)
    counts.add(Count.REJECTED_TOKENS, 2)
    counts.end(1)
    assert counts.total(Count.REJECTED_TOKENS) == 2
