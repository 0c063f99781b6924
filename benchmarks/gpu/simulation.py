"""The simulator against the card: calibrate, measure three loads and a better setting, and compare with predictions.

    python -m benchmarks.gpu.simulation [--model FOLDER] [--parts calibrate loads sweep] [--limit SECONDS]
    python -m benchmarks.gpu.simulation --model benchmarks/gpu/models/qwen3-0.6b
    python -m benchmarks.gpu.simulation --small          # a CPU and the default model: the same steps, a few minutes

1. `quire calibrate` writes a profile of this device (random weights, token ids in and out, no tokenizer).
2. Three loads run through `AsyncLLM`: a closed loop, Poisson arrivals, Poisson arrivals that share long prefixes. The
   simulator runs the same conversations with the same arrival times. Rates and counts follow from the profile, so that
   each load takes about `--seconds`.
3. The simulator sweeps settings for the closed loop; an engine with the best one runs that load, and the Poisson load.

One engine runs at a time, and nothing is simulated while it serves: simulations run in other processes while
engines start and end. Results go to `--output` (default: $OUT, else a temporary folder) as soon as they are known: the
profile as `profile.json`, everything else as `simulation.json`. A part that fails prints its traceback, and the others
go on. With `--limit` what would not end within so many seconds does not begin, and the output says so; with `--profile`
the first part is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from quire import AsyncLLM, SamplingParams
from quire.cli.bench.common import percentile
from quire.cli.bench.load.datasets import arrival_times
from quire.messages.sampling import RequestOutputKind
from quire.scheduler.pacing import STREAM_STRETCH
from quire.simulation.costs import CostModel, StepWork, read_profile, write_profile
from quire.simulation.fleet import Fleet, FleetOptions
from quire.simulation.load import Conversation, LoadOptions, OpenConversation, draw_load

FOLDER = Path(__file__).parent / "models"
SEED = 5
PROBE = 400
"""Requests that are simulated to know a load's capacity."""
WARM_SHARE = 0.2
"""Of a load's requests that run before it, with other tokens, so that its graphs are captured."""
ALONE = 24
"""Lone requests that measure what a request takes beside its steps."""
FALLBACK = "h200-llama-3.1-8b"
METRICS = ("output tok/s", "ttft p50", "ttft p99", "tpot p50", "tpot p99")
LIMITS = (0.10, 0.10, 0.20, 0.10, 0.20)
"""How far off each may be."""
ENDING = 5.0
"""Seconds that are kept to end an engine and to write results."""
WORKERS = 8
"""Processes that simulate."""
BEGIN = time.perf_counter() - time.process_time()
"""When this process began, nearly."""


@dataclass(frozen=True)
class Size:
    """How large loads are."""

    input_len: int = 512
    output_len: int = 128
    suffix_len: int = 128
    prefix_len: int = 2048
    num_prefixes: int = 8
    concurrency: int = 64
    max_model_len: int = 16384
    stretches: tuple[float, ...] = (1.3, STREAM_STRETCH, 2.5, 4.0, math.inf)
    budgets: tuple[int, ...] = (1024, 4096, 16384)


SMALL = Size(64, 48, 24, 256, 3, 6, 4096, budgets=(128, 512))


@dataclass
class Load:
    """Requests, and how they are sent."""

    name: str
    conversations: list[Conversation]
    concurrency: int | None = None
    """A closed loop; None: at their times."""

    def prompts(self, limit: int) -> list[list[int]]:
        """Of every conversation, as the simulator has them; ids stay below `limit`."""
        made = [OpenConversation(each, number, SEED).prompt() for number, each in enumerate(self.conversations)]
        return made if limit > 30_000 else [[token % limit for token in prompt] for prompt in made]


@dataclass
class Figures:
    """What is compared. Times in milliseconds."""

    throughput: float
    ttft: list[float]
    tpot: list[float]
    duration: float

    def values(self) -> list[float]:
        times = [percentile(sorted(each), percent) for each in (self.ttft, self.tpot) for percent in (50, 99)]
        return [self.throughput, *times]


def simulate(costs: CostModel, load: Load, options: FleetOptions) -> Figures:
    """The simulator's figures."""
    result = Fleet(costs, replace(options, concurrency=load.concurrency)).run(load.conversations, SEED)
    ttft, tpot = ([1000 * value for value in result.values(name)] for name in ("ttft", "tpot"))
    return Figures(result.per_second(result.output_tokens), ttft, tpot, result.duration)


# Loads


def make_loads(costs: CostModel, options: FleetOptions, size: Size, seconds: float) -> list[Load]:
    """The three loads, each about so many seconds long on this device."""
    plain = LoadOptions(size.input_len, size.output_len, 0.5, seed=SEED)
    shared = replace(plain, input_len=size.suffix_len, prefix_len=size.prefix_len, num_prefixes=size.num_prefixes)

    def per_second(options_of_load: LoadOptions, concurrency: int | None) -> float:
        probe = Load("", draw_load(options_of_load, [0.0] * PROBE), concurrency)
        return PROBE / simulate(costs, probe, options).duration

    closed = max(size.concurrency, round(seconds * per_second(plain, size.concurrency)))
    loads = [Load("closed loop", draw_load(plain, [0.0] * closed), size.concurrency)]
    for name, drawn, share in (("poisson", plain, 0.6), ("prefixes", shared, 0.6)):
        rate = share * per_second(drawn, None)
        times = arrival_times(max(8, round(rate * seconds)), rate, 1.0, 1, SEED)
        loads.append(Load(name, draw_load(drawn, times)))
    return loads


# The device


async def _send(llm: AsyncLLM, prompt: list[int], output: int, due: float) -> tuple[float, float, int]:
    """Seconds from `due` to the first and the last token, and the number of tokens."""
    params = SamplingParams(
        temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    first, count = 0.0, 0
    async for out in llm.generate({"prompt_token_ids": prompt}, params):
        first = first or time.perf_counter()
        count += len(out.outputs[0].token_ids)
    return first - due, time.perf_counter() - due, count


async def _drive(llm: AsyncLLM, load: Load, prompts: Sequence[list[int]]) -> Figures:
    """Send all requests of the load; a closed loop counts from sending."""
    slots = None if load.concurrency is None else asyncio.Semaphore(load.concurrency)

    async def one(prompt: list[int], conversation: Conversation) -> tuple[float, float, int]:
        if slots is None:
            due = start + conversation.at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            return await _send(llm, prompt, conversation.turns[0].output, due)
        async with slots:
            return await _send(llm, prompt, conversation.turns[0].output, time.perf_counter())

    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    sent = [asyncio.create_task(one(*pair)) for pair in zip(prompts, load.conversations, strict=True)]
    try:
        done = await asyncio.gather(*sent)
    finally:
        for task in sent:
            task.cancel()
        gc.unfreeze()
    duration = time.perf_counter() - start
    tpot = [1000 * (last - first) / (count - 1) for first, last, count in done if count > 1]
    return Figures(sum(each[2] for each in done) / duration, [1000 * each[0] for each in done], tpot, duration)


async def measure(llm: AsyncLLM, load: Load, most: float) -> Figures:
    """Warm up with the beginning of the load, empty the prefix cache, run the load; in at most so many seconds each."""
    prompts = load.prompts(llm.info.model.vocab_size)
    warm = replace(load, conversations=load.conversations[: max(2, int(WARM_SHARE * len(prompts)))])
    others = [[token // 2 + 1 for token in prompt] for prompt in prompts[: len(warm.conversations)]]
    await asyncio.wait_for(_drive(llm, warm, others), most)
    await llm.reset_prefix_cache()
    return await asyncio.wait_for(_drive(llm, load, prompts), most)


async def measure_front(llm: AsyncLLM, costs: CostModel) -> float:
    """Seconds that a request takes beside its step: the median of lone requests."""
    seen = []
    for number in range(ALONE):
        prompt = [3 + (number * 7919 + i * 13) % 4000 for i in range(16)]
        seen.append((await _send(llm, prompt, 2, time.perf_counter()))[0])
    alone = costs.seconds(StepWork(0, 16, 0, 136, prompts=1)) + (0.0 if costs.pipeline_depth else costs.host_seconds)
    return max(0.0, statistics.median(seen[ALONE // 4 :]) - alone)


def options_of(llm: AsyncLLM, stretch: float = STREAM_STRETCH) -> FleetOptions:
    """The settings of this engine."""
    info = llm.info
    return FleetOptions(
        max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens, num_blocks=info.num_blocks,
        max_step_stretch=stretch,
    )  # fmt: skip


# Results


class Report:
    """Measured and predicted figures, side by side."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[float], list[float] | None]] = []

    def add(self, name: str, measured: Figures, predicted: Figures | None) -> None:
        """A load was measured; what is predicted may follow."""
        self.rows.append((name, measured.values(), None))
        print(f"{name}: measured {measured.duration:.1f} s", flush=True)
        if predicted is not None:
            self.predict(name, predicted)

    def predict(self, name: str, predicted: Figures) -> None:
        """The prediction of a load that was measured."""
        places = [place for place, row in enumerate(self.rows) if row[0] == name]
        self.rows[places[-1]] = (*self.rows[places[-1]][:2], predicted.values())

    def lines(self) -> list[str]:
        """The table: measured, predicted, predicted / measured, and ! where that is too far off."""
        found = [f"{'':24}" + "".join(f"{name:>29}" for name in METRICS)]
        for name, measured, predicted in self.rows:
            cells = []
            for seen, expected, limit in zip(measured, predicted or [math.nan] * len(LIMITS), LIMITS, strict=True):
                ratio = expected / seen if seen else math.nan
                cells.append(f"{seen:10.2f} {expected:10.2f} {ratio:5.2f}{' ' if abs(ratio - 1) <= limit else '!'} ")
            found.append(f"{name:24}" + "".join(f"{cell:>29}" for cell in cells))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"load": name, "measured": dict(zip(METRICS, seen, strict=True)),
             "predicted": dict(zip(METRICS, expected, strict=True)) if expected else None}
            for name, seen, expected in self.rows
        ]  # fmt: skip


@dataclass
class Deadline:
    """Seconds that everything may take."""

    limit: float
    begin: float

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begin

    @property
    def left(self) -> float:
        return self.limit - self.spent

    def allows(self, what: str, seconds: float) -> bool:
        """Whether something that takes so long may begin; says so if not."""
        if seconds + ENDING <= self.left:
            return True
        print(f"left out: {what}: about {seconds:.0f} s, and {self.left:.0f} s are left", flush=True)
        return False


class Run:
    """The parts, and what they pass on."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.args = args
        self.size = SMALL if args.small else Size()
        self.folder = Path(args.output or tempfile.mkdtemp())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = Deadline(args.limit, BEGIN)
        self.report = Report()
        self.found: dict[str, Any] = {"model": args.model}
        self.costs = read_profile(args.profile or FALLBACK)
        self._pool = pool
        self._start_seconds = args.start_seconds
        self._predictions: dict[str, Future[Figures]] = {}
        self._loads: list[Load] = []
        self._swept: list[list[float]] = []
        """Figures of the closed loop by simulation: with the default settings, then those swept."""
        self._options = FleetOptions()

    def write(self) -> None:
        """Write what is known."""
        known = {"profile": msgspec.to_builtins(self.costs), "loads": self.report.to_json()}
        text = json.dumps(self.found | known | {"seconds": self.deadline.spent}, indent=1)
        (self.folder / "simulation.json").write_text(text)

    def part(self, name: str, do: Callable[[], None]) -> None:
        """One part, if it is wanted; its failure does not stop the others."""
        if name in self.args.parts:
            try:
                do()
            except Exception:
                traceback.print_exc()
            self._collect_predictions()
            self.write()
            print(f"{name}: {self.deadline.spent:.0f} s so far", flush=True)

    # Calibration

    def calibrate(self) -> None:
        """Write the profile, in a process of its own: its memory is free afterwards."""
        args, path = self.args, str(self.folder / "profile.json")
        command = [sys.executable, "-m", "quire.cli.main", "calibrate", "--model", args.model]
        command += ["--load-format", args.load_format, "--max-model-len", str(self.size.max_model_len)]
        command += ["--seconds", str(args.calibration_seconds), "-o", path]
        most = 2 * args.calibration_seconds + 120
        if math.isfinite(self.deadline.limit):
            most = min(most, self.deadline.left - self._start_seconds - self._load_seconds - ENDING)
        try:
            subprocess.run(command, check=True, timeout=max(1.0, most), env={**os.environ, "PYTHONUNBUFFERED": "1"})
        except (subprocess.SubprocessError, OSError) as error:
            print(f"calibration failed, so predictions are those of {self.costs.name}: {error}", flush=True)
            return
        self.costs = read_profile(path)

    # Loads

    @property
    def _load_seconds(self) -> float:
        """What measuring one takes, with what warms it up."""
        return (1.1 + WARM_SHARE) * self.args.seconds + 1

    def measure_loads(self) -> None:
        """The three loads on one engine; meanwhile, before it serves, the sweep."""
        if not self.deadline.allows("the loads", self._start_seconds + self._load_seconds):
            return
        planned = ThreadPoolExecutor(1).submit(self._plan)
        with self._engine() as llm:
            self._loads, self._swept = planned.result()
            asyncio.run(self._measure_loads(llm))
        self._predict(self._loads, self._options)

    def _plan(self) -> tuple[list[Load], list[list[float]]]:
        """The loads, and figures of the closed loop: first with the settings of the profile, then those swept."""
        costs, size = self.costs, self.size
        options = FleetOptions()
        loads = self._pool.submit(make_loads, costs, options, size, self.args.seconds).result()
        if "sweep" not in self.args.parts:
            return loads, []
        settings = [options, *(replace(options, **each) for each in self._settings_swept)]
        runs = [self._pool.submit(simulate, costs, loads[0], each) for each in settings]
        return loads, [run.result().values() for run in runs]

    async def _measure_loads(self, llm: AsyncLLM) -> None:
        self._options = options_of(llm)
        self.costs = msgspec.structs.replace(self.costs, front_seconds=await measure_front(llm, self.costs))
        write_profile(str(self.folder / "profile.json"), self.costs)
        print(f"a request takes {1000 * self.costs.front_seconds:.2f} ms beside its steps")
        for load in self._loads:
            await self._measure(llm, load, load.name)

    async def _measure(self, llm: AsyncLLM, load: Load, name: str) -> None:
        """One load, if there is time for it."""
        if not self.deadline.allows(name, self._load_seconds):
            return
        try:
            most = min(20 + 2 * self.args.seconds, self.deadline.left - ENDING)
            self.report.add(name, await measure(llm, load, most), None)
        except Exception:
            traceback.print_exc()
        self.write()

    def _predict(self, loads: Sequence[Load], options: FleetOptions, suffix: str = "") -> None:
        """Begin to simulate those of the loads that were measured."""
        measured = {name for name, *_ in self.report.rows}
        for load in loads:
            if (name := load.name + suffix) in measured:
                self._predictions[name] = self._pool.submit(simulate, self.costs, load, options)

    def _collect_predictions(self) -> None:
        for name, predicted in self._predictions.items():
            try:
                self.report.predict(name, predicted.result(max(1.0, min(600.0, self.deadline.left))))
            except Exception:
                traceback.print_exc()
        self._predictions.clear()

    @contextlib.contextmanager
    def _engine(self, **settings: Any) -> Iterator[AsyncLLM]:
        """An `AsyncLLM` that is shut down at the end."""
        begin, args = time.perf_counter(), self.args
        llm = AsyncLLM(
            args.model, load_format=args.load_format, skip_tokenizer_init=True, max_model_len=self.size.max_model_len,
            seed=0, disable_log_stats=True, **args.settings | settings,
        )  # fmt: skip
        self._start_seconds = time.perf_counter() - begin
        print(f"an engine started in {self._start_seconds:.1f} s {settings or ''}", flush=True)
        try:
            yield llm
        finally:
            llm.shutdown()

    # The sweep

    @property
    def _settings_swept(self) -> list[dict[str, Any]]:
        most = self.costs.max_num_seqs
        return [
            {"max_step_stretch": stretch, "max_num_batched_tokens": budget, "max_num_seqs": min(most, budget)}
            for stretch, budget in itertools.product(self.size.stretches, self.size.budgets)
        ]

    def sweep(self) -> None:
        """The setting with the highest throughput of the closed loop by simulation, measured."""
        if not (rows := self._swept):
            return
        for settings, row in zip([{}, *self._settings_swept], rows, strict=True):
            names = [settings.get(name, "default") for name in ("max_step_stretch", "max_num_batched_tokens")]
            times = ", ".join(f"{each:.1f}" for each in row[1:])
            print(f"stretch {names[0]:>8} budget {names[1]:>8}: {row[0]:9.1f} tok/s; {times}")
        default, *others = rows
        best = max(range(len(others)), key=lambda i: (round(others[i][0] / default[0], 2), -others[i][2]))
        settings = dict(self._settings_swept[best])
        stretch, budget = settings["max_step_stretch"], settings["max_num_batched_tokens"]
        self.found["sweep"] = {"max_step_stretch": f"{stretch:g}", "max_num_batched_tokens": budget}
        if not self.deadline.allows("the sweep's best setting", self._start_seconds + self._load_seconds):
            return
        suffix = f", {stretch:g}, {budget}"
        with self._engine(max_step_stretch=stretch, max_num_batched_tokens=budget) as llm:
            self._collect_predictions()
            self.write()
            asyncio.run(self._measure_best(llm, suffix))
            options = options_of(llm, stretch)
        self._predict(self._loads[:2], options, suffix)
        self._collect_predictions()
        seen = {name: (measured, predicted) for name, measured, predicted in self.report.rows}
        for load in self._loads[:2]:
            before, after = seen.get(load.name), seen.get(load.name + suffix)
            if before and after and before[1] and after[1]:
                self.found["sweep"][load.name] = {
                    metric: {"measured": after[0][i] / before[0][i], "predicted": after[1][i] / before[1][i]}
                    for i, metric in enumerate(METRICS)
                }

    async def _measure_best(self, llm: AsyncLLM, suffix: str) -> None:
        for load in self._loads[:2]:
            await self._measure(llm, load, load.name + suffix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the configuration of Llama-3.1-8B; with --small the default model")
    parser.add_argument("--load-format", help="default: dummy; with --small auto")
    parser.add_argument("--parts", nargs="+", default=["calibrate", "loads", "sweep"])
    parser.add_argument("--profile", help="a profile, instead of calibrating")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--calibration-seconds", type=int, default=50)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds that everything may take")
    parser.add_argument("--start-seconds", type=float, default=12.0, help="of an engine, until one has been started")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--output", default=os.environ.get("OUT"))
    args = parser.parse_args()
    args.model = args.model or ("smollm2-135m" if args.small else str(FOLDER / "llama-3.1-8b"))
    args.load_format = args.load_format or ("auto" if args.small else "dummy")
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        run = Run(args, pool)
        if not args.profile:
            run.part("calibrate", run.calibrate)
        run.part("loads", run.measure_loads)
        run.part("sweep", run.sweep)
    costs, found = run.costs, run.found
    print(f"\n{run.folder}: {run.deadline.spent:.0f} s in all; profile {costs.name}, fitted within "
          f"{100 * (costs.error or math.nan):.1f}%; each cell: measured, predicted, ratio")  # fmt: skip
    print("\n".join(run.report.lines()))
    if "sweep" in found:
        print("sweep, better setting / default:")
        for name, gains in found["sweep"].items():
            print(f"  {name}: {gains}" if not isinstance(gains, dict) else f"  {name}: " + "; ".join(
                f"{metric} {each['measured']:.3f} measured, {each['predicted']:.3f} predicted"
                for metric, each in gains.items()
            ))  # fmt: skip


if __name__ == "__main__":
    main()
