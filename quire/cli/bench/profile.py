"""`--profile`: a trace of some steps in the middle of a run, and a table of where a step's time is spent."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench.limits import StepShape, Work, measure_speed
from quire.cli.bench.profile_table import metrics, report
from quire.cli.bench.trace import MARK, Trace
from quire.cli.values import positive
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.messages.plan import StepPlan

FOLDER = "quire-profile"
WARM_UP = 2
"""Steps before recording starts: the profiler takes a while to start."""


def add_profile(parser: Any) -> None:
    """--profile and --profile-steps."""
    parser.add_argument(
        "--profile", nargs="?", const=FOLDER, metavar="DIR",
        help=f"then run once more, write a trace of some steps into this folder (default: {FOLDER}) and print where "
        "their time is spent",
    )  # fmt: skip
    parser.add_argument("--profile-steps", type=positive, default=20, metavar="N", help="steps to record (default: 20)")


@dataclass(frozen=True)
class Profile:
    """The result: as text, and for --output-json."""

    text: str
    metrics: dict[str, Any]


@dataclass
class StepTrace:
    """What a run records beside the trace."""

    begins: list[float] = field(default_factory=list)
    """When each step began, seconds."""
    works: list[Work] = field(default_factory=list)
    """What each step computed."""

    def seconds_per_step(self, first: int, last: int) -> float | None:
        """Mean over the steps from `first` to before `last`; None if there were fewer steps."""
        if first < 0 or last <= first or last >= len(self.begins):
            return None
        return (self.begins[last] - self.begins[first]) / (last - first)

    def average(self, first: int, count: int) -> Work:
        """The mean work of a step, over `count` of them."""
        works = self.works[first : first + count] or self.works[-1:]
        columns = zip(*(vars(work).values() for work in works), strict=True)
        return Work(*(sum(column) / len(works) for column in columns))


def make_folder(folder: Path) -> None:
    """Create the folder for the trace; raises if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValidationError(f"--profile {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ValidationError(f"--profile {folder}: the folder is not writable")


def expected_steps(llm: LLM, requests: int, input_len: int, output_len: int) -> int:
    """About how many steps a run takes in which all requests arrive at once and run to their full length."""
    info = llm.llm_engine.info
    waves = math.ceil(requests / info.max_num_seqs)
    return math.ceil(requests * input_len / info.max_num_batched_tokens) + waves * (output_len - 1)


def profile(llm: LLM, args: argparse.Namespace, run: Callable[[], object], steps: int) -> Profile:
    """Call `run`, which takes about `steps` steps, and record some in the middle."""
    import torch
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    count = max(1, min(args.profile_steps, steps - 1))
    first = max(1, (steps - count) // 2)
    waits = max(0, first - WARM_UP)
    on_gpu = torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto logs to stderr
    timing = schedule(wait=waits, warmup=first - waits, active=count, repeat=1)
    path = Path(args.profile) / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
    llm.reset_prefix_cache()
    with profiler(activities=activities, schedule=timing) as recorder, marked(llm, recorder.step) as recording:
        run()
    recorder.export_chrome_trace(str(path))
    try:
        trace = Trace.read(path)
    except ValueError as error:
        raise ValidationError(f"--profile: {error}; give it more output tokens") from error
    before = recording.seconds_per_step(max(1, waits - count), waits)
    work = recording.average(first, trace.steps)
    speed = measure_speed() if on_gpu else None
    text = report(trace, work, StepShape.of(llm.llm_engine.info), speed, before)
    return Profile(f"{text}\n\n  trace: {path} (for https://ui.perfetto.dev)", metrics(trace, work, str(path)))


# Marking the parts of a step


@contextmanager
def marked(llm: LLM, after_step: Callable[[], None]) -> Iterator[StepTrace]:
    """Within this context each step, and each part of it, is marked in the trace."""
    engine = llm.llm_engine
    core, recording = engine.core, StepTrace()
    scheduler, executor = core.scheduler, core._executor
    step, submit = engine.step, executor.submit

    def recorded_submit(plan: StepPlan) -> Any:
        recording.works.append(_work(plan, scheduler.rows.computed[plan.rows]))
        return submit(plan)

    def recorded_step() -> Any:
        recording.begins.append(time.perf_counter())
        with _mark("step"):
            outputs = step()
        after_step()
        return outputs

    with ExitStack() as restore:
        for part, owner, name, function in (
            ("schedule", scheduler, "schedule", scheduler.schedule),
            ("launch", executor, "submit", recorded_submit),
            ("collect", executor, "collect", executor.collect),
            ("update", scheduler, "update", scheduler.update),
            ("output", engine._outputs, "process", engine._outputs.process),
        ):
            setattr(owner, name, _marking(part, function))
            restore.callback(delattr, owner, name)
        engine.step = recorded_step  # type: ignore[method-assign]
        restore.callback(delattr, engine, "step")
        yield recording


def _mark(name: str) -> Any:
    from torch.profiler import record_function

    return record_function(MARK + name)


def _marking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with _mark(name):
            return function(*arguments)

    return call


def _work(plan: StepPlan, contexts: Any) -> Work:
    # The last token of a row attends to all of its context, each earlier one to one token less.
    pairs = (plan.counts * (contexts - (plan.counts - 1) / 2)).sum()
    return Work(
        tokens=float(plan.num_tokens),
        rows=float(len(plan.rows)),
        draws=float(len(plan.samples)),
        context=float(contexts.sum()),
        pairs=float(pairs),
    )
