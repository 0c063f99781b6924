"""Time to first token of a suspended session: from host memory, from disk, and with its prompt computed again.

python benchmarks/resume.py                                              # default model, CPU, 2,048 tokens
python benchmarks/resume.py --model benchmarks/gpu/models/llama-3.1-8b --load-format dummy --tokens 8192   # on a GPU

Timed from the call to the first token: the call, loading or computing, one decode step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time

from quire import LLM, SamplingParams

HIGHEST = 10_000
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
BARS = {"cpu": (20.0, 10.0), "gpu": (5.0, 5.0)}


def _many(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class Bench:
    """An engine with tiers, and a session in it."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args = args
        self.llm = LLM(
            args.model, load_format=args.load_format, swap_space=args.swap_space, kv_disk=folder, kv_disk_size=8,
            skip_tokenizer_init=True, disable_log_stats=True, max_model_len=args.tokens + 512,
        )  # fmt: skip
        self.core = self.llm.llm_engine.core
        self._random = random.Random(1)

    def tokens(self) -> list[int]:
        return [self._random.randint(0, HIGHEST) for _ in range(self.args.tokens)]

    def forget(self, host: bool) -> None:
        """Empty the prefix cache; `host`: and host memory."""
        self.llm.reset_prefix_cache()
        tiers = self.core.scheduler.tiers
        assert tiers is not None
        if host:
            tiers.host.discard(list(tiers.host.oldest()))

    def prefill(self) -> float:
        """Seconds to the first token of a new prompt."""
        prompt = self.tokens()
        begin = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt}], ONE, use_tqdm=False)
        return time.perf_counter() - begin

    def resume(self, name: str, from_disk: bool) -> tuple[float, int]:
        """Seconds to the first token of a suspended session, and how many tokens were computed for it."""
        session = self.llm.sessions.resume(name)
        session.suspend()
        self.forget(host=from_disk)
        computed = self.core.scheduler.stats.prompt_tokens
        begin = time.perf_counter()
        stream = session.stream(ONE)
        while not next(stream).outputs[0].token_ids:
            pass
        seconds = time.perf_counter() - begin
        for _ in stream:
            pass  # the output is finished when it is durable
        return seconds, self.core.scheduler.stats.prompt_tokens - computed

    def decode_seconds(self) -> float:
        """Seconds of a decode step over as many tokens."""
        prompt, times = {"prompt_token_ids": self.tokens()}, []
        for count in (1, 33):
            self.llm.generate([prompt], _many(count), use_tqdm=False)  # its blocks are cached from here on
            begin = time.perf_counter()
            self.llm.generate([prompt], _many(count), use_tqdm=False)
            times.append(time.perf_counter() - begin)
        return (times[1] - times[0]) / 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--swap-space", type=float, default=4.0, help="GiB of host memory")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        name = "benchmark"
        session = bench.llm.sessions.create(name)
        session.append(bench.tokens())
        session.generate(ONE)
        again = {"host": 0, "disk": 0}
        times: dict[str, list[float]] = {"prefill": [], "host": [], "disk": []}
        for _ in range(args.repeats):
            times["prefill"].append(bench.prefill())
            for tier in ("host", "disk"):
                seconds, computed = bench.resume(name, from_disk=tier == "disk")
                times[tier].append(seconds)
                again[tier] += computed - 1
        tiers = bench.core.scheduler.tiers
        assert tiers is not None
        size = -(-args.tokens // bench.core.scheduler.tables.block_size) * tiers.costs.block_bytes
        decode = bench.decode_seconds()
        info = bench.llm.llm_engine.info
        print(f"{info.device}, {info.dtype}, a session of {args.tokens} tokens = {size / 2**20:.0f} MiB")
        middle = {tier: statistics.median(values) for tier, values in times.items()}
        for tier, seconds in middle.items():
            low, high = min(times[tier]), max(times[tier])
            print(
                f"{tier:<8} {1000 * seconds:9.1f} ms ({1000 * low:.1f} to {1000 * high:.1f}) "
                f"{middle['prefill'] / seconds:8.1f}x"
                + (f"   {again[tier]} tokens were computed again: that is faster here" if again.get(tier) else "")
            )
        link = size / tiers.costs.back.value
        print(
            f"link {tiers.costs.back.value / 1e9:.1f} GB/s: {1000 * link:.1f} ms for the bytes, {1000 * decode:.1f} ms "
            f"a decode step; from host memory it took {middle['host'] / (link + decode):.2f}x that"
        )
        bars = BARS["cpu" if info.device == "cpu" or "CPU" in info.device else "gpu"]
        met = all(middle["prefill"] / middle[tier] >= bar for tier, bar in zip(("host", "disk"), bars, strict=True))
        bench.llm.shutdown()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
