"""Shared by the benchmarks: engine settings, random prompts, percentiles, KV waste, and the report."""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench.profile import make_folder
from quire.cli.bench.speculation import with_synthetic
from quire.cli.engine_flags import engine_settings
from quire.cli.terminal import table
from quire.cli.values import output_file
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.api.inputs import TokensPrompt
    from quire.api.llm import LLM
    from quire.messages.outputs import RequestOutput
    from quire.messages.sampling import SamplingParams
    from quire.scheduler.stats import SchedulerStats

Rows = list[tuple[str, str]]


def bench_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings; with dummy weights no tokenizer is loaded."""
    settings = with_synthetic(engine_settings(args), args.synthetic_acceptance)
    if settings.get("load_format") == "dummy":
        settings.setdefault("skip_tokenizer_init", True)
    if args.profile and (size := settings.get("data_parallel_size", 1)) > 1:
        raise ValidationError(f"--profile works with one engine, but --data-parallel-size is {size}: leave one out")
    if args.profile:
        make_folder(Path(args.profile))
    return settings


def engine_stats(llm: LLM) -> SchedulerStats | None:
    """The scheduler's counters; None with several engines, which run in other processes."""
    if llm.llm_engine.config.data_parallel_size > 1:
        return None
    return copy.copy(llm.llm_engine.core.scheduler.stats)


def random_prompts(
    llm: LLM, count: int, length: int, seed: int, images: int = 0, size: tuple[int, int] = (512, 512)
) -> list[TokensPrompt]:
    """Prompts of random tokens, each with `images` images of a size. No two share a prefix, so the prefix cache does
    not help; no two images are alike."""
    import numpy as np

    from quire.cli.bench.images import noise_image

    vocabulary = llm.llm_engine.info.model.vocab_size
    drawn = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
    media = llm.llm_engine.inputs.media
    for token in media.soft_tokens:  # they would stand for images
        drawn[drawn == token] = 0
    if not images:
        return [{"prompt_token_ids": tokens} for tokens in drawn.tolist()]
    if media.image_token is None:
        raise ValidationError(
            f"--images needs a model that takes images; {llm.llm_engine.config.model} takes text only"
        )
    prompts: list[TokensPrompt] = []
    for number, tokens in enumerate(drawn.tolist()):
        first = (seed * count + number) * images
        pictures = [noise_image(size, first + index) for index in range(images)]
        whole = [tokens[0], *[media.image_token] * images, *tokens[1:]]
        prompts.append({"prompt_token_ids": whole, "multi_modal_data": {"image": pictures}})
    return prompts


def fixed_length(llm: LLM, args: argparse.Namespace, n: int = 1) -> SamplingParams:
    """Sampling of exactly --output-len tokens; raises if they do not fit the model's length."""
    from quire.messages.sampling import SamplingParams

    longest = llm.llm_engine.info.max_model_len
    if args.input_len + args.output_len > longest:
        raise ValidationError(
            f"--input-len {args.input_len} and --output-len {args.output_len} exceed max_model_len, {longest}"
        )
    has_tokenizer = not llm.llm_engine.config.skip_tokenizer_init
    return SamplingParams(n=n, max_tokens=args.output_len, ignore_eos=True, detokenize=has_tokenizer)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated linearly; 0 if there are none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def waste_rows(stats: SchedulerStats | None, reserved: int) -> Rows:
    """The share of allocated KV slots without a token, and what reserving max_model_len would have wasted."""
    if stats is None:
        return []
    return [
        ("KV waste", f"{100 * stats.waste:.2f}% of the allocated slots"),
        ("if reserved", f"{100 * stats.waste_if_reserved(reserved):.1f}% with {reserved} slots for every request"),
    ]


def waste_metrics(stats: SchedulerStats | None, reserved: int) -> dict[str, float]:
    """The same for --output-json."""
    return {} if stats is None else {"kv_waste": stats.waste, "kv_waste_if_reserved": stats.waste_if_reserved(reserved)}


def energy_text(joules: float, tokens: int, source: str, is_estimate: bool) -> str:
    """Joules of requests, in words."""
    kind = f"estimated ({source})" if is_estimate else f"measured ({source})"
    return f"{joules:.2f} J, {joules / max(1, tokens):.4g} J per output token, {kind}"


def energy_rows(outputs: Sequence[RequestOutput]) -> Rows:
    """The energy of requests; no row if it was not metered."""
    known = [each.metrics for each in outputs if each.metrics is not None and each.metrics.energy_source is not None]
    if not known:
        return []
    tokens = sum(metrics.num_generation_tokens for metrics in known)
    is_estimate = any(metrics.energy_is_estimate for metrics in known)
    joules = sum(metrics.joules for metrics in known)
    return [("energy", energy_text(joules, tokens, known[-1].energy_source or "", is_estimate))]


def energy_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The same for --output-json."""
    known = [each.metrics for each in outputs if each.metrics is not None and each.metrics.energy_source is not None]
    if not known:
        return {}
    return {
        "joules": sum(metrics.joules for metrics in known),
        "energy_estimated": any(metrics.energy_is_estimate for metrics in known),
        "energy_source": known[-1].energy_source,
    }


def add_output(parser: Any) -> None:
    """--output-json."""
    parser.add_argument("--output-json", type=output_file, metavar="FILE", help="also write the metrics to this file")


def report(title: str, rows: Rows, args: argparse.Namespace, metrics: dict[str, Any]) -> None:
    """Print the table and write --output-json."""
    print(table(rows, title))
    if args.output_json:
        try:
            Path(args.output_json).write_text(json.dumps(metrics, indent=2) + "\n")
        except OSError as error:
            raise ValidationError(f"--output-json {args.output_json}: {error.strerror}") from error
