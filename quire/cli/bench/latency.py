"""`quire bench latency`: the time of one batch from start to end, repeated."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from quire.cli.bench.common import (
    add_output,
    bench_settings,
    energy_metrics,
    energy_rows,
    engine_stats,
    fixed_length,
    percentile,
    random_prompts,
    report,
    waste_metrics,
    waste_rows,
)
from quire.cli.bench.images import add_images
from quire.cli.bench.profile import add_profile, expected_steps, profile
from quire.cli.bench.speculation import (
    DraftCounts,
    add_speculation,
    speculation_metrics,
    speculation_rows,
    without_drafts,
)
from quire.cli.engine_flags import add_common, add_engine_flags
from quire.cli.parser import Parser
from quire.cli.values import positive, size

if TYPE_CHECKING:
    from quire.api.inputs import TokensPrompt
    from quire.api.llm import LLM
    from quire.messages.outputs import RequestOutput

WHAT = """\
Time one batch of random prompts from start to end, --num-iters times. The prefix cache is off by default: every
iteration computes its prompts."""
EXAMPLES = """
  quire bench latency --batch-size 1 --output-len 32
  quire bench latency --model qwen3-0.6b --input-len 1K --num-iters 20
  quire bench latency --batch-size 1 --profile
  quire bench latency --batch-size 1 --speculative-config '{"method": "ngram"}'
"""
PERCENTILES = (10, 25, 50, 75, 90, 99)


def configure(parser: Parser) -> None:
    """The flags of `quire bench latency`."""
    parser.describe(run, WHAT, EXAMPLES)
    load = parser.add_argument_group("load")
    load.add_argument("--input-len", type=positive, default=32, metavar="N", help="tokens per prompt (default: 32)")
    load.add_argument("--output-len", type=positive, default=128, metavar="N", help="tokens per output (default: 128)")
    load.add_argument("--batch-size", type=positive, default=8, metavar="N", help="requests (default: 8)")
    load.add_argument("--n", type=positive, default=1, metavar="N", help="sequences per prompt (default: 1)")
    load.add_argument("--num-iters", type=positive, default=10, metavar="N", help="measured batches (default: 10)")
    load.add_argument("--num-iters-warmup", type=size, default=2, metavar="N", help="batches before those (default: 2)")
    add_images(load)
    add_speculation(load)
    add_output(load)
    add_profile(load)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    from quire.api.llm import LLM

    settings = {"enable_prefix_caching": False, **bench_settings(args)}
    with LLM(**settings) as llm:
        before = DraftCounts.of(llm)
        latencies, outputs = _measure(llm, args)
        drafts = DraftCounts.of(llm).since(before)
        info, stats = llm.llm_engine.info, engine_stats(llm)
        profiled = None
        if args.profile:
            steps = expected_steps(llm, args.batch_size * args.n, args.input_len, args.output_len)
            params, prompts = fixed_length(llm, args, args.n), _prompts(llm, args, 0)
            profiled = profile(llm, args, lambda: llm.generate(prompts, params, use_tqdm=False), steps)
    speedup = None
    if (plain := without_drafts(settings, args)) is not None:
        with LLM(**plain) as llm:
            speedup = statistics.median(_measure(llm, args)[0]) / statistics.median(latencies)
    average = statistics.mean(latencies)
    percentiles = {str(share): percentile(latencies, share) for share in PERCENTILES}
    report(
        f"{info.files.name} ({info.dtype}) on {info.device}",
        [
            ("batch", f"{args.batch_size} of {args.input_len} + {args.output_len} tokens, {args.num_iters} times"),
            ("latency", f"{average:.3f} s on average, {1000 * average / args.output_len:.1f} ms per token"),
            ("percentiles", ", ".join(f"{share}%: {value:.3f} s" for share, value in percentiles.items())),
            *energy_rows(outputs),
            *speculation_rows(drafts, speedup),
            *waste_rows(stats, info.max_model_len),
        ],
        args,
        {
            "avg_latency": average,
            "latencies": latencies,
            "percentiles": percentiles,
            **energy_metrics(outputs),
            **speculation_metrics(drafts, speedup),
            **waste_metrics(stats, info.max_model_len),
            **({"profile": profiled.metrics} if profiled else {}),
        },
    )
    if profiled:
        print(profiled.text)
    return 0


def _prompts(llm: LLM, args: argparse.Namespace, iteration: int) -> list[TokensPrompt]:
    """The prompts of a batch. None comes twice: a proposer might remember the answer."""
    seed = llm.llm_engine.config.seed + iteration
    return random_prompts(llm, args.batch_size, args.input_len, seed, args.images, args.image_size)


def _measure(llm: LLM, args: argparse.Namespace) -> tuple[list[float], list[RequestOutput]]:
    """Seconds of each batch, sorted; and what the batches yielded."""
    params = fixed_length(llm, args, args.n)
    latencies, outputs = [], []
    for iteration in range(args.num_iters_warmup + args.num_iters):
        prompts = _prompts(llm, args, iteration)
        begin = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)
        latencies.append(time.perf_counter() - begin)
        outputs += found if iteration >= args.num_iters_warmup else []
    return sorted(latencies[args.num_iters_warmup :]), outputs
