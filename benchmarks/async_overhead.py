"""The cost of the engine's own process: 16 concurrent requests through `AsyncLLM` against `LLM.generate`, alternating.

python benchmarks/async_overhead.py            # five pairs; the front streams and detokenizes every token
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from typing import Any

from workloads import Work, mixed

from quire import LLM, AsyncLLM, RequestOutputKind, SamplingParams

BAR = 0.93


def offline(llm: LLM, work: Work) -> float:
    """Seconds that `LLM.generate` takes."""
    llm.reset_prefix_cache()
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [params(count) for count in work.outputs], use_tqdm=False)
    seconds = time.perf_counter() - begin
    check([len(output.outputs[0].token_ids) for output in outputs], work)
    return seconds


async def streamed(llm: AsyncLLM, work: Work) -> float:
    """Seconds that the same requests take as concurrent streams."""
    await llm.reset_prefix_cache()

    async def read(prompt: list[int], count: int) -> int:
        tokens = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params(count, RequestOutputKind.DELTA)):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    begin = time.perf_counter()
    counts = await asyncio.gather(*(read(*pair) for pair in zip(work.prompts, work.outputs, strict=True)))
    seconds = time.perf_counter() - begin
    check(counts, work)
    return seconds


def params(count: int, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=kind)


def check(counts: list[int], work: Work) -> None:
    if counts != work.outputs:
        raise RuntimeError(f"got {counts} tokens, expected {work.outputs}")


async def measure(args: argparse.Namespace) -> float:
    settings = {"device": "cpu", "disable_log_stats": True, "num_gpu_blocks_override": 768, "max_model_len": 1024}
    here, there = LLM(**settings), AsyncLLM(**settings, **args.settings)
    work = mixed(args.quick)
    gc.freeze()
    ratios = []
    try:
        for pair in range(args.pairs + 1):
            alone, apart = offline(here, work), await streamed(there, work)
            if pair:  # the first pair is a warm-up
                ratios.append(alone / apart)
                rates = [work.output_tokens / seconds for seconds in (alone, apart)]
                print(
                    f"LLM.generate {rates[0]:6.1f} tok/s   AsyncLLM {rates[1]:6.1f} tok/s   {ratios[-1]:.3f}",
                    flush=True,
                )
    finally:
        there.shutdown()
        here.shutdown()
    ratio = statistics.median(ratios)
    print(f"median of {len(ratios)} pairs: {ratio:.3f} (bar: {BAR})")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to check that it runs")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of AsyncLLM, as JSON")
    args = parser.parse_args()
    ratio = asyncio.run(measure(args))
    return 0 if args.quick or ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
