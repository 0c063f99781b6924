"""The feed: engines are asked for their view while someone watches, at a rate that costs them little.

Viewers of the same scope, replica and rate share a channel, and channels share the views. Without viewers nothing runs.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from quire.api.engine_group import merged_metrics
from quire.engine.stats import Metric
from quire.errors import QuireError
from quire.messages.engine_view import EngineView
from quire.server.errors import ApiError
from quire.server.http import event_bytes
from quire.server.page.frames import (
    ExpertMap,
    FeedFrame,
    FrameWriter,
    RankFigures,
    ReplicaFigures,
    Scope,
    SlowFigures,
)

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.server.lifecycle.supervisor import ReplicaSupervisor, Supervisor

MOST_VIEWERS = 64
MOST_OF_A_TENANT = 16
LEAST_HZ, MOST_HZ, DEFAULT_HZ = 1, 10, 4
ENGINE_SHARE = 0.004
"""Most of the engine's time that views may take: a view that takes long is asked for less often."""
FRONT_SHARE = 0.02
"""The same of this process."""
LONGEST_PAUSE = 2.0
"""Seconds; a view that takes more than 8 ms is still made this often."""
SLOW_SECONDS = 1.0
RETRY_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": waiting for the engine\n\n"

ChannelKey = tuple[str | None, int, int]


class Viewer:
    """One reader. It holds at most one frame: a slow one misses some, and then gets a whole one."""

    def __init__(self) -> None:
        self.needs_whole = True
        self._frame: bytes | None = None
        self._is_closed = False
        self._news = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._frame is None

    def put(self, frame: bytes) -> None:
        self._frame = frame
        self._news.set()

    def close(self) -> None:
        """The server stops."""
        self._is_closed = True
        self._news.set()

    async def take(self) -> bytes | None:
        """The next frame, or a comment if there is none for long; None: the feed has ended."""
        try:
            await asyncio.wait_for(self._news.wait(), KEEP_ALIVE_SECONDS)
        except asyncio.TimeoutError:
            return KEEP_ALIVE
        if self._is_closed:
            return None
        self._news.clear()
        frame, self._frame = self._frame, None
        return frame


class EngineFeed:
    """All viewers of a server."""

    def __init__(self, llm: AsyncLLM, supervisor: Supervisor | ReplicaSupervisor) -> None:
        self._llm = llm
        self._supervisor = supervisor
        self._channels: dict[ChannelKey, Channel] = {}
        self._views: dict[int, EngineView] = {}
        self._asked: dict[int, asyncio.Task[EngineView]] = {}
        self._slow: SlowFigures | None = None
        self._slow_at = 0.0

    @property
    def num_viewers(self) -> int:
        return sum(len(channel.viewers) for channel in self._channels.values())

    def close(self) -> None:
        """End the streams of all viewers."""
        for channel in self._channels.values():
            for viewer in channel.viewers:
                viewer.close()

    async def watch(self, scope: Scope, replica: int, hz: int) -> AsyncGenerator[bytes, None]:
        """Encoded frames, until the caller leaves or the server stops; raises 429 if there are too many viewers."""
        self._check_room(scope)
        key = (scope.tenant, replica, hz)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self, scope, replica, hz)
        viewer = Viewer()
        channel.viewers.add(viewer)
        try:
            while (frame := await viewer.take()) is not None:
                yield frame
        finally:
            channel.viewers.discard(viewer)
            if not channel.viewers:
                channel.task.cancel()
                if self._channels.get(key) is channel:
                    del self._channels[key]
            if not self._channels:
                self._views.clear()

    def _check_room(self, scope: Scope) -> None:
        own = sum(len(one.viewers) for (tenant, *_), one in self._channels.items() if tenant == scope.tenant)
        if self.num_viewers >= MOST_VIEWERS or (scope.tenant is not None and own >= MOST_OF_A_TENANT):
            raise ApiError(
                429,
                f"there are {self.num_viewers} viewers of the feed, {own} with this key; at most {MOST_VIEWERS}, and "
                f"{MOST_OF_A_TENANT} with one key. Close a page, or try again later",
                headers={"Retry-After": "5"},
            )

    # What channels share

    def block_bytes(self, replica: int) -> int:
        """Bytes of a block on the device."""
        return self._llm.replicas[replica].info.block_bytes

    async def view(self, replica: int, age: float) -> EngineView:
        """A replica's view, at most `age` seconds old; one question is asked at a time."""
        known = self._views.get(replica)
        if known is not None and time.monotonic() - known.at < age:
            return known
        asked = self._asked.get(replica)
        if asked is None:
            asked = self._asked[replica] = asyncio.ensure_future(self._ask(replica))
        return await asyncio.shield(asked)

    async def _ask(self, replica: int) -> EngineView:
        try:
            view = self._views[replica] = await self._llm.replicas[replica].view()
            return view
        finally:
            del self._asked[replica]

    async def slow(self) -> SlowFigures | None:
        """The figures that change slowly, if they are due."""
        now = time.monotonic()
        if self._slow is None or now - self._slow_at > SLOW_SECONDS:
            self._slow_at = now
            self._slow = await self._ask_slow()
        return self._slow

    async def _ask_slow(self) -> SlowFigures:
        replicas, each = self._llm.replicas, self._supervisor.each
        found: list[list[Metric]] = []
        for replica in replicas:
            try:
                found.append(await replica.get_metrics())
            except QuireError:  # it is down; its supervisor says so
                found.append([])
        statuses = [one.status for one in each]
        return slow_figures(
            found, statuses, self._supervisor.status, self._supervisor.restarts, rank_figures(self._llm.config)
        )


class Channel:
    """Viewers of the same scope, replica and rate."""

    def __init__(self, feed: EngineFeed, scope: Scope, replica: int, hz: int) -> None:
        self.viewers: set[Viewer] = set()
        self._feed = feed
        self._replica = replica
        self._pause = 1 / hz
        self._writer = FrameWriter(scope, replica, feed.block_bytes(replica))
        self._sent_slow: SlowFigures | None = None
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            begin = time.monotonic()
            try:
                view = await self._feed.view(self._replica, self._pause / 2)
                slow = await self._feed.slow()
            except QuireError as error:
                self._send(self._writer.failed(time.time(), str(error)), None)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            worked = time.thread_time()
            frame = self._writer.write(view, None if slow is self._sent_slow else slow)
            self._sent_slow = slow
            self._send(frame, slow)
            own = time.thread_time() - worked
            pause = max(self._pause, min(LONGEST_PAUSE, max(view.seconds / ENGINE_SHARE, own / FRONT_SHARE)))
            await asyncio.sleep(max(0.0, begin + pause - time.monotonic()))

    def _send(self, frame: FeedFrame, slow: SlowFigures | None) -> None:
        """Give every viewer the frame, encoded once; viewers that have none before it get it whole."""
        usual = whole = b""
        for viewer in self.viewers:
            if not viewer.has_room:
                viewer.needs_whole = True
            elif viewer.needs_whole:
                if not whole:
                    complete = self._writer.whole(frame)
                    complete.slow = slow
                    whole = event_bytes(complete)
                viewer.needs_whole = False
                viewer.put(whole)
            else:
                usual = usual or event_bytes(frame)
                viewer.put(usual)


def slow_figures(
    found: Sequence[list[Metric]], statuses: Sequence[str], status: str, restarts: int, ranks: RankFigures | None
) -> SlowFigures:
    """What the metrics of all engines say about what changes slowly."""
    every = {metric.name.removeprefix("quire:"): metric for metric in merged_metrics([one for one in found if one])}
    drafts = {name.removeprefix("spec_decode_"): one for name, one in every.items() if name.startswith("spec_decode_")}
    load = every.get("expert_load_max_over_mean")
    accepted = drafts.get("num_accepted_tokens_per_pos")
    skew = every.get("expert_rank_load_max_over_mean")
    return SlowFigures(
        status=status,
        restarts=restarts,
        ranks=ranks,
        replicas=[] if len(found) < 2 else [_replica(*one) for one in zip(found, statuses, strict=True)],
        speculation={name: metric.value for name, metric in drafts.items() if not metric.series},
        acceptance=[] if accepted is None else accepted.values,
        experts={} if load is None else {labels[0]: round(value, 3) for labels, value in load.series},
        expert_map=expert_map(every.get("expert_tokens")),
        rank_skew=0.0 if skew is None else round(skew.value, 3),
        energy=_energy(every),
        adapters={
            name.removeprefix("adapter_"): metric.value
            for name, metric in every.items()
            if name in ("adapter_loads", "adapter_evictions", "adapter_load_failures") and metric.value
        },
        sessions={name: metric.value for name, metric in every.items() if name in ("sessions", "sessions_on_device")},
    )  # fmt: skip


def rank_figures(config: EngineConfig) -> RankFigures | None:
    """How each engine's model is divided; None: it is not."""
    if config.num_ranks == config.expert_ranks == 1:
        return None
    return RankFigures(config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_ranks)


def expert_map(tokens: Metric | None) -> ExpertMap | None:
    """What the metric says of a mixture's experts, from the start on."""
    if tokens is None or not tokens.series:
        return None
    by_layer: dict[str, list[float]] = {}
    for (layer, _), count in tokens.series:
        by_layer.setdefault(layer, []).append(count)
    experts = max(len(counts) for counts in by_layer.values())
    loads = bytearray()
    for counts in by_layer.values():
        mean = sum(counts) / len(counts)
        own = [min(255, round(32 * count / mean)) if mean else 0 for count in counts]
        loads += bytes(own) + bytes(experts - len(own))
    return ExpertMap(list(by_layer), experts, base64.b64encode(loads).decode("ascii"))


def _energy(every: dict[str, Metric]) -> dict[str, float]:
    joules = every.get("energy_joules")
    if joules is None:
        return {}
    names = {
        "watts": "power_watts", "budget": "power_budget_watts", "is_estimated": "energy_estimated",
        "held_seconds": "energy_held_seconds",
    }  # fmt: skip
    figures = {name: every[metric].value for name, metric in names.items() if metric in every}
    return {"joules": joules.value, **{labels[0]: value for labels, value in joules.series}, **figures}


def _replica(metrics: list[Metric], status: str) -> ReplicaFigures:
    values = {metric.name.removeprefix("quire:"): metric.value for metric in metrics}
    names = ("num_requests_running", "num_requests_waiting", "num_blocks_used", "generation_tokens")
    running, waiting, blocks, tokens = (values.get(name, 0.0) for name in names)
    return ReplicaFigures(status, running, waiting, blocks, tokens)
