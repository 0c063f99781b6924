"""The engine's own account of itself: a line every ten seconds under load, and the figures behind `get_metrics`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from quire.messages.histogram import COMPILE_BOUNDS, Histogram
from quire.messages.metric_table import SPECS
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class InfoLine:
    """Logs throughput, queue and cache use every INTERVAL_SECONDS while steps are made."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._restart(time.monotonic())

    def _restart(self, now: float) -> None:
        stats = self._scheduler.stats
        self._since, self._last_tick = now, now
        self._prompt, self._generated = stats.prompt_tokens, stats.generated_tokens

    def tick(self) -> None:
        """To be called once a step."""
        now = time.monotonic()
        if now - self._last_tick > INTERVAL_SECONDS:  # idle since: a rate over the pause would mean nothing
            self._restart(now)
            return
        self._last_tick = now
        elapsed = now - self._since
        if elapsed < INTERVAL_SECONDS:
            return
        scheduler = self._scheduler
        stats, pool = scheduler.stats, scheduler.tables.pool
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, running %d, waiting %d, KV cache %.1f%% used, "
            "prefix hits %.1f%%, preemptions %d, waste %.1f%%",
            (stats.prompt_tokens - self._prompt) / elapsed,
            (stats.generated_tokens - self._generated) / elapsed,
            scheduler.rows.used,
            scheduler.waiting,
            100 * pool.used / pool.capacity,
            100 * stats.hit_rate,
            stats.preemptions,
            100 * stats.waste,
        )
        self._restart(now)


@dataclass(frozen=True)
class Metric:
    """A named figure; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    value: float
    """Of a histogram: the sum of what was counted."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper bounds of its buckets…"""
    counts: tuple[int, ...] = ()
    """…and how many values each bucket holds alone, with one more bucket for those above every bound."""
    series: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Of a figure with labels: its values by them. `value` sums them up."""


def histogram(name: str, tally: Histogram) -> Metric:
    """A tally as a figure."""
    return Metric(f"quire:{name}", "histogram", tally.total, tally.bounds, tuple(tally.counts))


def metrics_of(scheduler: Scheduler, compiling: int = 0, compile_times: Histogram | None = None) -> list[Metric]:
    """The engine's figures now, under vLLM's names with our prefix where it has them.

    `compiling`: requests that wait for their grammar; `compile_times`: what grammars took.
    """
    stats, pool = scheduler.stats, scheduler.tables.pool
    counters = {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generated_tokens,
        "prefix_cache_queries": stats.queried_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "num_preemptions": stats.preemptions,
        "request_success": stats.finished,
        "steps": stats.steps,
    }
    gauges = {
        "num_requests_running": scheduler.rows.used,
        "num_requests_waiting": scheduler.waiting + scheduler.loading + compiling,
        "num_requests_deferred": compiling,
        "kv_cache_usage_perc": pool.used / pool.capacity,
        "kv_cache_waste": stats.waste,
        "num_blocks_used": pool.used,
        "num_blocks_free": pool.free,
        "pressure_device": scheduler.pressure.device,
        "pressure_host": scheduler.pressure.host,
        "pressure_disk": scheduler.pressure.disk,
    }
    counters |= {"swaps": stats.swaps, "admissions_slowed": scheduler.pressure.slowed}
    if (tiers := scheduler.tiers) is not None:
        counters |= {"blocks_saved": tiers.saved, "blocks_loaded": tiers.loaded, "host_blocks_lost": tiers.host.lost}
        gauges |= {
            "host_blocks_used": tiers.host.used,
            "host_blocks_owned": tiers.host.owned,
            "disk_blocks": 0 if tiers.disk is None else len(tiers.disk.store),
        }
    if (sessions := scheduler.sessions) is not None:
        counters |= {"sessions_slept": sessions.kv.slept, "sessions_dropped": sessions.kv.dropped}
        gauges |= {"sessions": len(sessions.store), "sessions_on_device": sessions.kv.num_live}
    return [
        *(Metric(f"quire:{name}", SPECS[name].kind, value) for name, value in (counters | gauges).items()),
        histogram("iteration_tokens_total", stats.step_tokens),
        histogram("grammar_compile_seconds", compile_times or Histogram(COMPILE_BOUNDS)),
    ]
