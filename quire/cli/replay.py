"""`quire replay`: reruns the plans of a recorded run on a device, and compares the sampled tokens."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_common, add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say

if TYPE_CHECKING:
    from quire.executor.recording import Comparison, Recording
    from quire.messages.plan import StepPlan

WHAT = (
    "Rerun the plans that `--record FILE` wrote, without the scheduler, and compare the sampled tokens with "
    "the recorded ones. Flags replace recorded settings: the same steps on another device, or with other kernels."
)
EXAMPLES = """
  quire generate "Once upon a time" --record run.quire
  quire replay run.quire                          the same steps again; exit code 1 if a token differs
  quire replay run.quire --show                   one line per step
  quire replay run.quire --step 17                one plan in full
  quire replay run.quire --enforce-eager          without captured graphs
"""
FLAGS = (
    "model", "load_format", "dtype", "device", "attention_backend", "enforce_eager", "batch_invariant",
)  # fmt: skip
SHOWN_DIVERGENCES = 8


def configure(parser: Parser) -> None:
    """The flags of `quire replay`."""
    parser.describe(run, WHAT, EXAMPLES, "FILE")
    parser.add_argument("recording", metavar="FILE", help="a file written with --record")
    parser.add_argument("--show", action="store_true", help="list the steps instead of running them")
    parser.add_argument("--step", type=int, metavar="N", help="print the plan of one step instead of running any")
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Show the recording, or run it; returns 1 if sampled tokens differ from the recorded ones."""
    from quire.executor.recording import Recording

    recording = Recording(args.recording)
    if args.step is not None:
        return _print_plan(recording, args.step)
    if args.show:
        _print_steps(recording)
        return 0
    return _report(*_replay(recording, engine_settings(args)))


def _print_steps(recording: Recording) -> None:
    columns = ("step", "rows", "decodes", "prompt tokens", "sampled", "added", "dropped", "blocks", "max context")
    print("  ".join(columns))
    for plan in recording.plans():
        numbers = (
            plan.step, len(plan.rows), plan.num_decodes, len(plan.tokens), len(plan.sample_rows),
            len(plan.add) + len(plan.forks) + len(plan.branches), len(plan.drop), len(plan.blocks), plan.max_context,
        )  # fmt: skip
        print("  ".join(f"{number:>{len(name)}}" for name, number in zip(columns, numbers, strict=True)))


def _print_plan(recording: Recording, step: int) -> int:
    import msgspec

    from quire.errors import ConfigError

    plan = next((plan for plan in recording.plans() if plan.step == step), None)
    if plan is None:
        raise ConfigError(f"{recording.path} has no step {step}", "step", step)
    text = msgspec.json.encode(plan, enc_hook=lambda array: array.tolist())
    print(msgspec.json.format(text, indent=2).decode())
    return 0


def _replay(recording: Recording, settings: dict[str, Any]) -> tuple[Comparison, list[tuple[bool, float]]]:
    """The comparison, and for each step whether it only decodes and the seconds from its launch to its result."""
    from quire.errors import ConfigError
    from quire.executor.base import ExecutorSpec, StepLimits
    from quire.executor.recording import Comparison
    from quire.executor.registry import executor_backend
    from quire.loading.files import ModelFiles
    from quire.loading.hub import find_model
    from quire.loading.model_config import read_model_config
    from quire.messages.plan import StepMasks, StepPlan

    header = recording.header
    config = header.config(**settings)
    files = find_model(config) if "model" in settings else ModelFiles.from_plain(header.files)
    limits = StepLimits(header.max_model_len, header.max_num_seqs, header.max_num_batched_tokens)
    model = read_model_config(files, config.hf_overrides)
    backend = executor_backend(config)
    started = backend.start(ExecutorSpec(config, files, model, backend.choose_platform(config), limits))
    if started.memory.num_blocks < header.num_blocks:
        raise ConfigError(
            f"the recorded cache has {header.num_blocks} blocks, and the same bytes hold {started.memory.num_blocks} "
            "with these settings: replay with the recorded dtype and model",
            "recording",
            str(recording.path),
        )
    executor, comparison = started.executor, Comparison()
    launched: dict[int, tuple[StepPlan, float, Any]] = {}
    times: list[tuple[bool, float]] = []
    try:
        for message in recording.messages():
            if isinstance(message, StepPlan):
                _check_replayable(message)
                comparison.note(message)
                launched[message.step] = message, time.perf_counter(), executor.submit(message)
            elif isinstance(message, StepMasks):
                executor.supply(launched[message.step][2], message)
            else:
                plan, begin, handle = launched.pop(message.step)
                comparison.compare(message, executor.collect(handle))
                times.append((len(plan.rows) == plan.num_decodes, time.perf_counter() - begin))
    finally:
        executor.shutdown()
    return comparison, times


def _check_replayable(plan: StepPlan) -> None:
    from quire.errors import ConfigError

    if plan.moves is not None:
        raise ConfigError(
            f"step {plan.step} moves blocks between the device and host memory, whose timing a recording does not "
            "have: record the run with --swap-space 0 and without --kv-disk",
            "recording",
        )


def _report(comparison: Comparison, times: list[tuple[bool, float]]) -> int:
    for name, chosen in (("decode steps", True), ("steps with prompts", False)):
        seconds = [elapsed for is_decode, elapsed in times if is_decode == chosen]
        if seconds:
            say(f"{len(seconds)} {name}: {1000 * statistics.median(seconds):.2f} ms from launch to result (median)")
    differing = comparison.divergences
    say(f"{comparison.compared} tokens compared, {len(differing)} requests diverge")
    for found in differing[:SHOWN_DIVERGENCES]:
        say(
            f"  step {found.step}, row {found.row}, request {found.request}: recorded token {found.recorded}, "
            f"sampled {found.sampled}"
        )
    return 1 if differing else 0
