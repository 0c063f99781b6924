"""The engine's own account of itself: a line every ten seconds under load, and the figures behind `get_metrics`."""

from __future__ import annotations

import logging
import time

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
