"""quire compared with transformers (and vLLM, if given), in one run on this machine: `make bench`.

    python benchmarks/run.py                        # five alternating pairs, best against best
    python benchmarks/run.py --quick                # tiny sizes: does it run?
    python benchmarks/run.py --vllm-cpu ~/vllm/bin/python

Float32, the same dequantized weights, the same token ids, the same number of threads; end tokens are ignored. Exit
code 1 if a bar is missed (never with --quick, whose figures mean nothing).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import planning
import torch
import workloads
from engines import Quire, Transformers, VllmCpu
from workloads import Work

from quire.cli.bench import waste


@dataclass(frozen=True)
class Figure:
    """One measured figure and the bar it is held to."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_most: bool = False
    """Whether the bar is a ceiling."""
    detail: str = ""

    @property
    def passes(self) -> bool:
        return self.bar is None or (self.value <= self.bar if self.at_most else self.value >= self.bar)

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        bar = "" if self.bar is None else f"{'≤' if self.at_most else '≥'} {self.bar:g}{self.unit}"
        verdict = "" if self.bar is None else "pass" if self.passes else "MISS"
        return self.name, f"{self.value:.2f}{self.unit}", bar, verdict, self.detail


class Race:
    """Runs several engines on one workload, in turns, so that a slow moment of the machine hits all of them."""

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs

    def best(self, work: Work, runners: dict[str, Callable[[Work], float]]) -> dict[str, float]:
        """Each runner's best time; a first round, not counted, warms everyone up."""
        times: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(self._pairs + 1):
            for name, run in runners.items():
                seconds = run(work)
                if turn:
                    times[name].append(seconds)
            if turn:
                line = ", ".join(f"{name} {each[-1]:.2f} s" for name, each in times.items())
                print(f"    {turn}/{self._pairs}: {line}", flush=True)
        return {name: min(each) for name, each in times.items()}


def static_batching(race: Race, engines: dict[str, Callable[[Work], float]], quick: bool) -> list[Figure]:
    """(a) Continuous against static batching, only requested tokens counted."""
    work = workloads.mixed(quick)
    best = race.best(work, engines)
    rates = {name: work.output_tokens / seconds for name, seconds in best.items()}
    detail = ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in rates.items())
    return _against(best, "16 mixed requests: quire / transformers static batch", 4.0, detail)


def batch_one(race: Race, engines: dict[str, Callable[[Work], float]], quick: bool) -> list[Figure]:
    """(b) One request alone: time a token."""
    work = workloads.single(quick)
    best = race.best(work, engines)
    detail = ", ".join(f"{name} {1000 * seconds / work.output_tokens:.1f} ms/token" for name, seconds in best.items())
    return _against(best, "one request alone: quire / transformers generate", 1.2, detail)


def _against(best: dict[str, float], name: str, bar: float, detail: str) -> list[Figure]:
    figures = [Figure(name, best["transformers"] / best["quire"], "×", bar, detail=detail)]
    if "vllm" in best:
        figures.append(Figure("  the same: quire / vllm-cpu", best["vllm"] / best["quire"], "×"))
    return figures


def prefix_caching(race: Race, engines: dict[str, Callable[[Work], float]], quick: bool) -> list[Figure]:
    """(c) 32 requests that share 256 tokens, with the prefix cache and without. It is empty when they come."""
    best = race.best(workloads.shared(quick), engines)
    detail = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in best.items())
    figures = [Figure("shared prefix: cache / no cache", best["no cache"] / best["quire"], "×", 2.0, detail=detail)]
    if "vllm" in best:
        figures.append(Figure("  the same: quire / vllm-cpu", best["vllm"] / best["quire"], "×"))
    return figures


def planning_cost(quick: bool) -> list[Figure]:
    """(d) Host time the planning half takes a decode step, best median of three."""
    steps = 50 if quick else 600
    small, large = (min(planning.measure(rows, steps)[0] for _ in range(1 if quick else 3)) for rows in (256, 1024))
    return [
        Figure("planning, 256 running requests", small, " ms", 0.3, at_most=True),
        Figure("planning, 1,024 running requests", large, " ms"),
    ]


def cache_waste(quick: bool) -> list[Figure]:
    """(e) Cache slots held that hold no token, under ShareGPT-like traffic."""
    traffic = waste.SimulatedTraffic(requests=200 if quick else 3000)
    stats = waste.measure(traffic, block_size=16, max_rows=256, cache_tokens=512 * 256)
    reserved = 100 * stats.waste_if_reserved(traffic.longest)
    detail = f"{reserved:.0f}% if reserved"
    return [Figure("KV waste, ShareGPT-like traffic", 100 * stats.waste, "%", 4.0, at_most=True, detail=detail)]


def print_table(figures: list[Figure]) -> None:
    rows = [("figure", "value", "bar", "verdict", ""), *(figure.cells for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3))]
        print("  ".join(cells) + (f"   {row[4]}" if row[4] else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which the engines take turns (default: 5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: only shows that it runs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every engine")
    parser.add_argument("--vllm-cpu", metavar="PYTHON", help="interpreter that has vllm-cpu, for a third column")
    parser.add_argument("--only", default="abcde", metavar="LETTERS", help="which of a to e to run (default: all)")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    race = Race(1 if args.quick else args.pairs)
    figures: list[Figure] = []
    if set(args.only) & set("abc"):
        figures += _races(race, args)
    if "d" in args.only:
        print("(d) the planning half alone", flush=True)
        figures += planning_cost(args.quick)
    if "e" in args.only:
        print("(e) KV waste", flush=True)
        figures += cache_waste(args.quick)
    print()
    print_table(figures)
    if args.quick:
        print("\n--quick: sizes are tiny and these figures mean nothing")
    return 0 if args.quick or all(figure.passes for figure in figures) else 1


def _races(race: Race, args: argparse.Namespace) -> list[Figure]:
    """(a) to (c): those that run a model."""
    quire = Quire(num_gpu_blocks_override=768)
    print(f"{quire.llm.llm_engine.info.device}, float32, {args.threads} threads", flush=True)
    transformers = Transformers()
    vllm = VllmCpu(args.vllm_cpu, transformers.model, args.threads) if args.vllm_cpu else None
    third = {} if vllm is None else {"vllm": vllm.run}
    both = {"quire": quire.run, "transformers": transformers.run, **third}
    figures: list[Figure] = []
    if "a" in args.only:
        print("(a) 16 requests of mixed lengths", flush=True)
        figures += static_batching(race, both, args.quick)
        same = sum(ours == theirs for ours, theirs in zip(quire.drawn, transformers.drawn, strict=True))
        print(f"    the same text from both engines: {same} of {len(quire.drawn)} requests", flush=True)
    if "b" in args.only:
        print("(b) one request alone", flush=True)
        figures += batch_one(race, both, args.quick)
    del transformers, both
    if "c" in args.only:
        print("(c) a shared prefix", flush=True)
        without = Quire(num_gpu_blocks_override=768, enable_prefix_caching=False)
        figures += prefix_caching(race, {"quire": quire.run, "no cache": without.run, **third}, args.quick)
        without.llm.shutdown()
    quire.llm.shutdown()
    if vllm is not None:
        vllm.close()
    return figures


if __name__ == "__main__":
    sys.exit(main())
