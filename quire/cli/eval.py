"""`quire eval`: perplexity on a text, distance from another model, and lm-eval tasks."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.quantize import read_text
from quire.cli.values import positive

if TYPE_CHECKING:
    from quire.api.evaluate import Evaluation

WHAT = """\
Measure how well a model predicts a text (perplexity), and with --against how far it is from another model on the same
text: the share of positions with the same most likely token, and the mean KL divergence of the next token's
distributions. Takes the engine's flags, so that every format of weights and KV cache can be measured.

The text is tokenized once and read in windows of --window tokens, --stride tokens apart. Every token but the first is
scored exactly once, in the first window that holds it; all scored tokens weigh the same. --against runs the other
model with the same flags, except for quantization and kv-cache-dtype; both models are in memory together.

--tasks runs tasks of EleutherAI's lm-eval (pip install lm-eval) on the engine instead."""
EXAMPLES = """
  quire eval --text book.txt
  quire eval ./my-model-int4 --text book.txt --against ./my-model --json
  quire eval qwen3-0.6b --tasks hellaswag,arc_easy --limit 100
"""
UNQUANTIZED = ("quantization", "kv_cache_dtype")
"""Flags that the model of --against does not get."""


def configure(parser: Parser) -> None:
    """The flags of `quire eval`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] --text FILE")
    add_model(parser)
    what = parser.add_argument_group("evaluation")
    what.add_argument("--text", metavar="FILE", help="UTF-8 text to read")
    what.add_argument("--against", metavar="MODEL", help="compare with this model, usually the unquantized one")
    what.add_argument(
        "--window", type=positive, metavar="N", help="tokens read at a time (default: 1024 or the model's)"
    )
    what.add_argument("--stride", type=positive, metavar="N", help="tokens between windows (default: half a window)")
    what.add_argument("--max-tokens", type=positive, metavar="N", help="read only so many tokens of the text")
    what.add_argument("--tasks", metavar="NAMES", help="lm-eval tasks, separated by commas")
    what.add_argument("--limit", type=positive, metavar="N", help="with --tasks: documents of each task")
    what.add_argument("--num-fewshot", type=int, metavar="N", help="with --tasks: examples in the prompt")
    what.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    if (args.text is None) == (args.tasks is None):
        args.parser.error("give --text FILE or --tasks NAMES")
    if args.tasks is not None:
        return _run_tasks(args)
    from quire.api.evaluate import evaluate
    from quire.config import EngineConfig

    settings = engine_settings(args)
    reference = None
    if args.against is not None:
        kept = {name: value for name, value in settings.items() if name not in (*UNQUANTIZED, "model")}
        reference = EngineConfig(model=args.against, **kept)
    text = read_text(args.text)
    found = evaluate(EngineConfig(**settings), text, reference, args.window, args.stride, args.max_tokens)
    if args.json:
        print(json.dumps({"text": args.text, **found.as_dict()}))
    else:
        _print(found, args.text)
    return 0


def _print(found: Evaluation, text: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        box=box.SIMPLE_HEAD,
        title=f"{text}: {found.scored} tokens scored, windows of {found.window}, stride {found.stride}",
        title_justify="left",
    )
    shown.add_column("model")
    shown.add_column("perplexity", justify="right")
    other = found.against
    if other is None:
        shown.add_row(found.model, f"{found.perplexity:.4f}")
    else:
        for name in ("ratio", "same greedy token", "mean KL (nats)"):
            shown.add_column(name, justify="right")
        shown.add_row(other.model, f"{other.perplexity:.4f}", "", "", "")
        shown.add_row(
            found.model, f"{found.perplexity:.4f}", f"{other.perplexity_ratio:.4f}", f"{other.greedy_agreement:.2%}",
            f"{other.mean_kl:.5f}",
        )  # fmt: skip
    Console().print(shown)


def _run_tasks(args: argparse.Namespace) -> int:
    from quire.api.lm_eval import run_tasks

    tasks = [name for name in args.tasks.split(",") if name]
    results = run_tasks(engine_settings(args), tasks, args.limit, args.num_fewshot)
    if args.json:
        print(json.dumps(results))
        return 0
    _print_tasks(results)
    return 0


def _print_tasks(results: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("task")
    shown.add_column("metric")
    shown.add_column("value", justify="right")
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                shown.add_row(task, name, f"{value:.4f}")
    Console().print(shown)
