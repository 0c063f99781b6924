"""`quire tune`: measure which kernel is fastest for each of a model's GEMMs on this GPU, and store the result."""

from __future__ import annotations

import argparse
import functools
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
    from quire.kernels.triton.quantized.tuning import ProductCase
    from quire.kernels.triton.skinny_gemm.candidates import GemmShape
    from quire.kernels.triton.tuning_table import Entry, Gpu, TuningTables
    from quire.kernels.weights.base import QuantizedWeight
    from quire.platforms.base import Platform

WHAT = """\
Measure which kernel is fastest on this GPU for each GEMM of a model, in 16 or few bits, for its 16-bit experts, and
which cuBLASLt algorithm for GEMMs of many rows, and store the result for later starts.
Results that are already known, shipped with quire or measured here before, are printed and not measured again.
No weights are loaded (but downloaded if necessary). Nothing else should use the GPU meanwhile."""
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
        type=_integers,
        metavar="N,N,...",
        help="row counts to measure, of 1, 2, 4 to 512: a step of 5 rows uses the result for 8 (default: 1 to 256)",
    )
    group.add_argument("--again", action="store_true", help="also measure what is already known")
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def _integers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,2,4") from None


def run(args: argparse.Namespace) -> int:
    """Compile all candidates in parallel; then measure and print, one GEMM at a time."""
    from quire.config import EngineConfig

    config = EngineConfig(**engine_settings(args))
    platform = usable_gpu()
    from quire.kernels.triton import tuning_table
    from quire.kernels.triton.skinny_gemm import timing, tuning

    buckets = args.buckets or list(tuning.MEASURED_BUCKETS)
    if wrong := [rows for rows in buckets if rows not in tuning.BUCKETS]:
        args.parser.error(f"--buckets must be among {', '.join(map(str, tuning.BUCKETS))}; got {wrong[0]}")
    model = shape_model(config, platform)
    shapes, dtype = gemm_shapes(model)
    gpu = tuning_table.current_gpu()
    tables = tuning_table.TuningTables(gpu, tuning_table.shipped_path(gpu), tuning_table.own_path(gpu))
    tuner = tuning.GemmTuner(tables)
    unknown = {
        shape: [rows for rows in buckets if args.again or tuner.known(shape, rows, dtype) is None] for shape in shapes
    }
    count = sum(map(len, unknown.values()))
    say(
        f"{gpu.name}: {config.model} in {tuning_table.dtype_name(dtype)}; "
        f"{count} of {len(shapes) * len(buckets)} cases to measure"
    )
    if count:
        begin = time.monotonic()
        _compile(unknown, dtype, gpu)
        say(f"compiled in {time.monotonic() - begin:.0f} s")
        timing.raise_clocks()
    timer = timing.GraphTimer() if count else None
    begin = time.monotonic()
    for index, shape in enumerate(shapes):
        print(f"{shape.kind} {shape.n} x {shape.k} ({index + 1} of {len(shapes)})", flush=True)
        print(f"{'rows':>6}{'us':>10}{'cuBLAS us':>12}  kernel")
        for rows in buckets:
            if timer is not None and rows in unknown[shape]:
                tuner.tune([shape], dtype, [rows], timer)  # stored at once: an interrupt loses little
                note = ""
            else:
                note = "  (known)"
            print(f"{_line(shape, rows, tuner.known(shape, rows, dtype) or {})}{note}", flush=True)
    if count:
        say(f"{count} cases measured in {time.monotonic() - begin:.0f} s, stored in {tables.own}")
    else:
        say("everything was already known; --again measures it again")
    tune_few_bits(tables, model, args.buckets, args.again)
    for experts in experts_shapes(model):
        tune_experts(tables, experts, dtype, args.buckets, args.again)
    weights = dict.fromkeys((shape.n, shape.k) for shape in shapes if shape.kind == "linear")
    tune_cublaslt(gpu, list(weights), dtype, args.buckets, args.again)
    return 0


def tune_few_bits(tables: TuningTables, model: nn.Module, buckets: list[int] | None, again: bool) -> None:
    """Measure which kernel is fastest for the products with weights in few bits, and print it, one weight at a time."""
    from quire.kernels.triton.ops import TritonOps
    from quire.kernels.triton.quantized import timing, tuning
    from quire.kernels.triton.skinny_gemm.timing import raise_clocks

    timer: timing.GraphProductTimer | None = None
    for weight, gated, cases in few_bit_cases(model, buckets):
        print(f"{cases[0][1].key.split()[0]} {weight.shape[0]} x {weight.shape[1]}")
        print(f"{'rows':>6}{'us':>10}{'rule us':>10}  kernel", flush=True)
        for rows, case in cases:
            entry, note = tables.get(case.key), "  (known)"
            if entry is None or again:
                if timer is None:
                    raise_clocks()
                    timer = timing.GraphProductTimer(TritonOps())
                entry, note = tuning.tune(case, tables, functools.partial(timer, weight, rows, gated)), ""
            if entry is not None:
                ours, rule = (f"{entry[name]:.2f}" if name in entry else "-" for name in tuning.TIMES)
                print(f"{rows:>6}{ours:>10}{rule:>10}  {tuning.describe(entry)}{note}", flush=True)


def few_bit_cases(
    model: nn.Module, buckets: list[int] | None
) -> list[tuple[QuantizedWeight, bool, list[tuple[int, ProductCase]]]]:
    """(weight, whether it is gated, what to measure for each number of rows) of the weights in few bits."""
    from quire.kernels.triton.ops import TritonOps
    from quire.kernels.triton.quantized.registry import products_of
    from quire.kernels.weights.base import QuantizedWeight, SplitWeight
    from quire.layers.gemm_shapes import layer_gemms

    found: dict[str, tuple[QuantizedWeight, bool, list[tuple[int, ProductCase]]]] = {}
    for gemm in layer_gemms(model):
        gated = gemm.gated and not isinstance(gemm.weight, SplitWeight)
        for weight in gemm.weight.parts if isinstance(gemm.weight, SplitWeight) else (gemm.weight,):
            if not isinstance(weight, QuantizedWeight):
                continue
            products = products_of(weight)(TritonOps(), False)
            each = [(rows, products.case_of(weight, rows, gated)) for rows in buckets or products.buckets]
            if cases := [(rows, case) for rows, case in each if case is not None]:
                found.setdefault(cases[0][1].key, (weight, gated, cases))
    return list(found.values())


def tune_experts(
    tables: TuningTables, shape: ExpertsShape, dtype: torch.dtype, buckets: list[int] | None, again: bool
) -> None:  # fmt: skip
    """Measure which kernel is fastest for experts, and print it, one token count at a time."""
    from quire.kernels.triton.moe import timing as moe_timing
    from quire.kernels.triton.moe import tuning as moe_tuning

    tuner = moe_tuning.ExpertsTuner(tables)
    buckets = buckets or list(moe_tuning.BUCKETS)
    unknown = [tokens for tokens in buckets if again or tuner.known(shape, tokens, dtype) is None]
    print(f"{shape.experts} experts of {shape.width} x {shape.hidden}, {shape.top_k} per token")
    print(f"{'tokens':>6}{'us':>10}  kernel", flush=True)
    timer = None
    if unknown:
        timer = moe_timing.GraphExpertsTimer()
        configs = tuner.candidate_configs(shape, dtype, unknown)
        moe_timing.compile_experts(shape, timer.weights(shape, dtype)[0], configs)
    for tokens in buckets:
        if timer is not None and tokens in unknown:
            tuner.tune(shape, dtype, [tokens], timer)  # stored at once: an interrupt loses little
        entry = tuner.known(shape, tokens, dtype) or {}
        note = "" if tokens in unknown else "  (known)"
        print(f"{tokens:>6}{entry.get('us', 0.0):>10.2f}  {moe_tuning.describe(entry)}{note}", flush=True)


def tune_cublaslt(
    gpu: Gpu, weights: list[tuple[int, int]], dtype: torch.dtype, buckets: list[int] | None, again: bool
) -> None:  # fmt: skip
    """Measure which cuBLASLt algorithms beat cuBLAS's own choice, and print them, one weight at a time."""
    from quire.kernels.triton import cublaslt
    from quire.kernels.triton.skinny_gemm import timing
    from quire.kernels.triton.tuning_table import read_table, write_table

    lt = cublaslt.library()
    if lt is None or dtype.itemsize != 2:
        return
    shipped_path, own_path = cublaslt.table_paths(gpu, lt.version)
    shipped, known, timer = read_table(shipped_path), read_table(own_path), cublaslt.CublasTimer()
    for n, k in weights:
        keys = {rows: cublaslt.key_of(rows, n, k, dtype) for rows in cublaslt.measured_rows(n)}
        is_shipped = any(key in shipped for key in keys.values())  # a shipped table lists only the keys that won
        wanted = {rows: key for rows, key in keys.items() if buckets is None or rows in buckets}
        unknown = [rows for rows, key in wanted.items() if again or not (key in known or is_shipped)]
        if wanted:
            print(f"cuBLASLt algorithms, {n} x {k}")
            print(f"{'rows':>6}{'us':>10}{'cuBLAS us':>12}", flush=True)
        if unknown:
            timing.raise_clocks()
        for rows, key in wanted.items():
            if rows in unknown:
                known[key] = cublaslt.measure_algorithms(lt, n, k, rows, dtype, timer)
                write_table(own_path, read_table(own_path) | {key: known[key]})
                note = "  taken" if "algorithm" in known[key] else ""
            else:
                note = "  (known)"
            entry = known.get(key) or shipped.get(key) or {}
            print(f"{_times(rows, entry)}{note}", flush=True)


def usable_gpu() -> Platform:
    """The GPU to measure on; raises an error that says what is missing if there is none."""
    from quire.platforms import choose
    from quire.platforms.cuda import FAST, why_unusable

    if why := why_unusable():
        raise QuireError(f"there is no GPU to measure on: {why}")
    if importlib.util.find_spec("triton") is None:
        raise QuireError('the kernels to choose from need triton, which is not installed (pip install "quire[cuda]")')
    platform = choose("cuda")
    if platform.ops != FAST[0]:
        raise QuireError(f"quire's kernels do not run on {platform.describe()}: nothing to tune")
    return platform


def shape_model(config: EngineConfig, platform: Platform) -> nn.Module:
    """The model on the meta device: shapes without weights."""
    import torch

    from quire.engine.setup import model_len
    from quire.loading.hub import find_model
    from quire.loading.model_config import read_model_config
    from quire.worker.building import build_model

    files = find_model(config)
    model = read_model_config(files, config.hf_overrides)
    length = model_len(config, model)
    return build_model(config, files, model, platform, length, device=torch.device("meta"))  # type: ignore[return-value]


def gemm_shapes(model: nn.Module) -> tuple[list[GemmShape], torch.dtype]:
    """The GEMMs of a step, less fused kinds first; their dtype."""
    from quire.kernels.triton.skinny_gemm.candidates import GemmShape
    from quire.kernels.triton.skinny_gemm.tuning import KINDS, with_less_fused
    from quire.kernels.weights.base import QuantizedWeight
    from quire.layers.gemm_shapes import layer_gemms

    found = [gemm for gemm in layer_gemms(model) if not isinstance(gemm.weight, QuantizedWeight)]
    shapes: dict[GemmShape, None] = {}
    for product in found:
        kind = ("norm_silu_linear" if product.gated else "norm_linear") if product.normed else "linear"
        n, k = product.weight.shape
        shapes |= dict.fromkeys(with_less_fused(GemmShape(kind, n, k)))  # a bias adds no time and is in no key
    dtype = found[0].weight.dtype if found else model.build.dtype
    return sorted(shapes, key=lambda shape: KINDS.index(shape.kind)), dtype  # type: ignore[return-value]


def experts_shapes(model: nn.Module) -> list[ExpertsShape]:
    """The experts of a step, if there are any."""
    from quire.kernels.triton.moe.experts import shape_of
    from quire.kernels.weights.base import QuantizedWeight
    from quire.layers.gemm_shapes import layer_experts

    found = [each for each in layer_experts(model) if not isinstance(each.gate_up, QuantizedWeight)]
    return list(dict.fromkeys(shape_of(each.down, each.top_k) for each in found))  # type: ignore[arg-type]


def _compile(unknown: dict[GemmShape, list[int]], dtype: torch.dtype, gpu: Gpu) -> None:
    from quire.kernels.triton.skinny_gemm.gemm import compile_key
    from quire.kernels.triton.skinny_gemm.timing import compile_all
    from quire.kernels.triton.skinny_gemm.tuning import candidate_kernels

    kernels = {
        compile_key(kernel.gemm(), kernel.config): kernel
        for shape, buckets in unknown.items()
        for kernel in candidate_kernels([shape], dtype, buckets, gpu)
    }
    say(f"compiling {len(kernels)} candidate kernels")
    compile_all(list(kernels.values()))


def _line(shape: GemmShape, rows: int, entry: Entry) -> str:
    from quire.kernels.triton.skinny_gemm.tuning import describe

    kernel = describe(entry)
    if kernel == "cublas" and shape.kind != "linear":
        kernel = "not fused"  # by the less fused kernels
    return f"{_times(rows, entry)}  {kernel}"


def _times(rows: int, entry: Entry) -> str:
    ours, cublas = (f"{entry[name]:.2f}" if name in entry else "-" for name in ("us", "cublas_us"))
    return f"{rows:>6}{ours:>10}{cublas:>12}"
