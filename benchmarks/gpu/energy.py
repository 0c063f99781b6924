"""Energy on a GPU: do the parts add up to NVML's counter, does a power budget hold, what does `saver` save?

    python -m benchmarks.gpu.energy [MODEL] [--parts sum budget saver] [--budget 400] [--limit 170]

MODEL is a folder with a config.json (default: llama-3.1-8b in benchmarks/gpu/models; random weights) or a checkpoint.
Needs nvidia-ml-py (pynvml). Only counters are read: no clock, power limit or mode of the card is changed.

    sum     256 requests at once: joules of all requests and idle ones against the counter, read by this process
    budget  the same requests with --power-budget: average power while they run, and throughput beside the first run's
    saver   4 requests a second under `performance` and under `saver`: joules a token, latencies

Each engine is a process of its own, started one after another; what fails is reported and the rest goes on. No engine
is started after --limit seconds. The table comes last; figures are also written to $OUT/energy.json if OUT is set.
Without NVML (on a CPU) engines estimate, and so does the table, which says so.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.energy import Run, metrics_of, one, own_meter, percentile
from quire import AsyncLLM
from quire.energy.meters import Meter

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
WINDOW = 5.0
"""Seconds of the window in which the highest average power is looked for."""
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"energy_policy": "performance"},
    "budget": {"energy_policy": "performance", "power_budget": None},
    "saver": {"energy_policy": "saver"},
}
"""Settings of the engines that parts need."""


class Watch:
    """Reads a meter ten times a second in a thread: joules, and the highest average power over `WINDOW` seconds."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._points: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._take()
        self._thread.start()

    def _take(self) -> None:
        if self._meter is not None:
            self._points.append((time.monotonic(), self._meter.read()))

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self._take()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    @property
    def joules(self) -> float | None:
        return self._points[-1][1] - self._points[0][1] if self._points else None

    @property
    def highest(self) -> float | None:
        """None if it was watched for less than the window."""
        first, best = 0, None
        for now, joules in self._points:
            while now - self._points[first + 1][0] >= WINDOW if first + 1 < len(self._points) else False:
                first += 1
            since, before = self._points[first]
            if now - since >= WINDOW:
                best = max(best or 0.0, (joules - before) / (now - since))
        return best


@dataclasses.dataclass
class Load:
    """Requests of a part: all at once, or so many a second."""

    count: int
    inputs: int
    outputs: int
    rate: float | None = None


async def drive(llm: AsyncLLM, load: Load, meter: Meter | None) -> dict[str, Any]:
    """The load's figures."""
    run, rng = Run(), random.Random(0)
    vocabulary = min(10_000, llm.info.model.vocab_size)
    prompts = [[rng.randrange(10, vocabulary) for _ in range(load.inputs)] for _ in range(load.count)]
    await asyncio.sleep(1.0)  # the engine measures idle power
    before, watch = await metrics_of(llm), Watch(meter)
    begin, tasks = time.monotonic(), []
    for i, prompt in enumerate(prompts):
        tasks.append(asyncio.ensure_future(one(llm, run, str(i), prompt, load.outputs, streams=load.rate is not None)))
        if load.rate is not None:
            await asyncio.sleep(rng.expovariate(load.rate))
    await asyncio.gather(*tasks)
    run.seconds = time.monotonic() - begin
    after = await metrics_of(llm)
    watch.end()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    figures: dict[str, Any] = {
        "source": run.source,
        "seconds": run.seconds,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens / run.seconds,
        "requests_joules": run.joules,
        "idle_joules": gained["energy_joules.idle"],
        "engine_joules": gained["energy_joules"],
        "counter_joules": watch.joules,
        "highest_watts": watch.highest,
        "held_seconds": gained["energy_held_seconds"],
        "idle_watts": after.get("power_idle_watts"),
    }
    joules = gained["energy_joules"] if watch.joules is None else watch.joules
    figures["watts"] = joules / run.seconds
    figures["joules_per_token"] = joules / run.tokens
    figures["joules_per_token_without_idle"] = run.joules / run.tokens
    if load.rate is not None:
        figures["first_ms"] = [percentile(run.first, 50), percentile(run.first, 95)]
        figures["between_ms"] = [percentile(run.gaps, 50), percentile(run.gaps, 95)]
    return figures


async def serve(args: argparse.Namespace, name: str, loads: dict[str, Load], found: dict[str, Any]) -> None:
    """Start an engine and give it these loads."""
    settings = dict(ENGINES[name])
    if "power_budget" in settings:
        settings["power_budget"] = args.budget
    begin = time.monotonic()
    llm = AsyncLLM(
        args.model, report_energy=True, skip_tokenizer_init=True, max_model_len=args.input + args.output + 8, seed=0,
        load_format=args.load_format, **settings,
    )  # fmt: skip
    try:
        found[f"start {name}"] = time.monotonic() - begin
        warm = Load(args.requests, args.input, 32)
        await drive(llm, warm, None)  # shapes that are compiled on first use, and busy power
        for part, load in loads.items():
            found[f"{part} {name}"] = await drive(llm, load, own_meter())
            print(f"{part} {name}: {json.dumps(found[f'{part} {name}'])}", flush=True)
    finally:
        llm.shutdown()


def settings_of_card() -> dict[str, float] | None:
    """The card's limit, and clocks as they are asked for; None without NVML. Reads only."""
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "power limit, W": pynvml.nvmlDeviceGetPowerManagementLimit(card) / 1000,
            "clock limit, MHz": float(pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM)),
        }
    except Exception:  # no library, no driver: the table says that figures are estimates
        return None


def table(args: argparse.Namespace, found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    plain, held = found.get("sum plain"), found.get("budget budget")
    if plain is not None:
        total = plain["requests_joules"] + plain["idle_joules"]
        rows.append(("meter", plain["source"]))
        rows.append(
            (
                f"sum: {args.requests} requests + idle",
                f"{plain['requests_joules']:.1f} + {plain['idle_joules']:.1f} J, "
                f"{100 * (total / plain['engine_joules'] - 1):+.2f} % from the engine's meter",
            )
        )
        if plain["counter_joules"]:
            apart = 100 * (total / plain["counter_joules"] - 1)
            rows.append(("  against the counter read here", f"{plain['counter_joules']:.1f} J: {apart:+.2f} %"))
        rows.append(("  without a budget", _power(plain)))
    if held is not None:
        rows.append((f"budget: {args.budget:g} W", _power(held) + f", {held['held_seconds']:.1f} s held back"))
        if plain is not None:
            share = held["tokens_per_second"] / plain["tokens_per_second"]
            per_watt = held["joules_per_token"] / plain["joules_per_token"]
            rows.append(("  of the throughput without", f"{100 * share:.1f} %; joules a token {per_watt:.2f} times"))
    for name in ("plain", "saver"):
        if (run := found.get(f"saver {name}")) is not None:
            first, gap = run["first_ms"], run["between_ms"]
            rows.append(
                (
                    f"{args.rate:g} requests/s, {'performance' if name == 'plain' else name}",
                    f"{run['joules_per_token']:.3f} J a token ({run['joules_per_token_without_idle']:.3f} without "
                    f"idle), {run['watts']:.0f} W; first token {first[0]:.0f} ms (p95 {first[1]:.0f}), between tokens "
                    f"{gap[0]:.1f} ms (p95 {gap[1]:.1f})",
                )
            )
    rows.append(("card before, after", f"{found.get('card before')}, {found.get('card after')}"))
    starts = ", ".join(f"{name[6:]} {found[name]:.0f} s" for name in found if name.startswith("start "))
    rows.append(("starts", f"{starts}; all {found['seconds']:.0f} s"))
    rows += [(name, found[name]) for name in found if name.startswith("failed")]
    return rows


def _power(run: dict[str, Any]) -> str:
    highest = "" if run["highest_watts"] is None else f" (at most {run['highest_watts']:.1f} over {WINDOW:g} s)"
    return (
        f"{run['watts']:.1f} W on average{highest}, {run['tokens_per_second']:.0f} tokens/s for {run['seconds']:.1f} s"
    )


async def main(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    full = Load(args.requests, args.input, args.output)
    low = Load(int(args.rate * args.seconds), args.input, 64, args.rate)
    needed: dict[str, dict[str, Load]] = {}
    if {"sum", "budget"} & set(args.parts):
        needed["plain"] = {"sum": full}
    if "budget" in args.parts:
        needed["budget"] = {"budget": full}
    if "saver" in args.parts:
        needed.setdefault("plain", {})["saver"] = low
        needed["saver"] = {"saver": low}
    found: dict[str, Any] = {"card before": settings_of_card()}
    for name, loads in needed.items():
        if time.monotonic() - begin > args.limit:
            found[f"failed {name}"] = f"not started: {args.limit:g} s are used up"
            continue
        try:
            await serve(args, name, loads, found)
        except Exception as error:  # the other parts are measured all the same
            traceback.print_exc()
            found[f"failed {name}"] = f"{type(error).__name__}: {error}"[:300]
    found["card after"], found["seconds"] = settings_of_card(), time.monotonic() - begin
    if out := os.environ.get("OUT"):
        (Path(out) / "energy.json").write_text(json.dumps(found, indent=1))
    rows = table(args, found)
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--parts", nargs="*", default=["sum", "budget", "saver"], choices=["sum", "budget", "saver"])
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=768, help="tokens of an answer at full load (at low load: 64)")
    parser.add_argument("--budget", type=float, default=400.0, help="watts")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second at low load")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long requests arrive at low load")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which no engine is started")
    asyncio.run(main(parser.parse_args()))
