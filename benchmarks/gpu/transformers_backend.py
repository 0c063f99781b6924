"""Models through the transformers library against quire's own: milliseconds a token, on random weights.

    python -m benchmarks.gpu.transformers_backend [--quick] [--models qwen3-0.6b llama-3.1-8b]

For each model and implementation an engine is started, its logprobs of a prompt are compared with those of the other
implementation, and decodes of 1, 8 and 64 requests are timed, in CUDA graphs. `--quick`: fewer tokens, and not 64.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams

MODELS = Path(__file__).parent / "models"
IMPLS = ("quire", "transformers")


def prompts(count: int, length: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randint(10, 10_000) for _ in range(length)] for _ in range(count)]


def seconds(llm: LLM, rows: int, tokens: int) -> float:
    """Of `rows` requests that each yield `tokens` tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    llm.generate(prompts(rows, 64), params, use_tqdm=False)
    return time.perf_counter() - begin


def milliseconds(llm: LLM, rows: int, tokens: int) -> float:
    """Of a decode step: prompts and the ends of requests cancel out."""
    seconds(llm, rows, 8)
    long, short = (min(seconds(llm, rows, count) for _ in range(2)) for count in (tokens + 8, 8))
    return 1000 * (long - short) / tokens


def logprobs(llm: LLM) -> torch.Tensor:
    """Of the tokens of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (prompt,) = prompts(1, 200)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    found: Any = output.prompt_logprobs
    return torch.tensor([entry[token].logprob for token, entry in zip(prompt[1:], found[1:], strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="*", default=["qwen3-0.6b", "llama-3.1-8b"])
    options = parser.parse_args()
    batches = (1, 8) if options.quick else (1, 8, 64)
    lines = [f"{'model':<16}{'code':<14}{'start s':>9}" + "".join(f"{f'ms at {rows}':>12}" for rows in batches)]
    for name in options.models:
        own: torch.Tensor | None = None
        for impl in IMPLS:
            begin = time.perf_counter()
            with LLM(
                str(MODELS / name), load_format="dummy", model_impl=impl, skip_tokenizer_init=True, max_model_len=2048,
                max_num_seqs=batches[-1], max_num_batched_tokens=4096, num_gpu_blocks_override=8192,
                enable_prefix_caching=False, disable_log_stats=True,
            ) as llm:  # fmt: skip
                start = time.perf_counter() - begin
                found = logprobs(llm)
                times = [milliseconds(llm, rows, 64 if options.quick else 192) for rows in batches]
            lines.append(f"{name:<16}{impl:<14}{start:9.1f}" + "".join(f"{each:12.3f}" for each in times))
            if own is None:
                own = found
            else:
                lines[-1] += f"   logprobs differ by {float((found - own).abs().mean()):.4f} on average"
                assert torch.isfinite(found).all() and (found - own).abs().mean() < 0.05, lines[-1]
            gc.collect()
            torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
