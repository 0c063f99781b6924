"""A log line every ten seconds under load, and the metrics behind `get_metrics`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from quire.adapters.slots import AdapterSlots
from quire.engine.memory_watch import MemoryWatch
from quire.executor.expert_balance import ExpertBalance
from quire.messages.histogram import Histogram
from quire.messages.metric_table import SPECS
from quire.scheduler.drafting import Drafting
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class InfoLine:
    """Logs throughput, queue and cache use every INTERVAL_SECONDS while steps are made."""

    def __init__(self, scheduler: Scheduler, is_on: bool = True) -> None:
        self._scheduler = scheduler
        self._is_on = is_on
        self._restart(time.monotonic())

    def _restart(self, now: float) -> None:
        stats = self._scheduler.stats
        self._since, self._last_tick = now, now
        self._prompt, self._generated = stats.prompt_tokens, stats.generated_tokens

    def tick(self) -> None:
        """To be called once a step."""
        if not self._is_on:
            return
        now = time.monotonic()
        if now - self._last_tick > INTERVAL_SECONDS:  # idle since: a rate over the pause means nothing
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
        if scheduler.drafting is not None:
            logger.info("%s", scheduler.drafting.describe())
        self._restart(now)


@dataclass(frozen=True)
class Metric:
    """A named metric; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    value: float
    """Of a histogram: the sum of all values."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper bounds of its buckets."""
    counts: tuple[int, ...] = ()
    """Of a histogram: values in each bucket (not cumulative), and one more bucket for those above every bound."""
    series: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Of a metric with labels: its value for each set of labels. `value` sums them up."""

    # As vLLM's metrics have them.

    @property
    def under_vllms_name(self) -> Metric | None:
        """The same metric with vLLM's prefix; None if it has none like it."""
        name = self.name.partition(":")[2]
        return None if name not in SPECS or SPECS[name].is_ours else dataclasses.replace(self, name=f"vllm:{name}")

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the whole metric: there are none."""
        return {}

    @property
    def values(self) -> list[float]:
        """Of a metric with labels: its values in their order."""
        return [value for _, value in self.series]

    @property
    def sum(self) -> float:
        """Of a histogram: the sum of all values."""
        return self.value

    @property
    def count(self) -> int:
        """Of a histogram: how many values there were."""
        return sum(self.counts)

    @property
    def buckets(self) -> dict[str, int]:
        """Of a histogram: how many values were at most each bound."""
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return dict(zip(bounds, accumulate(self.counts), strict=False))


def scheduler_metrics(scheduler: Scheduler, compiling: int, compile_times: Histogram) -> list[Metric]:
    """The scheduler's metrics now, under vLLM's names with our prefix where it has them.

    `compiling`: requests that wait for their grammar. `compile_times`: seconds that grammars took to compile.
    """
    stats, pool, adapters = scheduler.stats, scheduler.tables.pool, scheduler.requests.adapters
    values = {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generated_tokens,
        "prefix_cache_queries": stats.queried_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "num_preemptions": stats.preemptions,
        "request_success": stats.finished,
        "steps": stats.steps,
        "num_requests_running": scheduler.rows.used,
        "num_requests_waiting": scheduler.waiting + scheduler.loading + compiling + adapters.num_waiting,
        "num_requests_deferred": compiling,
        "kv_cache_usage_perc": pool.used / pool.capacity,
        "kv_cache_waste": stats.waste,
        "num_blocks_used": pool.used,
        "num_blocks_free": pool.free,
        "pressure_device": scheduler.pressure.device,
        "pressure_host": scheduler.pressure.host,
        "pressure_disk": scheduler.pressure.disk,
    }
    values |= {
        "adapters_loaded": len(adapters.loaded()),
        "adapter_requests_waiting": adapters.num_waiting,
        "adapter_loads": adapters.stats.loads,
        "adapter_evictions": adapters.stats.evictions,
        "adapter_load_failures": adapters.stats.failures,
        "adapter_load_seconds": adapters.stats.load_seconds,
    }
    values |= {"swaps": stats.swaps, "admissions_slowed": scheduler.pressure.slowed}
    if (encoding := scheduler.requests.encoding).is_on:
        seen = encoding.stats
        values |= {"mm_cache_queries": seen.encoded + seen.hits, "mm_cache_hits": seen.hits}
        values |= {"encoded_items": seen.encoded, "encoded_tokens": seen.encoded_rows}
        values |= {"num_items_waiting": encoding.num_waiting, "encoder_cache_tokens_used": encoding.used_rows}
    if (tiers := scheduler.tiers) is not None:
        values |= {"blocks_saved": tiers.saved, "blocks_loaded": tiers.loaded, "host_blocks_lost": tiers.host.lost}
        values |= {
            "host_blocks_used": tiers.host.used,
            "host_blocks_owned": tiers.host.num_pinned,
            "disk_blocks": 0 if tiers.store is None else len(tiers.store),
        }
    if isinstance(sessions := scheduler.sessions, SessionKeeper):
        values |= {"sessions_slept": sessions.kv.suspended, "sessions_dropped": sessions.kv.dropped}
        use = sessions.store.use()
        values |= {"session_tokens": use.tokens, "session_bytes": use.bytes, "sessions_refused": sessions.refused}
        values |= {"sessions": use.sessions, "sessions_on_device": sessions.kv.num_on_device}
    return [
        *(labelled_metric(name, value) for name, value in values.items()),
        _histogram("iteration_tokens_total", stats.yielded_tokens),
        _histogram("step_tokens", stats.step_tokens),
        _histogram("grammar_compile_seconds", compile_times),
        *(() if scheduler.drafting is None else draft_metrics(scheduler.drafting)),
        *(adapter_metrics(adapters) if isinstance(adapters, AdapterSlots) else ()),
    ]


def labelled_metric(name: str, value: float, series: Mapping[str, float] | None = None) -> Metric:
    """A counter or a gauge; `series`: its values by its only label."""
    labelled = tuple(((label,), float(part)) for label, part in (series or {}).items())
    return Metric(f"quire:{name}", SPECS[name].kind, value, series=labelled)


def adapter_metrics(adapters: AdapterSlots) -> list[Metric]:
    """Which adapters requests use now, as vLLM reports it: the value is the time."""
    now, (held, waiting) = time.time(), adapters.active()
    labels = str(adapters.num_slots), ",".join(waiting), ",".join(held)
    return [Metric("quire:lora_requests_info", "gauge", now, series=((labels, now),))]


def memory_metrics(memory: MemoryWatch, budget: int) -> list[Metric]:
    """Bytes in use and what was done about them. `budget`: the most tokens of a step now."""
    memory.look()  # an idle engine makes no steps
    values = {
        "memory_used_device": memory.device_used,
        "memory_used_host": memory.host_used,
        "memory_pressure_device": memory.device_level,
        "memory_pressure_host": memory.host_level,
        "step_token_budget": budget,
        "steps_out_of_memory": memory.failed,
        "step_budget_lowered": memory.lowered,
        "step_budget_raised": memory.raised,
        "memory_trims": memory.trimmed,
    }
    return [Metric(f"quire:{name}", SPECS[name].kind, value) for name, value in values.items()]


def _histogram(name: str, values: Histogram) -> Metric:
    return Metric(f"quire:{name}", "histogram", values.total, values.bounds, tuple(values.counts))


def draft_metrics(drafting: Drafting) -> list[Metric]:
    """What speculation has done so far; with a tuner, also what it chose last and from what. The value of
    `quire:spec_decode_acceptance_rate` is that of the first draft, of `quire:spec_decode_step_seconds` that of a step
    without drafts."""
    stats, most = drafting.stats, drafting.most
    accepted = {str(place): count for place, count in enumerate(stats.accepted_by_place[:most].tolist())}
    decodes = {str(drafts): count for drafts, count in enumerate(stats.chosen[: most + 1].tolist())}
    without = {"excluded": stats.excluded, "unavailable": stats.unavailable, "unprofitable": stats.unprofitable}
    metrics = [
        labelled_metric("spec_decode_num_drafts", stats.draws),
        labelled_metric("spec_decode_num_draft_tokens", stats.tokens),
        labelled_metric("spec_decode_num_accepted_tokens", stats.accepted),
        labelled_metric("spec_decode_num_accepted_tokens_per_pos", stats.accepted, accepted),
        labelled_metric("spec_decode_decodes", sum(decodes.values()), decodes),
        labelled_metric("spec_decode_decodes_without_drafts", sum(without.values()), without),
    ]
    if (choice := drafting.last_choice()) is None or drafting.tuner is None:
        return metrics
    rates = {str(place): rate for place, rate in enumerate(choice.acceptance)}
    seconds = {str(drafts): time for drafts, time in enumerate(choice.seconds)}
    metrics += [
        labelled_metric("spec_decode_probes", drafting.tuner.probes),
        labelled_metric("spec_decode_drafts_per_decode", choice.drafts),
        labelled_metric("spec_decode_expected_tokens_per_decode", choice.tokens),
        labelled_metric("spec_decode_acceptance_rate", rates["0"], rates),
    ]
    if seconds:
        metrics += [
            labelled_metric("spec_decode_step_seconds", seconds["0"], seconds),
            labelled_metric("spec_decode_draft_cost", choice.draft_cost),
            labelled_metric("spec_decode_proposal_cost", choice.proposal_cost),
        ]
    return metrics


def expert_metrics(counts: Mapping[int, Sequence[int]], balance: ExpertBalance | None = None) -> list[Metric]:
    """How evenly a mixture's router spreads tokens, from how often each expert of each layer was chosen; empty for a
    model without experts.

    `quire:expert_tokens` has a value for each (layer, expert), and their sum; `quire:expert_load_max_over_mean` one for
    each layer, and the largest: 1 is perfectly even, the number of experts means that one expert gets all tokens. With
    experts spread over ranks, `quire:expert_rank_load_max_over_mean` is the same of ranks, since experts last moved.
    """
    if not counts:
        return []
    tokens = tuple(
        ((str(layer), str(expert)), float(count))
        for layer, chosen in counts.items()
        for expert, count in enumerate(chosen)
    )
    loads = tuple(((str(layer),), _max_over_mean(chosen)) for layer, chosen in counts.items())
    metrics = [
        Metric("quire:expert_tokens", "counter", sum(count for _, count in tokens), series=tokens),
        Metric("quire:expert_load_max_over_mean", "gauge", max(load for _, load in loads), series=loads),
    ]
    if balance is not None:
        skews = tuple(((str(layer),), skew) for layer, skew in balance.skews(counts).items())
        worst = max(skew for _, skew in skews)
        metrics.append(Metric("quire:expert_rank_load_max_over_mean", "gauge", worst, series=skews))
    return metrics


def _max_over_mean(chosen: Sequence[int]) -> float:
    return max(chosen) * len(chosen) / total if (total := sum(chosen)) else 0.0
