"""GEMMs with weights in 8-bit codes on a GPU: every variant checked against plain torch, then timed.

    python -m benchmarks.gpu.quantized_gemm --out times.json    # FP8, INT8 and FP8 in blocks, Llama-3.1-8B's shapes
    python -m benchmarks.gpu.quantized_gemm --quick             # fewer row counts

A GEMM of up to 64 rows is timed with the quantization of its activations (and the norm before it, where a model has
one), since that is what a decode step runs; of more rows alone, and the quantization beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.triton.compiler import CompilerFork, compile_tasks
from quire.kernels.triton.quantized.w8.activations import Codes, quantize
from quire.kernels.triton.quantized.w8.large import large_launch
from quire.kernels.triton.quantized.w8.specialized import specialized_launch
from quire.kernels.triton.quantized.w8.tile import CodedGemm, tile_launch
from quire.kernels.triton.quantized.w8.vector import VectorGemm, vector_launch
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer, raise_clocks

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
EPS = 1e-5
LAYERS = 32
TIMED_WITH_QUANTIZATION = 64
"""Rows."""
TOLERANCE = {"fp8": 6e-3, "int8": 3e-3, "block": 6e-3}
"""Relative error, of the norm: one rounding to bfloat16; FP8 sums of the tensor cores keep fewer bits than float32."""


class Shape(NamedTuple):
    """One of a layer's GEMMs: the weight [n, k], and what is around it."""

    name: str
    n: int
    k: int
    norm: bool = False
    silu: bool = False
    add: bool = False

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.silu else self.n


SHAPES = (
    Shape("qkv", 6144, 4096, norm=True),
    Shape("o", 4096, 4096, add=True),
    Shape("gate_up", 28672, 4096, norm=True, silu=True),
    Shape("down", 4096, 14336, add=True),
)


class Format(NamedTuple):
    """A layout of weights."""

    name: str
    code: torch.dtype
    block: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        return self.block[1] if self.block else 0


FORMATS = (Format("fp8", FP8), Format("int8", INT8), Format("block", FP8, (128, 128)))


class Weight(NamedTuple):
    """Codes and their scales."""

    codes: torch.Tensor
    scale: torch.Tensor


def new_weight(shape: Shape, form: Format, device: str) -> Weight:
    """Random codes of the full range, scaled so that outputs are about 1."""
    if device == "meta":
        codes = torch.empty(shape.n, shape.k, dtype=form.code, device=device)
    else:
        bits = torch.randint(0, 256, (shape.n, shape.k), dtype=torch.uint8, device=device)
        if form.code is FP8:
            bits[(bits & 127) == 127] = 0  # NaN
        codes = bits.view(form.code)
    size = (-(-shape.n // 128), -(-shape.k // 128)) if form.block else (shape.n,)
    spread = 110.0 if form.code is FP8 else 74.0
    scale = (torch.rand(size, device=device) + 0.5) / (spread * shape.k**0.5)
    return Weight(codes, scale)


class Inputs(NamedTuple):
    """Activations, and everything around a product."""

    x: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor
    stream: torch.Tensor


def new_inputs(shape: Shape, rows: int, device: str) -> Inputs:
    def normal(*size: int) -> torch.Tensor:
        return (
            torch.randn(size, dtype=BF16, device=device)
            if device != "meta"
            else torch.empty(size, dtype=BF16, device=device)
        )

    return Inputs(normal(rows, shape.k), normal(rows, shape.k), normal(shape.k), normal(rows, shape.outputs))


def encoded(shape: Shape, form: Format, inputs: Inputs) -> Codes:
    if shape.norm:
        return quantize(inputs.x, form.code, None, form.group, gain=inputs.gain, eps=EPS, residual=inputs.residual)
    return quantize(inputs.x, form.code, None, form.group)


def launch_of(
    shape: Shape, form: Format, config: GemmConfig, inputs: Inputs, weight: Weight, codes: Codes | None, add: bool
) -> GemmLaunch:
    """The launch of a variant; `codes`: the quantized inputs, for kernels that do not quantize."""
    if config.kernel == "vector":
        gemm = VectorGemm(inputs.x, *weight, eps=EPS, silu=shape.silu, block=form.block)
        if shape.norm:
            gemm.gain, gemm.residual, gemm.stream = inputs.gain, inputs.residual, torch.empty_like(inputs.x)
        return vector_launch(gemm, config)
    assert codes is not None
    stream = inputs.stream if add else None
    coded = CodedGemm(codes, *weight, BF16, silu=shape.silu, stream=stream, block=form.block)
    launches = {"tile": tile_launch, "large": large_launch, "specialized": specialized_launch}
    return launches[config.kernel](coded, config)


def run(
    shape: Shape, form: Format, config: GemmConfig, inputs: Inputs, codes: Codes | None, add: bool, weight: Weight
) -> torch.Tensor:
    if codes is None and config.kernel != "vector":
        codes = encoded(shape, form, inputs)
    launch = launch_of(shape, form, config, inputs, weight, codes, add)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launch.out


def configs(shape: Shape, form: Format, rows: int) -> Iterator[GemmConfig]:
    """The variants to try."""
    silu = shape.silu
    depths = (128,) if form.block else (128, 256)
    deep = shape.k > 8192
    if rows <= 4:
        for block_n in (2, 4) if deep else (4, 8):
            for warps in (8, 16) if deep else (4, 8):
                yield GemmConfig("vector", block_n, warps=warps, early=True)
            yield GemmConfig("vector", block_n, warps=8, programs=2)
            yield GemmConfig("vector", block_n, warps=4, programs=4)
        yield GemmConfig("vector", 2, warps=8, programs=2)
        yield GemmConfig("vector", 4, warps=8, programs=1)
        yield GemmConfig("vector", 4, warps=8, programs=3)
        if not deep:
            yield GemmConfig("vector", 16, warps=4, early=True)
    if rows <= 16:
        for block_k in depths[-1:]:
            stages = (4 if silu else 6) * 128 // block_k + 1
            if silu:
                yield GemmConfig("tile", 64, 16, block_k, 4, stages, tma=True)
                yield GemmConfig("tile", 64, 16, block_k, 4, 2 * stages, tma=True)
                yield GemmConfig("tile", 64, 16, block_k, 4, stages, tma=True, split=2)
                yield GemmConfig("tile", 128, 16, block_k, 8, stages + 1, tma=True)
                yield GemmConfig("tile", 128, 16, block_k, 4, stages, tma=True)
            else:
                for split in sorted({max(1, count * 64 // shape.n) for count in (132, 264, 396)}):
                    yield GemmConfig("tile", 64, 16, block_k, 4, stages, tma=True, split=split)
                    yield GemmConfig("tile", 64, 16, block_k, 4, stages + 2, tma=True, split=split)
                yield GemmConfig("tile", 128, 16, block_k, 8, stages, tma=True, split=max(1, 264 * 128 // shape.n))
                yield GemmConfig("tile", 128, 16, block_k, 4, 3, tma=True, split=max(1, 264 * 128 // shape.n))
    elif rows <= 64:
        for block_k in depths:
            for split in {1} if silu else {max(1, count * 64 // shape.n) for count in (132, 264)}:
                yield GemmConfig("tile", 64, 64, block_k, 4, 512 // block_k, tma=True, split=split)
            yield GemmConfig("tile", 128, 64, block_k, 8, 512 // block_k, tma=True, split=max(1, 132 * 128 // shape.n))
            yield GemmConfig("tile", 64, 64, block_k, 8, 768 // block_k, tma=True, programs=1)
    elif rows <= 256:
        for block_m, block_n, warps in ((128, 64, 4), (128, 128, 8), (256, 64, 8)):
            both = block_n * (2 if silu else 1)
            if block_m * both > 256 * 128 or (form.block and block_m * both > 128 * 128):
                continue
            stages = min(6, 200_000 // (128 * (block_m + both)))
            yield GemmConfig("tile", block_n, block_m, 128, warps, stages, tma=True, programs=1)
            tiles = -(-rows // block_m) * -(-shape.outputs // block_n)
            yield GemmConfig("tile", block_n, block_m, 128, warps, stages, tma=True, split=max(1, 132 // tiles))
    if rows >= 256 and not form.block:
        yield GemmConfig("specialized", 256, 128, 128, 4, 4)
        yield GemmConfig("specialized", 256, 192, 128, 4, 3)
    if rows >= 256:
        half = 2 if silu else 1
        shapes = [(128, 128, 8, 4), (64, 128, 4, 4)]
        if not form.block:
            shapes += [(128, 256, 8, 3), (64, 256, 4, 3)]
            shapes += [] if adds(shape, rows) else [(128, 256, 8, 4)]
        for block_m, block_n, warps, stages in shapes:
            yield GemmConfig("large", block_n // half, block_m, 128, warps, stages, programs=2 if block_m == 64 else 1)


def adds(shape: Shape, rows: int) -> bool:
    """Whether the product is added to the residual stream in its epilogue."""
    return shape.add and rows >= 1024


class Case(NamedTuple):
    """A GEMM to measure."""

    form: Format
    shape: Shape
    rows: int


def compile_case(case: Case, config: GemmConfig) -> None:
    """For another process: compiles without a GPU."""
    form, shape, rows = case
    inputs = new_inputs(shape, rows, "meta")
    run(shape, form, config, inputs, None, adds(shape, rows), new_weight(shape, form, "meta"))


def compile_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Compile in forks, before this process uses the GPU."""
    count = max(1, (os.cpu_count() or 2) - 1)
    forks = [CompilerFork(functools.partial(_compile_each, tasks[i::count])) for i in range(count)]
    for fork in forks:
        fork.wait(time.monotonic() + 150)


def _compile_each(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        with contextlib.suppress(Exception):  # reported when it is measured
            compile_tasks(90, 132, [task])


def reference(case: Case, inputs: Inputs, codes: Codes, weight: Weight, sample: torch.Tensor) -> torch.Tensor:
    """Some rows of the result, in float32 and plain torch."""
    form, shape, _ = case
    assert codes.scale is not None
    values, scale = codes.codes[sample].float(), weight.scale
    matrix = weight.codes.float()
    if form.block:
        values *= codes.scale.T[sample].repeat_interleave(128, 1)[:, : shape.k]
        matrix *= scale.repeat_interleave(128, 0)[: shape.n].repeat_interleave(128, 1)[:, : shape.k]
        out = values @ matrix.T
    else:
        out = (values.double() @ matrix.double().T).float() * codes.scale[sample, None] * scale
    if shape.silu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out


def check(case: Case, config: GemmConfig, inputs: Inputs, weight: Weight) -> float:
    """Relative error against the reference."""
    form, shape, rows = case
    kept = inputs._replace(residual=inputs.residual.clone(), stream=inputs.stream.clone())
    codes = encoded(shape, form, kept)  # modifies the residual
    again = inputs._replace(residual=inputs.residual.clone(), stream=inputs.stream.clone())
    out = run(shape, form, config, again, None, adds(shape, rows), weight)
    sample = torch.unique(torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device=out.device).clamp(0, rows - 1))
    expected = reference(case, inputs, codes, weight, sample)
    if adds(shape, rows):
        expected += inputs.stream[sample].float()
    return float((out[sample].float() - expected).norm() / expected.norm())


class Timer(GraphTimer):
    """With shorter series, over anything."""

    def __init__(self) -> None:
        super().__init__(window_us=200.0, replays=4)

    def each(self, call: Callable[[Any], object], over: Sequence[Any], estimate: float) -> float:
        """Microseconds of a call that takes about `estimate`."""
        return self.time(call, over, estimate)


def _library(codes: Codes, fast: bool, weight: Weight) -> torch.Tensor:
    """torch's GEMM with a scale per row and output: cuBLASLt or CUTLASS."""
    assert codes.scale is not None
    if codes.scale.dim() == 2:  # in blocks
        return torch._scaled_mm(
            codes.codes, weight.codes.t(), codes.scale.t(), weight.scale.t(), out_dtype=BF16, use_fast_accum=False
        )
    return torch._scaled_mm(
        codes.codes, weight.codes.t(), codes.scale[:, None], weight.scale[None, :], out_dtype=BF16, use_fast_accum=fast
    )


def measure(case: Case, timer: Timer, weights: list[Weight], dense: list[torch.Tensor]) -> dict[str, Any]:
    """Microseconds of each variant."""
    form, shape, rows = case
    inputs = new_inputs(shape, rows, "cuda")
    flops = 2.0 * rows * shape.n * shape.k
    estimate = 3.0 + max(shape.n * shape.k / 4e6, flops / 1e9)
    times: dict[str, float] = {}
    alone = rows > TIMED_WITH_QUANTIZATION
    codes = encoded(shape, form, inputs._replace(residual=inputs.residual.clone()))
    for config in dict.fromkeys(configs(shape, form, rows)):
        name = describe(config)
        try:
            error = check(case, config, inputs, weights[0])
            if not error < TOLERANCE[form.name]:
                print(f"WRONG {form.name} {shape.name} {rows} {name}: error {error:.2e}", flush=True)
                continue
            call = functools.partial(run, shape, form, config, inputs, codes if alone else None, adds(shape, rows))
            times[name] = timer.each(call, weights, estimate)
        except Exception as problem:
            print(
                f"FAILED {form.name} {shape.name} {rows} {name}: {type(problem).__name__} {str(problem)[:120]}",
                flush=True,
            )
    if form.code is FP8 and rows >= 64:
        for fast in (True,):
            try:
                sample = torch.tensor([0, rows - 1], device="cuda")
                plain = _library(codes, fast, weights[0])
                if not shape.silu:
                    expected = reference(case, inputs, codes, weights[0], sample)
                    error = float((plain[sample].float() - expected).norm() / expected.norm())
                    assert error < 1e-2, f"error {error:.1e}"
                times[f"scaled_mm{' fast' if fast else ''}"] = timer.each(
                    functools.partial(_library, codes, fast),
                    weights,
                    estimate,
                )
            except Exception as problem:
                print(
                    f"FAILED scaled_mm {shape.name} {rows}: {type(problem).__name__} {str(problem)[:200]}", flush=True
                )
    bf16 = timer.time(functools.partial(F.linear, inputs.x), dense, 2 * estimate) if dense else float("nan")
    return {
        "case": [form.name, shape.name, rows],
        "bf16_us": round(bf16, 1),
        "us": {k: round(v, 2) for k, v in times.items()},
    }


def describe(config: GemmConfig) -> str:
    text = f"{config.kernel} n{config.block_n} w{config.warps}"
    if config.kernel != "vector":
        text += f" m{config.block_m} k{config.block_k} s{config.stages}"
    text += f" split{config.split}" if config.split > 1 else ""
    text += f" p{config.programs}" if config.programs else ""
    return text + (" early" if config.early else "")


def measure_quantize(timer: Timer, rows: int) -> dict[str, float]:
    """Microseconds of the row-wise kernels."""
    found = {}
    for form in FORMATS:
        for name, width, norm in (("norm 4096", 4096, True), ("4096", 4096, False), ("14336", 14336, False)):
            shape = Shape("", 8, width, norm)
            copies = [new_inputs(shape, rows, "cuda") for _ in range(max(2, min(8, (64 << 20) // (rows * width * 2))))]
            found[f"{form.name} {name}"] = round(
                timer.each(functools.partial(encoded, shape, form), copies, 3 + rows * width / 1e6),
                2,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--formats", nargs="*", default=[form.name for form in FORMATS])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0, help="stop measuring after so many")
    options = parser.parse_args()
    row_counts = options.rows or ((1, 8, 256, 16384) if options.quick else (1, 2, 4, 8, 64, 256, 512, 2048, 16384))
    forms = [form for form in FORMATS if form.name in options.formats]
    started = time.monotonic()
    cases = [Case(form, shape, rows) for rows in row_counts for shape in SHAPES for form in forms]
    # No kernel depends on the number of rows past 1024.
    compiled = [case for case in cases if case.rows <= 1024 or case.rows == max(row_counts)]
    tasks = [
        functools.partial(compile_case, case, config)
        for case in compiled
        for config in configs(case.shape, case.form, case.rows)
    ]
    compile_all(tasks)
    print(f"compiled {len(tasks)} variants in {time.monotonic() - started:.0f} s", flush=True)
    raise_clocks()
    timer = Timer()
    results = []
    by_shape: dict[str, tuple[list[Weight], list[torch.Tensor]]] = {}

    def weights_of(form: Format, shape: Shape) -> tuple[list[Weight], list[torch.Tensor]]:
        key = f"{form.name} {shape.name}"
        if key not in by_shape:
            copies = -(-COLD_BYTES // (shape.n * shape.k))
            dense = [
                torch.randn(shape.n, shape.k, dtype=BF16, device="cuda") * shape.k**-0.5 for _ in range(-(-copies // 2))
            ]
            by_shape[key] = (
                [new_weight(shape, form, "cuda") for _ in range(copies)],
                dense if form.name == "fp8" else [],
            )
        return by_shape[key]

    for case in cases:
        if time.monotonic() - started > options.seconds:
            print("out of time", flush=True)
            break
        results.append(measure(case, timer, *weights_of(case.form, case.shape)))
    quantized = {rows: measure_quantize(timer, rows) for rows in row_counts}
    if options.out:
        options.out.write_text(json.dumps({"gemms": results, "quantize": quantized}))
    print_tables(results, quantized)
    print(f"{time.monotonic() - started:.0f} s")


def print_tables(results: list[dict[str, Any]], quantized: dict[int, dict[str, float]]) -> None:
    shapes = {shape.name: shape for shape in SHAPES}
    totals: dict[tuple[str, int], float] = {}
    for result in results:
        form, name, rows = result["case"]
        shape, ranked = shapes[name], sorted(result["us"].items(), key=lambda pair: pair[1])
        if not ranked:
            continue
        us = ranked[0][1]
        rate = (
            f"{shape.n * shape.k / us / 1e6:.2f} TB/s"
            if rows <= 64
            else f"{2 * rows * shape.n * shape.k / us / 1e6:.0f} TFLOP/s"
        )
        rest = "; ".join(f"{variant} {time}" for variant, time in ranked[:4])
        kinds = {variant.split()[0] for variant, _ in ranked[:4]}
        every = ("vector", "tile", "large", "specialized", "scaled_mm")
        rest += "".join(
            f"; {variant} {time}" for kind in every if kind not in kinds
            for variant, time in [next((pair for pair in ranked if pair[0].startswith(kind)), ("", 0))] if variant
        )  # fmt: skip
        print(f"{form:5} {name:7} {rows:5}: {us:8.1f} us {rate:>12} (bf16 {result['bf16_us']}): {rest}")
        totals[form, rows] = totals.get((form, rows), 0.0) + us
    for rows, each in quantized.items():
        print(f"quantize {rows}: {each}")
    for (form, rows), us in totals.items():
        print(f"{form} {rows} rows: {us:.0f} us a layer, {us * LAYERS / 1000:.2f} ms a step")


if __name__ == "__main__":
    main()
