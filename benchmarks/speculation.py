"""Speculation beside none in one run, on real text: work that repeats its prompt, and open chat.

    python benchmarks/speculation.py                          # CPU, default model: n-gram and suffix
    python benchmarks/speculation.py --methods ngram --tokens 128 --chat 4 --repeating 4
    python benchmarks/speculation.py --config '{"method": "eagle3", "model": "DRAFT"}'

Each prompt is answered by the engine without drafts and by one engine for each method, one after the other, in an order
that changes from prompt to prompt, so that what else the machine does falls on all of them alike. Greedy, one request
at a time. A prompt is answered once by each engine: suffix decoding must not know the answer already. The ratio is that
of the times of all prompts together; tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from repeating_prompts import CHAT, REPEATING

from quire import LLM, SamplingParams
from quire.cli.bench.speculation import DraftCounts

NONE = "none"
BARS = {"repeating": 1.8, "chat": 0.98}
"""Least ratio of the time without drafts to that with the better of n-gram and suffix (repeating), with each (chat)."""


@dataclass
class Engine:
    """An engine, and what it took."""

    name: str
    llm: LLM
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of work and prompt."""
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def answer(self, kind: str, prompt: str, params: SamplingParams, clock: Any) -> None:
        """Time one answer."""
        begin = clock()
        (output,) = self.llm.chat([[{"role": "user", "content": prompt}]], params, use_tqdm=False)
        self.seconds.setdefault(kind, {})[prompt] = clock() - begin
        self.tokens[prompt] = tuple(output.outputs[0].token_ids)


def main() -> int:
    """Measure and print."""
    args = parse()
    configs: dict[str, Mapping[str, Any] | None] = {NONE: None}
    configs |= {method: {"method": method} for method in args.methods}
    configs |= {str(config.get("method", config.get("model"))): config for config in args.config}
    settings = {"model": args.model, "max_model_len": args.max_model_len, "disable_log_stats": True}
    engines = [Engine(name, LLM(speculative_config=config, **settings)) for name, config in configs.items()]
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    clock = time.process_time if args.cpu_time else time.perf_counter
    for engine in engines:
        for prompt in ("Count from one to ten.", "Say hello in three languages."):
            engine.answer("warm-up", prompt, params, clock)
    work = {
        "repeating": list(REPEATING.values())[: args.repeating],
        "chat": list(CHAT[: args.chat]),
    }
    names = {prompt: name for name, prompt in REPEATING.items()}
    failed = False
    for kind, prompts in work.items():
        before = {engine.name: DraftCounts.of(engine.llm) for engine in engines}
        for turn, prompt in enumerate(prompts):
            order = engines[turn % len(engines) :] + engines[: turn % len(engines)]
            for engine in order if turn % 2 else reversed(order):
                engine.answer(kind, prompt, params, clock)
            show(names.get(prompt, prompt), kind, prompt, engines)
        if prompts:
            failed |= summarize(kind, engines, before)
    for engine in engines:
        engine.llm.shutdown()
    return int(failed)


def show(title: str, kind: str, prompt: str, engines: list[Engine]) -> None:
    """One prompt: time without drafts, and ratios."""
    none = engines[0]
    base = none.seconds[kind][prompt]
    count = len(none.tokens[prompt])
    ratios = "  ".join(f"{engine.name} {base / engine.seconds[kind][prompt]:5.2f}x" for engine in engines[1:])
    print(f"{title[:40]:40} {count:4} tokens {1e3 * base / max(count, 1):7.2f} ms/token  {ratios}", flush=True)


def summarize(kind: str, engines: list[Engine], before: dict[str, DraftCounts]) -> bool:
    """All prompts of a kind; whether a bar was missed."""
    none, best, failed = engines[0], 0.0, False
    base = sum(none.seconds[kind].values())
    print(f"-- {kind}")
    for engine in engines[1:]:
        ratio = base / sum(engine.seconds[kind].values())
        best = max(best, ratio)
        differing = sum(engine.tokens[prompt] != none.tokens[prompt] for prompt in none.seconds[kind])
        failed |= differing > 0 or (kind == "chat" and ratio < BARS[kind])
        print(f"{engine.name:12} {ratio:5.2f}x none; {differing} of {len(none.seconds[kind])} answers differ; "
              f"{acceptance(DraftCounts.of(engine.llm).since(before[engine.name]))}")  # fmt: skip
    if kind == "repeating" and best < BARS[kind]:
        failed = True
    print(f"bar: {BARS[kind]}x" + (" MISSED" if failed else " met"), flush=True)
    return failed


def acceptance(counts: DraftCounts) -> str:
    """Tokens a verifying step, and the share of drafts accepted by position."""
    if not counts.steps:
        return "no drafts"
    shares = " ".join(f"{rate:.2f}" for rate in counts.rates)
    share = counts.accepted / counts.drafts
    return f"{counts.length:.2f} tokens a verifying step, {share:.0%} of drafts accepted ({shares})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--methods", nargs="*", default=["ngram", "suffix"], help="methods without weights")
    parser.add_argument("--config", type=json.loads, action="append", default=[], help="a speculative_config (JSON)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--repeating", type=int, default=len(REPEATING), help="prompts of repeating work")
    parser.add_argument("--chat", type=int, default=len(CHAT), help="open chat prompts")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time: for a machine with busy neighbours")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
