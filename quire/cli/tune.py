"""`quire tune`: measure which kernel does each of a model's products fastest on this GPU, and remember it."""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say
from quire.errors import QuireError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quire.config import EngineConfig
    from quire.kernels.triton.moe.common import ExpertsShape
    from quire.kernels.triton.skinny_gemm.candidates import GemmShape
    from quire.kernels.triton.skinny_gemm.tuning import Entry, Tuner
    from quire.platforms.base import Platform

WHAT = """\
Measure which kernel does each matrix product of a model fastest on this GPU, how tokens go through a mixture's
experts, and which of cuBLAS's algorithms suit products of many rows, and keep the result for later starts.
What is known already, because it comes with quire or was measured here before, is shown and not measured again.
No weights are loaded (a model that is not here yet is downloaded). Nothing else should use the GPU meanwhile."""
EXAMPLES = """
  quire tune qwen3-0.6b
  quire tune ./my-model --dtype float16 --buckets 1,2,4,8
  quire tune llama3.1-8b --again
"""
FLAGS = ("model", "trust_remote_code", "revision", "hf_token", "hf_overrides", "download_dir", "dtype")


def configure(parser: Parser) -> None:
    """The flags of `quire tune`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--buckets",
        type=_numbers,
        metavar="N,N,...",
        help="rows to measure, of 1, 2, 4 to 512: a step of 5 rows takes what is best for 8 (default: all to 256)",
    )
    group.add_argument("--again", action="store_true", help="measure what is known already, too")
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,2,4") from None


def run(args: argparse.Namespace) -> int:
    """Compile what will be tried, all at once; then measure and print, a product at a time."""
    from quire.config import EngineConfig

    config = EngineConfig(**engine_settings(args))
    platform = usable_gpu()
    from quire.kernels.triton.skinny_gemm import timing as thin_timing
    from quire.kernels.triton.skinny_gemm import tuning

    buckets = args.buckets or list(tuning.MEASURED_BUCKETS)
    if wrong := [rows for rows in buckets if rows not in tuning.BUCKETS]:
        args.parser.error(f"--buckets are of {', '.join(map(str, tuning.BUCKETS))}; got {wrong[0]}")
    model = shape_model(config, platform)
    shapes, dtype = products(model)
    gpu = tuning.current_gpu()
    tuner = tuning.Tuner(gpu, tuning.shipped_table(gpu), tuning.own_table(gpu))
    unknown = {
        shape: [rows for rows in buckets if args.again or tuner.known(shape, rows, dtype) is None] for shape in shapes
    }
    count = sum(map(len, unknown.values()))
    name = str(dtype).removeprefix("torch.")
    say(f"{gpu.name}: {config.model} in {name}; {count} of {len(shapes) * len(buckets)} cases to measure")
    if count:
        begin = time.monotonic()
        _compile(unknown, dtype, tuner)
        say(f"compiled in {time.monotonic() - begin:.0f} s")
        thin_timing.raise_clocks()
    timer = thin_timing.GraphTimer() if count else None
    begin = time.monotonic()
    for index, shape in enumerate(shapes):
        print(f"{shape.kind} {shape.n} x {shape.k} ({index + 1} of {len(shapes)})", flush=True)
        print(f"{'rows':>6}{'us':>10}{'cuBLAS us':>12}  kernel")
        for rows in buckets:
            if timer is not None and rows in unknown[shape]:
                tuner.tune([shape], dtype, [rows], timer)  # kept at once: who interrupts loses little
                note = ""
            else:
                note = "  (known)"
            print(f"{_line(shape, rows, tuner.known(shape, rows, dtype) or {})}{note}", flush=True)
    if count:
        say(f"{count} cases measured in {time.monotonic() - begin:.0f} s, kept in {tuner.own}")
    else:
        say("everything was known already; --again measures it anew")
    for experts in mixtures(model):
        tune_experts(tuner, experts, dtype, args.buckets, args.again)
    weights = dict.fromkeys((shape.n, shape.k) for shape in shapes if shape.kind == "linear")
    tune_many_rows(tuner, list(weights), dtype, args.buckets, args.again)
    return 0


def tune_experts(
    tuner: Tuner, shape: ExpertsShape, dtype: torch.dtype, buckets: list[int] | None, again: bool
) -> None:  # fmt: skip
    """Measure how tokens go through experts fastest, and print it, a number of tokens at a time."""
    from quire.kernels.triton.moe import timing as moe_timing
    from quire.kernels.triton.moe import tuning as moe_tuning

    buckets = buckets or list(moe_tuning.BUCKETS)
    unknown = [tokens for tokens in buckets if again or moe_tuning.known(tuner, shape, tokens, dtype) is None]
    print(f"{shape.experts} experts of {shape.width} x {shape.hidden}, {shape.top_k} a token")
    print(f"{'tokens':>6}{'us':>10}  kernel", flush=True)
    timer = None
    if unknown:
        timer = moe_timing.GraphExpertsTimer()
        configs = moe_tuning.tried(shape, dtype, unknown, tuner)
        moe_timing.compile_experts(shape, timer.weights(shape, dtype)[0], configs)
    for tokens in buckets:
        if timer is not None and tokens in unknown:
            moe_tuning.tune(tuner, shape, dtype, [tokens], timer)  # kept at once: who interrupts loses little
        entry = moe_tuning.known(tuner, shape, tokens, dtype) or {}
        note = "" if tokens in unknown else "  (known)"
        print(f"{tokens:>6}{entry.get('us', 0.0):>10.2f}  {moe_tuning.describe(entry)}{note}", flush=True)


def tune_many_rows(
    tuner: Tuner, weights: list[tuple[int, int]], dtype: torch.dtype, buckets: list[int] | None, again: bool
) -> None:  # fmt: skip
    """Measure which of cuBLASLt's algorithms beat cuBLAS's own choice, and print them, a weight at a time."""
    from quire.kernels import cublaslt
    from quire.kernels.triton import cublas_timing
    from quire.kernels.triton.skinny_gemm import timing as thin_timing
    from quire.kernels.triton.skinny_gemm import tuning

    lt = cublaslt.library()
    if lt is None or dtype.itemsize != 2:
        return
    shipped = tuning.read_table(cublaslt.shipped_table(tuning.card_of(tuner.gpu), lt.version))
    own = cublaslt.own_table(tuning.slug(tuner.gpu.name), lt.version)
    known, timer = tuning.read_table(own), cublas_timing.CublasTimer()
    for n, k in weights:
        keys = {rows: cublaslt.key_of(rows, n, k, dtype) for rows in cublas_timing.grid_of(n)}
        comes_with_us = any(key in shipped for key in keys.values())  # and then those that won alone
        asked = {rows: key for rows, key in keys.items() if buckets is None or rows in buckets}
        unknown = [rows for rows, key in asked.items() if again or not (key in known or comes_with_us)]
        if asked:
            print(f"many rows of {n} x {k}")
            print(f"{'rows':>6}{'us':>10}{'cuBLAS us':>12}", flush=True)
        if unknown:
            thin_timing.raise_clocks()
        for rows, key in asked.items():
            if rows in unknown:
                known[key] = cublas_timing.measure(lt, n, k, rows, dtype, timer)
                tuning.write_table(own, tuning.read_table(own) | {key: known[key]})
                note = "  taken" if "algorithm" in known[key] else ""
            else:
                note = "  (known)"
            entry = known.get(key) or shipped.get(key) or {}
            print(f"{_times(rows, entry)}{note}", flush=True)


def usable_gpu() -> Platform:
    """The GPU to measure on; an error that says what is missing where there is none."""
    from quire.platforms import choose
    from quire.platforms.cuda import FAST, why_unusable

    if why := why_unusable():
        raise QuireError(f"there is no GPU to measure on: {why}")
    if importlib.util.find_spec("triton") is None:
        raise QuireError('the kernels to choose from need triton, which is not installed (pip install "quire[cuda]")')
    platform = choose("cuda")
    if platform.ops != FAST[0]:
        raise QuireError(f"quire's kernels do not run on {platform.describe()}: there are none to choose from")
    return platform


def shape_model(config: EngineConfig, platform: Platform) -> nn.Module:
    """The model, with shapes and no weights."""
    import torch

    from quire.engine.setup import model_len
    from quire.loading.hub import find
    from quire.loading.model_config import read_model_config
    from quire.worker.building import build_model

    files = find(config)
    facts = read_model_config(files, config.hf_overrides)
    length = model_len(config, facts)
    return build_model(config, files, facts, platform, length, device=torch.device("meta"))  # type: ignore[return-value]


def products(model: nn.Module) -> tuple[list[GemmShape], torch.dtype]:
    """The products of a step, parts before wholes; their dtype."""
    from quire.kernels.triton.skinny_gemm.candidates import GemmShape
    from quire.kernels.triton.skinny_gemm.tuning import KINDS, with_parts
    from quire.layers.gemm_shapes import layer_products

    found = layer_products(model)
    shapes: dict[GemmShape, None] = {}
    for product in found:
        kind = ("norm_silu_linear" if product.gated else "norm_linear") if product.normed else "linear"
        n, k = product.weight.shape
        shapes |= dict.fromkeys(with_parts(GemmShape(kind, n, k)))  # a bias adds no time, and tables know of none
    return sorted(shapes, key=lambda shape: KINDS.index(shape.kind)), found[0].weight.dtype


def mixtures(model: nn.Module) -> list[ExpertsShape]:
    """The experts of a step, if there are any."""
    from quire.kernels.triton.moe.experts import shape_of
    from quire.layers.gemm_shapes import layer_experts

    return list(dict.fromkeys(shape_of(experts.gate_up, experts.top_k) for experts in layer_experts(model)))


def _compile(unknown: dict[GemmShape, list[int]], dtype: torch.dtype, tuner: Tuner) -> None:
    from quire.kernels.triton.skinny_gemm.gemm import compile_key
    from quire.kernels.triton.skinny_gemm.timing import compile_all
    from quire.kernels.triton.skinny_gemm.tuning import tuning_jobs

    jobs = {
        compile_key(job.product(), job.config): job
        for shape, buckets in unknown.items()
        for job in tuning_jobs([shape], dtype, buckets, tuner.gpu)
    }
    say(f"compiling {len(jobs)} kernels to try")
    compile_all(list(jobs.values()))


def _line(shape: GemmShape, rows: int, entry: Entry) -> str:
    from quire.kernels.triton.skinny_gemm.tuning import describe

    kernel = describe(entry)
    if kernel == "cublas" and shape.kind != "linear":
        kernel = "not folded"  # by the kernels of its parts
    return f"{_times(rows, entry)}  {kernel}"


def _times(rows: int, entry: Entry) -> str:
    ours, cublas = (f"{entry[name]:.2f}" if name in entry else "-" for name in ("us", "cublas_us"))
    return f"{rows:>6}{ours:>10}{cublas:>12}"
