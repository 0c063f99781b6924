"""`quire train-draft`: trains an EAGLE-3 head that drafts tokens for a model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say, table
from quire.cli.values import positive, readable_bytes, size

if TYPE_CHECKING:
    from quire.training.run import DraftReport
    from quire.training.trainer import Trainer

WHAT = """\
Train a head that drafts tokens for a model, for speculative decoding: an EAGLE-3 head, one layer that reads what some
of the model's layers compute. Reports how many drafts the model would accept on held-out text, before and after. The
folder that it writes has the form of published heads, which vLLM reads too.

Data is text, or JSON lines with "messages", with "prompt" and "response", or with "text". Drafts are accepted most
often if the head has seen the model's own words: --regenerate N lets the model answer the prompts of the data first.
--from-traffic reads a folder with files of quire run-batch (requests and results), sessions of a disk tier and, with
--regenerate, a server's request log in JSON.

An interrupted run goes on if the same command is given again."""
EXAMPLES = """
  quire train-draft --data prompts.jsonl --regenerate 256 -o smollm2-draft
  quire train-draft ./my-model --data chats.jsonl --minutes 30 -o my-draft
  quire train-draft ./my-model --from-traffic /var/lib/quire -o my-draft
"""
REPORT_SECONDS = 10.0


def configure(parser: Parser) -> None:
    """The flags of `quire train-draft`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] --data FILE -o FOLDER")
    add_model(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--data", action="append", default=[], metavar="FILE", help="text or JSON lines; several times")
    data.add_argument("--from-traffic", metavar="DIR", help="folder with what a server or run-batch wrote")
    data.add_argument(
        "--held-out",
        action="append",
        default=[],
        metavar="FILE",
        help="measure on this file (default: 5%% of the data)",
    )
    data.add_argument(
        "--regenerate", type=positive, metavar="N", help="the model answers the prompts, in N tokens each"
    )
    data.add_argument("--answers", type=positive, default=2, metavar="N", help="for each prompt, the first greedy "
                      "(default: 2)")  # fmt: skip
    data.add_argument("--temperature", type=float, default=0.7, metavar="X", help="of the other answers (default: 0.7)")
    data.add_argument("--max-length", type=size, default=1024, metavar="N", help="tokens of a sequence (default: 1024)")
    head = parser.add_argument_group("head")
    head.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new or empty folder for the head")
    head.add_argument(
        "--draft-vocab", type=size, metavar="N",
        help="tokens that can be proposed, the most frequent ones (default: as many as cover 99%% of the data)",
    )  # fmt: skip
    head.add_argument("--intermediate-size", type=size, metavar="N", help="width of its MLP (default: the model's)")
    head.add_argument(
        "--feature-layers", type=_layers, metavar="A,B,C",
        help="layers of the model whose inputs it reads (default: 2, half, and the third from the end)",
    )  # fmt: skip
    head.add_argument("--head-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                      help="of the written weights (default: bfloat16)")  # fmt: skip
    how = parser.add_argument_group("training")
    how.add_argument("--minutes", type=float, metavar="X", help="time for everything, from the first prompt to the end")
    how.add_argument(
        "--epochs", type=positive, metavar="N", help="passes over the data (default: 10; with --minutes: 40 at most)"
    )
    how.add_argument("--unroll", type=positive, default=5, metavar="N", help="draft steps to train (default: 5)")
    how.add_argument("--batch-tokens", type=size, metavar="N", help="tokens a step (default: 16384, 2048 on a CPU)")
    how.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="highest (default: 0.001)")
    how.add_argument("--train-seed", type=int, default=0, metavar="N", help="of the order and the first weights")
    how.add_argument("--keep-work", action="store_true", help="keep the sequences and features when done")
    how.add_argument("--json", action="store_true", help="print the report as JSON")
    add_engine_flags(parser)
    add_common(parser)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 2,15,27") from None


def run(args: argparse.Namespace) -> int:
    """Train, and report."""
    from quire.config import EngineConfig
    from quire.platforms import choose
    from quire.training.run import DraftSettings, train_draft
    from quire.training.trainer import TrainSettings

    config = EngineConfig(**engine_settings(args))
    on_cpu = choose(config.device).device.type == "cpu"
    training = TrainSettings(
        steps=args.unroll, epochs=args.epochs or (10 if args.minutes is None else 40),
        batch_tokens=args.batch_tokens or (2048 if on_cpu else 16384),
        learning_rate=args.learning_rate, seed=args.train_seed,
    )  # fmt: skip
    settings = DraftSettings(
        tuple(map(Path, args.data)), None if args.from_traffic is None else Path(args.from_traffic),
        tuple(map(Path, args.held_out)), regenerate=args.regenerate, answers=args.answers,
        temperature=args.temperature, max_length=args.max_length, draft_vocab=args.draft_vocab,
        intermediate_size=args.intermediate_size, feature_layers=args.feature_layers, minutes=args.minutes,
        dtype=args.head_dtype, keep_work=args.keep_work, train=training,
    )  # fmt: skip
    report = train_draft(config, Path(args.output), settings, say, training_bar)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    return 0


def _print(report: DraftReport) -> None:
    print(
        table(
            [
                ("head", f"{report.parameters / 1e6:.1f} M parameters, {readable_bytes(report.num_bytes)}"),
                ("draft vocabulary", f"{report.draft_vocab} tokens, {report.coverage:.2%} of those learned"),
                ("data", f"{report.sequences} sequences, {report.tokens} tokens, {report.learned_tokens} learned"),
                ("training", f"{report.steps} steps, {report.epochs:g} epochs"),
                ("seconds", ", ".join(f"{name} {seconds:.0f}" for name, seconds in report.seconds.items())),
            ],
            str(report.folder),
        )
    )
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        box=box.SIMPLE_HEAD,
        title=f"drafts accepted under greedy decoding, {report.after.chains} positions of held-out text",
        title_justify="left",
    )
    shown.add_column("drafts")
    for name in ("before", "after"):
        shown.add_column(name, justify="right")
    pairs = zip(report.before.by_position, report.after.by_position, strict=True)
    for number, (before, after) in enumerate(pairs, 1):
        shown.add_row(f"first {number}" if number > 1 else "first", f"{before:.1%}", f"{after:.1%}")
    ends = report.before.tokens_per_step, report.after.tokens_per_step
    shown.add_row("tokens a step", *(f"{end:.2f}" for end in ends))
    Console(width=100).print(shown)


@contextmanager
def training_bar(trainer: Trainer) -> Iterator[Callable[[Trainer, Any], None]]:
    """Shows each step on a terminal; elsewhere a line every ten seconds."""
    import sys

    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, note="")

        def show(trainer: Trainer, loss: Any) -> None:
            if trainer.state.step % 10 == 0 or trainer.total < 100:
                bar.update(task, completed=trainer.progress, note=_state(trainer, loss))

        yield show


class _Lines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, trainer: Trainer, loss: Any) -> None:
        if time.monotonic() - self._last >= REPORT_SECONDS:
            self._last = time.monotonic()
            say(f"{trainer.progress:.0%}: {_state(trainer, loss)}")


def _state(trainer: Trainer, loss: Any) -> str:
    return f"step {trainer.state.step}, epoch {trainer.state.epoch + 1}, loss {float(loss):.3f}"
