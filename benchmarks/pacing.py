"""Gaps between the tokens of running streams, with and without long prompts arriving.

python benchmarks/pacing.py                                             # CPU, default model: 1,000 tokens every 10 s
python benchmarks/pacing.py --model benchmarks/gpu/models/llama-3.1-8b --load-format dummy \\
    --streams 32 --prompt 4000 --every 1                                # on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from typing import Any

from quire import AsyncLLM, RequestOutputKind, SamplingParams

HIGHEST = 10_000
"""Token ids are drawn up to this one, which lies below the special ones of every model here."""
BAR = 2.0
"""The p99 gap with prompts may be so many times the one without."""


class Readers:
    """Streams that are read as fast as they come; remembers when each token did."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self._llm = llm
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self.gaps: list[float] = []
        self.waits: list[float] = []
        """How long each prompt waited for its first token."""
        self.is_counting = False

    def start_streams(self, count: int, tokens: int) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self._read_stream(tokens)))

    def start_prompt(self, length: int) -> None:
        self._tasks.append(asyncio.create_task(self._read_prompt(length)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error

    async def _read_stream(self, tokens: int) -> None:
        last = 0.0
        async for output in self._generate(32, tokens):
            now = time.perf_counter()
            # Two tokens at once came in one piece: the second had no gap.
            if self.is_counting and last:
                self.gaps += [now - last] + [0.0] * (len(output.outputs[0].token_ids) - 1)
            last = now
        raise RuntimeError(f"a stream ended after its {tokens} tokens: it was to last to the end")

    async def _read_prompt(self, length: int) -> None:
        begin = time.perf_counter()
        async for _ in self._generate(length, 8):
            if begin:
                self.waits.append(time.perf_counter() - begin)
            begin = 0.0

    def _generate(self, prompt: int, tokens: int) -> Any:
        ids = [self._random.randint(0, HIGHEST) for _ in range(prompt)]
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        return self._llm.generate({"prompt_token_ids": ids}, params)


async def phase(llm: AsyncLLM, args: argparse.Namespace, seconds: float, with_prompts: bool, seed: int) -> Readers:
    """Fresh streams, so many seconds of them."""
    await llm.reset_prefix_cache()
    readers = Readers(llm, seed)
    readers.start_streams(args.streams, args.tokens)
    await asyncio.sleep(args.settle)
    readers.is_counting = True
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        if with_prompts:
            readers.start_prompt(args.prompt)
        await asyncio.sleep(min(left, args.every))
    readers.is_counting = False
    await readers.stop()
    return readers


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def show(name: str, readers: Readers) -> None:
    marks = "  ".join(f"p{100 * share:g} {1000 * percentile(readers.gaps, share):7.1f}" for share in (0.5, 0.9, 0.99))
    first = f"   first token of a prompt after {statistics.median(readers.waits):.2f} s" if readers.waits else ""
    print(
        f"{name:<16} {len(readers.gaps):>7} gaps, ms: {marks}  max {1000 * max(readers.gaps):7.1f}{first}", flush=True
    )


async def measure(args: argparse.Namespace) -> float:
    settings = {
        name: getattr(args, name)
        for name in ("load_format", "max_step_stretch", "pipeline_depth")
        if getattr(args, name) is not None
    }
    llm = AsyncLLM(args.model, disable_log_stats=True, skip_tokenizer_init=True, **settings)
    print(
        f"{llm.info.device}, {llm.info.dtype}, {args.streams} streams, {args.prompt} tokens every {args.every:g} s",
        flush=True,
    )
    try:
        await phase(llm, args, args.warm, with_prompts=True, seed=1)
        quiet, busy = [], []
        waits: list[float] = []
        for part in range(args.parts):
            for is_busy, gaps in ((False, quiet), (True, busy)):
                seconds = max(args.seconds / args.parts, args.every)
                readers = await phase(llm, args, seconds, is_busy, seed=2 + 2 * part + is_busy)
                show("with prompts" if is_busy else "without", readers)
                gaps += readers.gaps
                waits += readers.waits
    finally:
        llm.shutdown()
    ratio = percentile(busy, 0.99) / percentile(quiet, 0.99)
    marks = [1000 * percentile(gaps, 0.99) for gaps in (quiet, busy)]
    print(f"p99 gap: {marks[0]:.1f} ms without, {marks[1]:.1f} ms with: {ratio:.2f}x (bar: {BAR:g}x)")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format")
    parser.add_argument("--pipeline-depth", type=int)
    parser.add_argument("--max-step-stretch", type=float, help="unset: as a server has it; inf: no pacing")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6000, help="a stream must not end within its phase")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between prompts")
    parser.add_argument("--seconds", type=float, default=60.0, help="of gaps, without prompts and with")
    parser.add_argument("--parts", type=int, default=2, help="so many times in turn, each with fresh streams")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before gaps count")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of everything before anything counts")
    return 0 if asyncio.run(measure(parser.parse_args())) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
