"""Energy: do the parts add up to the meter, what does a power budget cost, what does saver save?

python benchmarks/energy.py                                    # the default model on this machine
python benchmarks/energy.py --model MODEL --budget 400         # on a GPU: NVML's counter

Three runs of one engine each, one after another:
1. `--requests` requests at once: joules of all requests and idle ones against the meter, read by this script itself.
2. The same with `--power-budget`: average power while they run, and the throughput it costs.
3. `--rate` requests a second for `--seconds`, under `performance` and under `saver`: joules a token and latencies.

Where there is no meter the figures are estimates (CPU time), and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from quire import AsyncLLM, RequestOutputKind, SamplingParams
from quire.energy.meters import METERS, Meter, MeterContext, MeterError
from quire.registry import resolve


@dataclass
class Run:
    """What one engine did."""

    seconds: float = 0.0
    tokens: int = 0
    joules: float = 0.0
    """Of requests."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the engine's own metrics gained."""
    metered: float | None = None
    """What this script's own meter gained."""
    source: str = ""
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def watts(self) -> float:
        return self.metrics["energy_joules"] / self.seconds


async def metrics_of(llm: AsyncLLM) -> dict[str, float]:
    found = {}
    for metric in await llm.get_metrics():
        name = metric.name.removeprefix("quire:")
        found[name] = metric.value
        found |= {f"{name}.{label[0]}": value for label, value in metric.series}
    return found


async def one(llm: AsyncLLM, run: Run, name: str, prompt: list[int], tokens: int, *, streams: bool = True) -> None:
    """One request, added to `run`. `streams`: each token is sent; else latencies are those of the whole request."""
    begin = last = time.monotonic()
    sends = RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=1, output_kind=sends, detokenize=False
    )
    outputs = []
    async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
        now = time.monotonic()
        (run.first if last == begin else run.gaps).append(now - last)
        outputs, last = [output], now
    (final,) = outputs
    assert final.metrics is not None
    run.tokens += len(final.outputs[0].token_ids)
    run.joules += final.metrics.joules
    kind = "estimated" if final.metrics.energy_is_estimate else "measured"
    run.source = f"{kind} ({final.metrics.energy_source})"


def own_meter() -> Meter | None:
    """A second reader of the same counters; None where only an estimate is possible."""
    for name, is_gpu in (("nvml", True), ("rapl", False)):
        try:
            meter: Meter = resolve("meter", name, METERS)(MeterContext(is_gpu, ("0",)))
            return meter
        except MeterError:
            continue
    return None


async def measure(args: argparse.Namespace, rate: float | None, **settings: Any) -> Run:
    if args.cpu_weights is not None:
        settings["cpu_weights"] = args.cpu_weights
    llm = AsyncLLM(args.model, report_energy=True, max_model_len=args.input + args.output + 8, **settings)
    run, random_ = Run(), random.Random(0)
    vocabulary = min(1000, llm.info.model.vocab_size)
    count = args.requests if rate is None else int(rate * args.seconds)
    prompts = [[random_.randrange(10, vocabulary) for _ in range(args.input)] for _ in range(count)]
    try:
        await asyncio.gather(*(one(llm, Run(), f"warm {i}", prompts[0], 8) for i in range(4)))
        meter = own_meter()
        before, read = await metrics_of(llm), 0.0 if meter is None else meter.read()
        begin, tasks = time.monotonic(), []
        for i, prompt in enumerate(prompts):
            tasks.append(asyncio.ensure_future(one(llm, run, str(i), prompt, args.output)))
            if rate is not None:
                await asyncio.sleep(random_.expovariate(rate))
        await asyncio.gather(*tasks)
        run.seconds = time.monotonic() - begin
        after = await metrics_of(llm)
        run.metrics = {name: after[name] - before.get(name, 0.0) for name in after}
        run.metered = None if meter is None else meter.read() - read
    finally:
        llm.shutdown()
    return run


def percentile(values: list[float], percent: int) -> float:
    return 1000 * (statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else values[0])


async def main(args: argparse.Namespace) -> None:
    rows: list[tuple[str, str]] = []
    plain = await measure(args, None)
    whole = plain.joules + plain.metrics["energy_joules.idle"]
    rows.append(("meter", plain.source))
    rows.append((f"{args.requests} requests: requests + idle", f"{plain.joules:.1f} + {whole - plain.joules:.1f} J"))
    rows.append(("  against the engine's meter", f"{100 * (whole / plain.metrics['energy_joules'] - 1):+.2f} %"))
    if plain.metered:
        rows.append(("  against the counter, read here", f"{100 * (whole / plain.metered - 1):+.2f} %"))
    rows.append(("  power, throughput", f"{plain.watts:.1f} W, {plain.tokens / plain.seconds:.0f} tokens/s"))
    budget = args.budget or round(0.6 * plain.watts, 1)
    held = await measure(args, None, power_budget=budget)
    rows.append((f"power budget {budget:g} W", f"{held.watts:.1f} W, {held.tokens / held.seconds:.0f} tokens/s"))
    for policy in ("performance", "saver"):
        run = await measure(args, args.rate, energy_policy=policy)
        total, work = run.metrics["energy_joules"], run.joules
        rows.append(
            (
                f"{args.rate:g} requests/s, {policy}",
                f"{total / run.tokens:.4f} J a token ({work / run.tokens:.4f} without idle); first token "
                f"{percentile(run.first, 50):.0f} ms (p95 {percentile(run.first, 95):.0f}), between tokens "
                f"{percentile(run.gaps, 50):.1f} ms (p95 {percentile(run.gaps, 95):.1f})",
            )
        )
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cpu-weights", help="as the engine's flag")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--budget", type=float, help="watts (default: 60% of what the first run draws)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, for the policies")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long, for the policies")
    asyncio.run(main(parser.parse_args()))
