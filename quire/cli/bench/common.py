"""What the benchmarks share: random prompts, the report on KV waste, and the JSON file."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench.profile import make_folder
from quire.cli.engine_flags import engine_settings
from quire.cli.terminal import table
from quire.cli.values import output_file
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.api.inputs import TokensPrompt
    from quire.api.llm import LLM
    from quire.messages.sampling import SamplingParams
    from quire.scheduler.stats import SchedulerStats

Rows = list[tuple[str, str]]


def bench_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings; random weights need no tokenizer."""
    settings = engine_settings(args)
    if settings.get("load_format") == "dummy":
        settings.setdefault("skip_tokenizer_init", True)
    if args.profile and (size := settings.get("data_parallel_size", 1)) > 1:
        raise ValidationError(f"--profile looks into one engine, and --data-parallel-size is {size}: leave one out")
    if args.profile:
        make_folder(Path(args.profile))
    return settings


def engine_stats(llm: LLM) -> SchedulerStats | None:
    """What the engine has counted; None where there are several, each in a process of its own."""
    if llm.llm_engine.config.data_parallel_size > 1:
        return None
    return copy.copy(llm.llm_engine.core.scheduler.stats)


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[TokensPrompt]:
    """Prompts of random tokens: no two begin alike, so that none is served from the prefix cache."""
    import numpy as np

    vocabulary = llm.llm_engine.info.model.vocab_size
    drawn = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
    return [{"prompt_token_ids": tokens} for tokens in drawn.tolist()]


def fixed_length(llm: LLM, args: argparse.Namespace, n: int = 1) -> SamplingParams:
    """Exactly --output-len tokens; refused early if they do not fit the model's length."""
    from quire.messages.sampling import SamplingParams

    longest = llm.llm_engine.info.max_model_len
    if args.input_len + args.output_len > longest:
        raise ValidationError(
            f"--input-len {args.input_len} and --output-len {args.output_len} exceed the {longest} tokens of a sequence"
        )
    has_tokenizer = not llm.llm_engine.config.skip_tokenizer_init
    return SamplingParams(n=n, max_tokens=args.output_len, ignore_eos=True, detokenize=has_tokenizer)


def waste_rows(stats: SchedulerStats | None, reserved: int) -> Rows:
    """The share of KV slots that held no token, beside what reserving the maximum would have wasted."""
    if stats is None:
        return []
    return [
        ("KV waste", f"{100 * stats.waste:.2f}% of the slots held"),
        ("if reserved", f"{100 * stats.waste_if_reserved(reserved):.1f}% with {reserved} slots for every request"),
    ]


def waste_metrics(stats: SchedulerStats | None, reserved: int) -> dict[str, float]:
    """The same for --output-json."""
    return {} if stats is None else {"kv_waste": stats.waste, "kv_waste_if_reserved": stats.waste_if_reserved(reserved)}


def add_output(parser: Any) -> None:
    """--output-json."""
    parser.add_argument("--output-json", type=output_file, metavar="FILE", help="also write the figures to this file")


def report(title: str, rows: Rows, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the table and write the file."""
    print(table(rows, title))
    if args.output_json:
        try:
            Path(args.output_json).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            raise ValidationError(f"--output-json {args.output_json}: {error.strerror}") from error
