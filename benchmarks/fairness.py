"""Latency of a light tenant beside a heavy one: TTFT and time per token, alone, under fcfs and under fair.

python benchmarks/fairness.py                     # CPU, default model
python benchmarks/fairness.py --greedy 64 --requests 8
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from quire import AsyncLLM, RequestOutputKind, SamplingParams

HIGHEST = 10_000
"""Token ids are drawn up to this one, which lies below the special ones."""


async def ask(llm: AsyncLLM, rng: random.Random, prompt: int, output: int, tenant: str) -> tuple[float, float]:
    """Seconds to the first token, and from one token to the next, of one request."""
    params = SamplingParams(
        temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    tokens = {"prompt_token_ids": [rng.randrange(100, HIGHEST) for _ in range(prompt)]}
    begin = time.perf_counter()
    times = [time.perf_counter() async for _ in llm.generate(tokens, params, tenant=tenant)]  # type: ignore[arg-type]
    return times[0] - begin, (times[-1] - times[0]) / (output - 1)


async def measure(args: argparse.Namespace, policy: str, greedy: int) -> list[tuple[float, float]]:
    """The light tenant's requests, one after the other, beside `greedy` requests that are there at once."""
    rng = random.Random(0)
    settings: dict[str, Any] = {"scheduling_policy": policy, "max_num_seqs": args.rows, "max_model_len": 1024}
    async with AsyncLLM(args.model, **settings) as llm:
        await ask(llm, rng, args.prompt, args.output, "light")  # which warms up
        crowd = [
            asyncio.create_task(ask(llm, rng, args.greedy_prompt, args.greedy_output, "greedy")) for _ in range(greedy)
        ]
        await asyncio.sleep(2.0 if greedy else 0.0)
        count = args.requests if policy == "fair" or not greedy else args.fcfs_requests
        seen = [await ask(llm, rng, args.prompt, args.output, "light") for _ in range(count)]
        if policy == "fair" and greedy and all(task.done() for task in crowd):
            raise SystemExit("the greedy tenant was done before the light one: give it more with --greedy")
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    return seen


def tell(name: str, seen: list[tuple[float, float]], alone: list[tuple[float, float]]) -> None:
    figures = []
    for values, base in zip(zip(*seen, strict=True), zip(*alone, strict=True), strict=True):
        ordered = sorted(values)
        median, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        figures.append(f"{1000 * median:>9.0f} {1000 * p99:>9.0f} {median / statistics.median(base):>7.1f}×")
    print(f"{name:>22} {' '.join(figures)}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--greedy", type=int, default=48, help="requests of the greedy tenant")
    parser.add_argument("--greedy-prompt", type=int, default=256)
    parser.add_argument("--greedy-output", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10, help="requests of the light tenant")
    parser.add_argument("--fcfs-requests", type=int, default=1, help="…under fcfs, where each waits for all before it")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=16)
    args = parser.parse_args()
    print(f"{'light tenant':>22} {'TTFT p50':>9} {'p99 ms':>9} {'':>8} {'TPOT p50':>9} {'p99 ms':>9}")
    alone = await measure(args, "fcfs", 0)
    tell("alone", alone, alone)
    tell("fair, beside greedy", await measure(args, "fair", args.greedy), alone)
    tell("fcfs, beside greedy", await measure(args, "fcfs", args.greedy), alone)


if __name__ == "__main__":
    asyncio.run(main())
