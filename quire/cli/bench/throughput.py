"""`quire bench throughput`: many requests at once, as fast as possible."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from quire.cli.bench.common import (
    add_output,
    bench_settings,
    energy_metrics,
    energy_rows,
    engine_stats,
    fixed_length,
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
from quire.cli.values import positive

if TYPE_CHECKING:
    from quire.api.inputs import TokensPrompt
    from quire.api.llm import LLM
    from quire.messages.outputs import RequestOutput

WHAT = """\
Submit many prompts of random tokens at once, and time the engine until all have finished.
End tokens are ignored, so every request generates exactly --output-len tokens."""
EXAMPLES = """
  quire bench throughput --num-prompts 32 --output-len 64
  quire bench throughput --model ./config-only-folder --load-format dummy
  quire bench throughput --model qwen3-0.6b --num-prompts 1000 --input-len 512 --output-json result.json
  quire bench throughput --num-prompts 16 --profile
  quire bench throughput --model qwen2.5-vl-7b --num-prompts 256 --images 1 --image-size 1024x1024
"""


def configure(parser: Parser) -> None:
    """The flags of `quire bench throughput`."""
    parser.describe(run, WHAT, EXAMPLES)
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="requests (default: 64)")
    load.add_argument("--input-len", type=positive, default=128, metavar="N", help="tokens per prompt (default: 128)")
    load.add_argument("--output-len", type=positive, default=128, metavar="N", help="tokens per output (default: 128)")
    load.add_argument("--n", type=positive, default=1, metavar="N", help="sequences per prompt (default: 1)")
    add_images(load)
    add_speculation(load)
    add_output(load)
    add_profile(load)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    from quire.api.llm import LLM

    settings = bench_settings(args)
    with LLM(**settings) as llm:
        before = DraftCounts.of(llm)
        outputs, elapsed = _measure(llm, args)
        generated = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
        drafts = DraftCounts.of(llm).since(before)
        info, stats = llm.llm_engine.info, engine_stats(llm)
        counted = {metric.name: metric.value for metric in llm.get_metrics()}
        profiled = None
        if args.profile:
            steps = expected_steps(llm, args.num_prompts * args.n, args.input_len, args.output_len)
            params, prompts = fixed_length(llm, args, args.n), _prompts(llm, args)
            profiled = profile(llm, args, lambda: llm.generate(prompts, params, use_tqdm=False), steps)
    speedup = None
    if (plain := without_drafts(settings, args)) is not None:
        with LLM(**plain) as llm:
            speedup = _measure(llm, args)[1] / elapsed
    preemptions = int(counted["quire:num_preemptions"])
    total = generated + args.num_prompts * args.input_len
    images, (width, height) = args.num_prompts * args.images, args.image_size
    report(
        f"{info.files.name} ({info.dtype}) on {info.device}",
        [
            ("requests", f"{args.num_prompts} of {args.input_len} + {args.output_len} tokens"),
            ("elapsed", f"{elapsed:.2f} s"),
            ("throughput", f"{args.num_prompts / elapsed:.2f} requests/s"),
            ("", f"{generated / elapsed:.1f} output tokens/s, {total / elapsed:.1f} with prompts"),
            *([("images", f"{images / elapsed:.2f} images/s of {width} × {height}")] if images else []),
            ("preemptions", str(preemptions)),
            *energy_rows(outputs),
            *speculation_rows(drafts, speedup),
            *waste_rows(stats, info.max_model_len),
        ],
        args,
        {
            "elapsed_time": elapsed,
            "num_requests": args.num_prompts,
            "total_num_tokens": total,
            "requests_per_second": args.num_prompts / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": generated / elapsed,
            "num_preemptions": preemptions,
            **energy_metrics(outputs),
            **({"images_per_second": images / elapsed} if images else {}),
            **speculation_metrics(drafts, speedup),
            **waste_metrics(stats, info.max_model_len),
            **({"profile": profiled.metrics} if profiled else {}),
        },
    )
    if profiled:
        print(profiled.text)
    return 0


def _prompts(llm: LLM, args: argparse.Namespace) -> list[TokensPrompt]:
    seed = llm.llm_engine.config.seed
    return random_prompts(llm, args.num_prompts, args.input_len, seed, args.images, args.image_size)


def _measure(llm: LLM, args: argparse.Namespace) -> tuple[list[RequestOutput], float]:
    """What was generated, and the seconds it took."""
    params = fixed_length(llm, args, args.n)
    warm_up = params.clone()
    warm_up.max_tokens = 2
    seed = llm.llm_engine.config.seed + args.num_prompts + 1
    llm.generate(random_prompts(llm, 1, args.input_len, seed, args.images, args.image_size), warm_up, use_tqdm=False)
    prompts = _prompts(llm, args)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - begin
    return outputs, elapsed
