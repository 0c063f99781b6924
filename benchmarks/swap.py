"""Gain of swapping when the cache is too small for long prompts: output tokens a second with and without it.

python benchmarks/swap.py                                                # default model, CPU
python benchmarks/swap.py --model benchmarks/gpu/models/llama-3.1-8b --load-format dummy --requests 64 --prompt 4000 \\
    --output 600 --cache-tokens 110000 --max-model-len 8192              # on a GPU

The same requests, alternately. Prefix caching is on in both; prompts have nothing in common.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from quire import LLM, SamplingParams

HIGHEST = 10_000


def make(args: argparse.Namespace, swap_space: float) -> LLM:
    return LLM(
        args.model, load_format=args.load_format, swap_space=swap_space, skip_tokenizer_init=True,
        disable_log_stats=True, num_gpu_blocks_override=args.cache_tokens // 16, max_model_len=args.max_model_len,
        max_num_seqs=args.rows, gpu_memory_utilization=0.45,
    )  # fmt: skip


def run(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[float, str]:
    rng = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [rng.randint(0, HIGHEST) for _ in range(rng.randint(args.prompt // 2, args.prompt))]}
        for _ in range(args.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    scheduler = llm.llm_engine.core.scheduler
    before = scheduler.stats.preemptions, scheduler.stats.swaps, scheduler.stats.prompt_tokens
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    stats = scheduler.stats
    preempted, swapped, computed = (
        stats.preemptions - before[0], stats.swaps - before[1], stats.prompt_tokens - before[2],
    )  # fmt: skip
    return tokens / seconds, f"{preempted} preempted, {swapped} of them swapped, {computed} prompt tokens computed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=700)
    parser.add_argument("--output", type=int, default=120)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cache-tokens", type=int, default=3000)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--swap-space", type=float, default=8.0)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    engines = {"recompute": make(args, 0), "swap": make(args, args.swap_space)}
    for llm in engines.values():
        llm.generate([{"prompt_token_ids": [7] * 600}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    ratios = []
    for pair in range(args.pairs):
        speeds = {}
        for name, llm in engines.items():
            speeds[name], what = run(llm, args, pair)
            print(f"{name:<10} {speeds[name]:9.1f} tok/s   {what}", flush=True)
        ratios.append(speeds["swap"] / speeds["recompute"])
    tiers = engines["swap"].llm_engine.core.scheduler.tiers
    assert tiers is not None
    costs = tiers.costs
    print(
        f"out {costs.out.value / 1e9:.1f} GB/s, back {costs.back.value / 1e9:.1f} GB/s, prefill "
        f"{costs.prefill.value:.0f} tok/s, a block of {costs.block_bytes / 2**20:.2f} MiB"
    )
    print(f"swap / recompute: {statistics.median(ratios):.3f} (median of {len(ratios)} pairs)")
    for llm in engines.values():
        llm.shutdown()
    return 0 if statistics.median(ratios) >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
