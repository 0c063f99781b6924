"""Speculation in the benchmarks: its flags, what was accepted, and the same load without drafts in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.api.llm import LLM

Rows = list[tuple[str, str]]


def add_speculation(parser: Any) -> None:
    """--synthetic-acceptance and --baseline."""
    parser.add_argument(
        "--synthetic-acceptance",
        type=_rates,
        metavar="RATES",
        help="accept drafts by these rates instead of by their tokens, for random weights: for each draft the "
        "probability that it and all before it are accepted, as 0.8,0.6,0.4. Without --speculative-config: ngram",
    )
    parser.add_argument(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with drafts, measure an engine without them too (default: on)",
    )


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 0.8,0.6,0.4") from None


def with_synthetic(settings: dict[str, Any], rates: list[float] | None) -> dict[str, Any]:
    """Engine settings in which drafts are accepted by these rates; unchanged if there are none."""
    if rates is None:
        return settings
    given = settings.get("speculative_config") or {"method": "ngram"}
    if not isinstance(given, Mapping):
        raise ConfigError("--synthetic-acceptance needs --speculative-config as an object", "speculative_config", given)
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    config = {"num_speculative_tokens": len(rates), **given, **synthetic}
    return {**settings, "speculative_config": config}


def without_drafts(settings: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    """The settings of the engine to compare with; None: there is nothing to compare, or it is not wanted."""
    if settings.get("speculative_config") is None or not args.baseline:
        return None
    return {**settings, "speculative_config": None}


@dataclass(frozen=True)
class DraftCounts:
    """Drafts of an engine so far."""

    steps: float
    """Draws that verified drafts."""
    drafts: float
    by_place: tuple[float, ...]
    """Accepted drafts, by their place in a draw."""

    @classmethod
    def of(cls, llm: LLM) -> DraftCounts:
        metrics = {metric.name.partition(":")[2]: metric for metric in llm.get_metrics()}

        def value(name: str) -> float:
            return metrics[name].value if name in metrics else 0.0

        places = metrics.get("spec_decode_num_accepted_tokens_per_pos")
        series = () if places is None else sorted(places.series, key=lambda each: int(each[0][0]))
        return cls(
            value("spec_decode_num_drafts"),
            value("spec_decode_num_draft_tokens"),
            tuple(count for _, count in series),
        )

    def since(self, before: DraftCounts) -> DraftCounts:
        """What was counted after `before`."""
        old = before.by_place or (0.0,) * len(self.by_place)
        places = tuple(new - past for new, past in zip(self.by_place, old, strict=True))
        return DraftCounts(self.steps - before.steps, self.drafts - before.drafts, places)

    @property
    def accepted(self) -> float:
        return sum(self.by_place)

    @property
    def length(self) -> float:
        """Tokens of a draw that verified drafts, the drawn one included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def rates(self) -> list[float]:
        """For each place the share of draws whose drafts were accepted up to there."""
        reached = [count / self.steps for count in self.by_place] if self.steps else []
        while reached and not reached[-1]:
            reached.pop()
        return reached


def speculation_rows(found: DraftCounts, speedup: float | None) -> Rows:
    """Lines of a report."""
    rows: Rows = []
    if found.by_place and not found.steps:
        rows.append(("drafts", "none were verified: there were none, or they were not expected to pay"))
    if found.steps:
        rates = " ".join(f"{rate:.2f}" for rate in found.rates)
        share = 100 * found.accepted / max(found.drafts, 1)
        rows.append(("drafts", f"{found.length:.2f} tokens a verifying step, {share:.0f}% of drafts accepted"))
        rows.append(("by position", rates or "none"))
    if speedup is not None:
        rows.append(("against none", f"{speedup:.2f} times as fast"))
    return rows


def speculation_metrics(found: DraftCounts, speedup: float | None) -> dict[str, Any]:
    """The same for --output-json."""
    metrics: dict[str, Any] = {}
    if found.steps:
        metrics = {
            "spec_decode_num_drafts": found.steps,
            "spec_decode_num_draft_tokens": found.drafts,
            "spec_decode_num_accepted_tokens": found.accepted,
            "spec_decode_acceptance_length": found.length,
            "spec_decode_per_position_acceptance_rates": found.rates,
        }
    return metrics if speedup is None else {**metrics, "speedup_against_none": speedup}
