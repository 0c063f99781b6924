"""The simulator against the card: calibrate, measure three loads and a better setting, and compare with predictions.

    python -m benchmarks.gpu.simulation [--model FOLDER] [--parts calibrate loads sweep]
    python -m benchmarks.gpu.simulation --model benchmarks/gpu/models/qwen3-0.6b
    python -m benchmarks.gpu.simulation --small          # a CPU and the default model: the same steps, a few minutes

1. `quire calibrate` writes a profile of this device (random weights, token ids in and out, no tokenizer).
2. Three loads run through `AsyncLLM`: a closed loop, Poisson arrivals, Poisson arrivals that share long prefixes. The
   simulator runs the same conversations with the same arrival times. Rates and counts follow from the profile, so that
   each load takes about `--seconds`.
3. The simulator sweeps settings for the closed loop; an engine with the best one runs that load, and the Poisson load.

Of an engine there is one at a time. Results go to `--output` (default: $OUT, else a temporary folder): the profile as
`profile.json`, everything else as `simulation.json`. A part that fails prints its traceback, and the others go on; with
`--profile` the first part is left out.
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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
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


async def measure(llm: AsyncLLM, load: Load, seconds: float) -> Figures:
    """Warm up with the beginning of the load, empty the prefix cache, run the load."""
    prompts = load.prompts(llm.info.model.vocab_size)
    warm = replace(load, conversations=load.conversations[: max(2, int(WARM_SHARE * len(prompts)))])
    others = [[token // 2 + 1 for token in prompt] for prompt in prompts[: len(warm.conversations)]]
    await asyncio.wait_for(_drive(llm, warm, others), 20 + 3 * seconds)
    await llm.reset_prefix_cache()
    return await asyncio.wait_for(_drive(llm, load, prompts), 20 + 3 * seconds)


async def measure_front(llm: AsyncLLM, costs: CostModel) -> float:
    """Seconds that a request takes beside its step: the median of lone requests."""
    seen = []
    for number in range(ALONE):
        prompt = [3 + (number * 7919 + i * 13) % 4000 for i in range(16)]
        seen.append((await _send(llm, prompt, 2, time.perf_counter()))[0])
    alone = costs.seconds(StepWork(0, 16, 0, 136, prompts=1))
    return max(0.0, statistics.median(seen[ALONE // 4 :]) - alone)


@contextlib.contextmanager
def engine(args: argparse.Namespace, size: Size, **settings: Any) -> Any:
    """An `AsyncLLM` that is shut down at the end."""
    begin = time.perf_counter()
    llm = AsyncLLM(args.model, **_settings(args, size), **settings)
    print(f"an engine started in {time.perf_counter() - begin:.1f} s {settings or ''}", flush=True)
    try:
        yield llm
    finally:
        llm.shutdown()


def _settings(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    return {
        "load_format": args.load_format, "skip_tokenizer_init": True, "max_model_len": size.max_model_len, "seed": 0,
        "disable_log_stats": True, **args.settings,
    }  # fmt: skip


# Parts


def calibrate(args: argparse.Namespace, size: Size, folder: Path) -> None:
    """Write the profile, in a process of its own: its memory is free afterwards."""
    command = [sys.executable, "-m", "quire.cli.main", "calibrate", "--model", args.model]
    command += ["--load-format", args.load_format, "--max-model-len", str(size.max_model_len)]
    command += ["--seconds", str(args.calibration_seconds), "-o", str(folder / "profile.json")]
    subprocess.run(command, check=True, timeout=3 * args.calibration_seconds + 120)


class Report:
    """Measured and predicted figures, side by side."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[float], list[float]]] = []

    def add(self, name: str, measured: Figures, predicted: Figures) -> None:
        self.rows.append((name, measured.values(), predicted.values()))
        print(f"{name}: measured {measured.duration:.1f} s, predicted {predicted.duration:.1f} s", flush=True)

    def lines(self) -> list[str]:
        """The table: measured, predicted, predicted / measured, and ! where that is too far off."""
        found = [f"{'':24}" + "".join(f"{name:>29}" for name in METRICS)]
        for name, measured, predicted in self.rows:
            cells = []
            for seen, expected, limit in zip(measured, predicted, LIMITS, strict=True):
                ratio = expected / seen if seen else math.nan
                cells.append(f"{seen:10.2f} {expected:10.2f} {ratio:5.2f}{' ' if abs(ratio - 1) <= limit else '!'} ")
            found.append(f"{name:24}" + "".join(f"{cell:>29}" for cell in cells))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"load": name, "measured": dict(zip(METRICS, seen, strict=True)),
             "predicted": dict(zip(METRICS, expected, strict=True))}
            for name, seen, expected in self.rows
        ]  # fmt: skip


def options_of(llm: AsyncLLM) -> FleetOptions:
    """The settings of this engine."""
    info = llm.info
    return FleetOptions(
        max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens, num_blocks=info.num_blocks
    )


Swept = tuple[CostModel, FleetOptions, list[Load]]
"""What the sweep needs: the profile with the front's part, the engine's settings, the loads."""


def measure_loads(args: argparse.Namespace, size: Size, costs: CostModel, report: Report) -> Swept:
    """The three loads on one engine."""
    with engine(args, size) as llm:
        return asyncio.run(_measure_loads(llm, args, size, costs, report))


async def _measure_loads(
    llm: AsyncLLM, args: argparse.Namespace, size: Size, costs: CostModel, report: Report
) -> Swept:
    options = options_of(llm)
    costs = msgspec.structs.replace(costs, front_seconds=await measure_front(llm, costs))
    print(f"a request takes {1000 * costs.front_seconds:.2f} ms beside its steps")
    loads = make_loads(costs, options, size, args.seconds)
    for load in loads:
        await _compare(llm, load, load.name, costs, options, args.seconds, report)
    return costs, options, loads


async def _compare(
    llm: AsyncLLM, load: Load, name: str, costs: CostModel, options: FleetOptions, seconds: float, report: Report
) -> None:
    """One load, measured and predicted."""
    try:
        measured = await measure(llm, load, seconds)
        report.add(name, measured, simulate(costs, load, options))
    except Exception:
        traceback.print_exc()


def sweep(
    args: argparse.Namespace, size: Size, costs: CostModel, options: FleetOptions, loads: list[Load], report: Report
) -> dict[str, Any]:
    """The setting with the highest throughput of the closed loop by simulation, measured."""
    pairs = list(itertools.product(size.stretches, size.budgets))
    tried = [
        replace(
            options, max_step_stretch=stretch, max_num_batched_tokens=budget,
            max_num_seqs=min(options.max_num_seqs or budget, budget),
        )
        for stretch, budget in pairs
    ]  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(_values, itertools.repeat(costs), itertools.repeat(loads[0]), [options, *tried]))
    for pair, row in zip([("default", "default"), *pairs], rows, strict=True):
        print(
            f"stretch {pair[0]:>8} budget {pair[1]:>8}: {row[0]:9.1f} tok/s; " + ", ".join(f"{t:.1f}" for t in row[1:])
        )
    default, *others = rows
    best = max(range(len(pairs)), key=lambda i: (round(others[i][0] / default[0], 2), -others[i][2]))
    stretch, budget = pairs[best]
    with engine(args, size, max_step_stretch=stretch, max_num_batched_tokens=budget) as llm:
        asyncio.run(_measure_best(llm, loads[:2], f"{stretch:g}, {budget}", costs, tried[best], args.seconds, report))
    seen = {name: (measured, predicted) for name, measured, predicted in report.rows}
    found: dict[str, Any] = {"max_step_stretch": f"{stretch:g}", "max_num_batched_tokens": budget}
    for load in loads[:2]:
        if load.name in seen and (after := seen.get(f"{load.name}, {stretch:g}, {budget}")):
            before = seen[load.name]
            found[load.name] = {
                metric: {"measured": after[0][i] / before[0][i], "predicted": after[1][i] / before[1][i]}
                for i, metric in enumerate(METRICS)
            }
    return found


def _values(costs: CostModel, load: Load, options: FleetOptions) -> list[float]:
    return simulate(costs, load, options).values()


async def _measure_best(
    llm: AsyncLLM, loads: list[Load], name: str, costs: CostModel, options: FleetOptions, seconds: float, report: Report
) -> None:
    for load in loads:
        await _compare(llm, load, f"{load.name}, {name}", costs, options, seconds, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the configuration of Llama-3.1-8B; with --small the default model")
    parser.add_argument("--load-format", help="default: dummy; with --small auto")
    parser.add_argument("--parts", nargs="+", default=["calibrate", "loads", "sweep"])
    parser.add_argument("--profile", help="a profile, instead of calibrating")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--calibration-seconds", type=int, default=50)
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--output", default=os.environ.get("OUT"))
    args = parser.parse_args()
    args.model = args.model or ("smollm2-135m" if args.small else str(FOLDER / "llama-3.1-8b"))
    args.load_format = args.load_format or ("auto" if args.small else "dummy")
    size, report, begin = SMALL if args.small else Size(), Report(), time.perf_counter()
    folder = Path(args.output or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"model": args.model}
    costs = read_profile(args.profile or FALLBACK)
    if "calibrate" in args.parts and not args.profile:
        try:
            calibrate(args, size, folder)
            costs = read_profile(str(folder / "profile.json"))
        except Exception:
            traceback.print_exc()
            print(f"calibration failed: predictions are those of {FALLBACK}")
    print(f"{time.perf_counter() - begin:.0f} s so far", flush=True)
    swept: Swept | None = None
    if "loads" in args.parts:
        try:
            swept = costs, *_ = measure_loads(args, size, costs, report)
            write_profile(str(folder / "profile.json"), costs)
        except Exception:
            traceback.print_exc()
    print(f"{time.perf_counter() - begin:.0f} s so far", flush=True)
    if "sweep" in args.parts and swept is not None:
        try:
            found["sweep"] = sweep(args, size, *swept, report)
        except Exception:
            traceback.print_exc()
    found |= {"profile": msgspec.to_builtins(costs), "loads": report.to_json(), "seconds": time.perf_counter() - begin}
    (folder / "simulation.json").write_text(json.dumps(found, indent=1))
    print(f"\n{folder}: {found['seconds']:.0f} s in all; profile {costs.name}, fitted within "
          f"{100 * (costs.error or math.nan):.1f}%; each cell: measured, predicted, ratio")  # fmt: skip
    print("\n".join(report.lines()))
    if "sweep" in found:
        print("sweep, better setting / default:")
        for name, gains in found["sweep"].items():
            print(f"  {name}: {gains}" if not isinstance(gains, dict) else f"  {name}: " + "; ".join(
                f"{metric} {each['measured']:.3f} measured, {each['predicted']:.3f} predicted"
                for metric, each in gains.items()
            ))  # fmt: skip


if __name__ == "__main__":
    main()
