"""The simulator against an engine on a CPU, in CPU seconds, so that other load on the machine counts for little.

    OMP_NUM_THREADS=1 python -m benchmarks.simulation_cpu [--rounds 2] [--seconds 12] [--output FOLDER]

An engine in this process, with one thread, is calibrated and then serves the three loads of `benchmarks.gpu.simulation`
in CPU-sized form: with the pacer of a server, arrivals as they come. All clocks (steps, pacer, arrivals, latencies) are
the CPU time of this process: what a machine would show that does nothing else, but for shared caches. While the engine
is idle the clock jumps to the next arrival. The front, in another process with `AsyncLLM`, is not part of it.

Every round calibrates again, because the speed of a shared machine drifts, and each load runs `--repeats` times: the
run that took the least CPU time, for the same work, counts.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import quire.engine.setup as setup
from benchmarks.gpu.simulation import METRICS, SMALL, Figures, Load, Report, make_loads, simulate
from quire import LLM, SamplingParams
from quire.messages.sampling import RequestOutputKind
from quire.scheduler.pacing import STREAM_STRETCH
from quire.scheduler.scheduler import Scheduler
from quire.simulation.calibration import calibrate
from quire.simulation.costs import CostModel, write_profile
from quire.simulation.fleet import FleetOptions


class CpuClock:
    """CPU seconds of this process, and what was skipped while there was nothing to do."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.skipped

    def skip_to(self, at: float) -> None:
        """Nothing happens before `at`."""
        self.skipped += max(0.0, at - self())


def serve(llm: LLM, load: Load, clock: CpuClock) -> Figures:
    """The load on the engine of this process, as a server's loop has it: requests are taken between steps."""
    engine, prompts = llm.llm_engine, load.prompts(llm.llm_engine.info.model.vocab_size)
    waiting = list(range(len(prompts)))[::-1]
    due: dict[str, float] = {}
    first: dict[str, float] = {}
    counts: dict[str, int] = {}
    last: dict[str, float] = {}
    llm.reset_prefix_cache()
    gc.collect()
    begin = clock()

    def add(number: int, at: float) -> None:
        name = f"{begin:.6f}-{number}"
        params = SamplingParams(
            temperature=0.0, max_tokens=load.conversations[number].turns[0].output, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        due[name], counts[name] = at, 0
        engine.add_request(name, {"prompt_token_ids": prompts[number]}, params)

    while waiting or engine.has_unfinished_requests():
        now = clock()
        if load.concurrency is None:
            while waiting and begin + load.conversations[waiting[-1]].at <= now:
                number = waiting.pop()
                add(number, begin + load.conversations[number].at)
        else:
            while waiting and len(due) - len(last) < load.concurrency:
                add(waiting.pop(), now)
        if not engine.has_unfinished_requests():
            clock.skip_to(begin + load.conversations[waiting[-1]].at)
            continue
        outputs, now = engine.step(), clock()
        for out in outputs:
            counts[out.request_id] += len(out.outputs[0].token_ids)
            first.setdefault(out.request_id, now)
            if out.finished:
                last[out.request_id] = now
    duration = clock() - begin
    ttft = [1000 * (first[name] - due[name]) for name in due]
    tpot = [1000 * (last[name] - first[name]) / (counts[name] - 1) for name in due if counts[name] > 1]
    return Figures(sum(counts.values()) / duration, ttft, tpot, duration)


def _timed(llm: LLM, load: Load, clock: CpuClock) -> tuple[float, Figures]:
    """The CPU seconds of a run, and its figures."""
    begin = time.process_time()
    figures = serve(llm, load, clock)
    return time.process_time() - begin, figures


def one_round(
    make: Callable[[float], LLM], clock: CpuClock, args: argparse.Namespace
) -> tuple[CostModel, Report, float]:
    """Calibrate and measure; also the CPU seconds for each wall-clock second."""
    wall, cpu = time.perf_counter(), time.process_time()
    llm = make(math.inf)
    try:
        info = llm.llm_engine.info
        costs = calibrate(
            llm, "cpu-smollm2-135m", f"quire calibrate --cpu-time --threads 1, {info.files.name} on one core of "
            f"{info.device.split(',')[0]} in {info.dtype}", seconds=args.calibration_seconds,
            say=lambda line: print(f"  {line}", flush=True), clock=clock,
        )  # fmt: skip
    finally:
        llm.shutdown()
    llm = make(args.stretch)
    try:
        options = FleetOptions(
            max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens,
            num_blocks=info.num_blocks, max_step_stretch=args.stretch,
        )  # fmt: skip
        report = Report()
        for load in make_loads(costs, options, SMALL, args.seconds):
            runs = [_timed(llm, load, clock) for _ in range(args.repeats)]
            print(f"{load.name}: " + ", ".join(f"{used:.2f}" for used, _ in runs) + " CPU seconds")
            report.add(load.name, min(runs, key=lambda run: run[0])[1], simulate(costs, load, options))
    finally:
        llm.shutdown()
    return costs, report, (time.process_time() - cpu) / (time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--stretch", type=float, default=STREAM_STRETCH, help="max_step_stretch; inf: prompts are not paced"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="CPU seconds of each load")
    parser.add_argument("--calibration-seconds", type=float, default=40.0)
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    folder, clock = Path(args.output or tempfile.mkdtemp()), CpuClock()
    folder.mkdir(parents=True, exist_ok=True)
    setup.Scheduler = functools.partial(Scheduler, clock=clock)  # type: ignore[misc]

    def make(stretch: float) -> LLM:
        return LLM(
            args.model, threads=1, max_model_len=4096, max_step_stretch=stretch, device="cpu", skip_tokenizer_init=True
        )

    found: list[dict[str, Any]] = []
    for number in range(args.rounds):
        costs, report, share = one_round(make, clock, args)
        write_profile(str(folder / f"profile-{number}.json"), costs)
        found.append({"profile": msgspec.to_builtins(costs), "loads": report.to_json(), "cpu_share": share})
        print(f"\nround {number}: {100 * share:.0f}% of a core; fitted within {100 * (costs.error or 0.0):.1f}%")
        print("\n".join(report.lines()), flush=True)
    (folder / "simulation.json").write_text(json.dumps(found, indent=1))
    print(f"{folder}: metrics are {', '.join(METRICS)}")


if __name__ == "__main__":
    main()
