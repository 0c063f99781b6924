"""What a simulation measures: throughput, latencies, use of the devices; and goals."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ValidationError
from quire.simulation.costs import CostModel
from quire.simulation.device import SimulatedStep

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
RESOLUTION = 1.02
"""Ratio of neighbouring bins of a histogram: percentiles are exact within 2%."""
LEAST_SECONDS = 1e-6


class LogHistogram:
    """Counts of durations in bins of equal ratio: millions of values in little memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self._total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """One more value, or so many equal ones."""
        self._counts[int(math.log(max(seconds, LEAST_SECONDS) / LEAST_SECONDS, RESOLUTION))] += count
        self.count += count
        self._total += count * seconds

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that this share is at or below."""
        left = percent / 100 * self.count
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return LEAST_SECONDS * RESOLUTION ** (place + 0.5)
        return 0.0


class SimulationResult:
    """Figures of a run. Failed requests count only as failures."""

    def __init__(self, costs: CostModel, replicas: int) -> None:
        self.costs = costs
        self.replicas = replicas
        self.gaps = LogHistogram()
        """Between the tokens of a request."""
        self.completed = self.failed = self.retried = self.preemptions = self.deaths = 0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0
        self.drafts = self.accepted_drafts = 0
        """Verified, and accepted, by the engines that are alive at the end."""
        self.saved_blocks = self.loaded_blocks = 0
        """Blocks moved to host memory, and back…"""
        self.disk_writes = self.disk_reads = 0
        """…and on to disk, and back."""
        self.images_encoded = self.images_cached = 0
        """Images that were encoded, and found encoded."""
        self.image_seconds = 0.0
        """What encoding one is assumed to take."""
        self.has_adapters = False
        """Whether requests name LoRA adapters…"""
        self.adapter_loads = self.adapter_evictions = 0
        """…which were loaded into slots, some in the place of others, by the engines that are alive at the end."""
        self.steps = 0
        self.step_tokens = 0
        self.duration = 0.0
        self.busy: list[float] = []
        """Seconds that each device computed."""
        self._ttft, self._tpot, self._e2el = array("d"), array("d"), array("d")
        self.spans = array("d")
        """Of each request that ended well: arrival, first and last token, and the number of tokens."""
        self.tenants: Counter[str] = Counter()
        """Output tokens."""

    def note_step(self, step: SimulatedStep) -> None:
        """A replica launched a step."""
        self.steps += 1
        self.step_tokens += step.shape.tokens

    def note_request(
        self,
        tenant: str,
        prompt: int,
        output: int,
        arrival: float,
        first: float,
        last: float,
        retries: int,
        reason: str,
    ) -> None:
        """A request has ended."""
        if reason not in ("length", "stop"):
            self.failed += 1
            return
        self.completed += 1
        self.retried += retries > 0
        self.input_tokens += prompt
        self.output_tokens += output
        self.tenants[tenant] += output
        self._ttft.append(first - arrival)
        self._tpot.append((last - first) / (output - 1) if output > 1 else math.nan)
        self._e2el.append(last - arrival)
        self.spans.extend((arrival, first, last, output))

    def finish(self, now: float, busy: Sequence[float]) -> None:
        """The run is over."""
        self.duration, self.busy = now, list(busy)

    # Figures

    def percentile(self, metric: str, percent: float) -> float:
        """In seconds."""
        if metric == "itl":
            return self.gaps.percentile(percent)
        values = sorted(self.values(metric))
        return values[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else 0.0

    def mean(self, metric: str) -> float:
        """In seconds."""
        if metric == "itl":
            return self.gaps.mean
        values = self.values(metric)
        return math.fsum(values) / len(values) if values else 0.0

    def values(self, metric: str) -> list[float]:
        """In seconds, of all requests; for `itl` a thousand values with the same distribution."""
        if metric == "itl":
            return [self.gaps.percentile(percent / 10) for percent in range(1, 1001)] if self.gaps.count else []
        return [value for value in self._values(metric) if not math.isnan(value)]

    def _values(self, metric: str) -> array[float]:
        return {"ttft": self._ttft, "tpot": self._tpot, "e2el": self._e2el}[metric]

    def per_second(self, amount: float) -> float:
        return amount / self.duration if self.duration > 0 else 0.0

    @property
    def utilization(self) -> float:
        """Share of the run that a device computed, over all devices."""
        return sum(self.busy) / (self.duration * self.replicas) if self.duration > 0 else 0.0

    @property
    def joules(self) -> float | None:
        """Energy of the devices while they computed; None: the cost model has no power."""
        return None if self.costs.watts is None else self.costs.watts * sum(self.busy)

    def to_json(self) -> dict[str, Any]:
        """All figures; names are those of `quire bench serve` where it has them."""
        found: dict[str, Any] = {
            "profile": self.costs.name,
            "profile_source": self.costs.source,
            "profile_error": self.costs.error,
            "replicas": self.replicas,
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "retried": self.retried,
            "total_input_tokens": self.input_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.per_second(self.completed),
            "output_throughput": self.per_second(self.output_tokens),
            "total_token_throughput": self.per_second(self.input_tokens + self.output_tokens),
            "preemptions": self.preemptions,
            "drafts": self.drafts,
            "accepted_drafts": self.accepted_drafts,
            "saved_blocks": self.saved_blocks,
            "loaded_blocks": self.loaded_blocks,
            "disk_writes": self.disk_writes,
            "disk_reads": self.disk_reads,
            "images_encoded": self.images_encoded,
            "images_cached": self.images_cached,
            "image_seconds": self.image_seconds if self.images_encoded else None,
            "adapter_loads": self.adapter_loads,
            "adapter_evictions": self.adapter_evictions,
            "steps": self.steps,
            "tokens_per_step": self.step_tokens / self.steps if self.steps else 0.0,
            "utilization": self.utilization,
            "joules": self.joules,
            "tenants": dict(self.tenants) if len(self.tenants) > 1 else None,
        }
        for name in METRICS:
            found[f"mean_{name}_ms"] = 1000 * self.mean(name)
            found |= {f"p{percent}_{name}_ms": 1000 * self.percentile(name, percent) for percent in PERCENTILES}
        return found


def read_goal(text: str) -> dict[tuple[str, int], float]:
    """`ttft_p99:500,tpot_p50:30` as (metric, percentile) → milliseconds."""
    goals = {}
    for word in text.split(","):
        name, _, value = word.partition(":")
        metric, _, percent = name.partition("_p")
        try:
            limit, place = float(value), int(percent)
        except ValueError:
            limit, place = -1.0, -1
        if metric not in METRICS or not 0 < place <= 100 or not limit > 0:
            raise ValidationError(
                f"--goal takes limits in milliseconds such as ttft_p99:500,tpot_p99:50, for {', '.join(METRICS)}; "
                f"got {word!r}"
            )
        goals[metric, place] = limit
    return goals


def meets(result: SimulationResult, goals: Mapping[tuple[str, int], float]) -> bool:
    """Whether every limit is kept and no request failed."""
    return not result.failed and all(
        1000 * result.percentile(metric, place) <= limit for (metric, place), limit in goals.items()
    )
