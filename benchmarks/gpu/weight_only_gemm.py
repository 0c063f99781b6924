"""Weight-only GEMMs on a GPU: every candidate checked, then timed against bfloat16 weights, for Llama-3.1-8B's shapes.

    python -m benchmarks.gpu.weight_only_gemm            # INT4, groups of 128, zeros (AWQ)
    python -m benchmarks.gpu.weight_only_gemm --quick    # fewer row counts
    python -m benchmarks.gpu.weight_only_gemm --format mxfp4

A GEMM is timed as a step runs it: with the norm before it and the gate in it, in a CUDA graph, weights not in L2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.triton.elementwise import add_rms_norm, silu_mul
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.quantized.dequantize import dequantize, scratch
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, as_words
from quire.kernels.triton.quantized.weight_only import compile_gemm, run
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer, raise_clocks
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight

EPS = 1e-5
MEMORY = 4300.0
"""Bytes per nanosecond that a good kernel reads on an H200."""
TOLERANCE = 8e-3
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
QUICK_ROWS = (1, 8, 64, 256, 8192)
DTYPE = torch.bfloat16


MULTIPROCESSORS, SHARED, WORDS = 132, 224 << 10, 32
_SMALL = ((16, 8, 4, 0), (16, 4, 8, 0), (16, 4, 4, 0), (16, 16, 2, 0), (16, 8, 4, 2))
FEW = {
    "qkv": _SMALL,
    "o": _SMALL,
    "gate_up": (
        (16, 4, 4, 0), (16, 8, 4, 2), (16, 8, 4, 3), (16, 4, 4, 4), (16, 4, 6, 4), (16, 4, 8, 3), (32, 4, 4, 0),
        (32, 4, 4, 2), (32, 8, 4, 1),
    ),
    "down": ((16, 8, 4, 0), (16, 8, 6, 0), (16, 16, 4, 0), (16, 16, 6, 0), (32, 16, 4, 0), (32, 8, 6, 0)),
}  # fmt: skip
"""(outputs, warps, loads in flight, persistent programs a multiprocessor) of `few`."""
TILES = {
    16: ((64, 16, 4, 8), (128, 16, 4, 8), (128, 16, 8, 8)),
    32: ((64, 32, 4, 8), (128, 32, 4, 6), (128, 32, 8, 6)),
    64: ((64, 64, 4, 5), (128, 64, 8, 4), (128, 64, 8, 8)),
    128: ((64, 128, 4, 3), (64, 128, 4, 6), (128, 128, 8, 5)),
    256: ((128, 256, 8, 3), (64, 256, 4, 3), (64, 128, 4, 3), (128, 128, 8, 5)),
    512: ((128, 256, 8, 3),),
}
"""(outputs, rows, warps, stages) by rows."""


class Shape(NamedTuple):
    """A GEMM of a layer."""

    name: str
    n: int
    k: int
    norm: bool
    silu: bool


SHAPES = (
    Shape("qkv", 6144, 4096, True, False),
    Shape("o", 4096, 4096, False, False),
    Shape("gate_up", 28672, 4096, True, True),
    Shape("down", 4096, 14336, False, False),
)
LAYERS = 32


class Variant(NamedTuple):
    """A kernel, and whether the gate is fused into it."""

    config: WeightOnlyConfig
    silu: bool = False

    def __str__(self) -> str:
        config = self.config
        shown = [
            f"{field.name}{getattr(config, field.name)}"
            for field in fields(config)
            if field.name != "kernel" and getattr(config, field.name) != field.default
        ]
        return " ".join([config.kernel, *shown, *["silu"] * self.silu])


def candidates(shape: Shape, rows: int) -> list[Variant]:
    """What is timed."""
    found: list[Variant] = []
    if rows <= 16:
        block_m = 8 if rows <= 8 else 16
        for block_n, warps, depth, programs in FEW[shape.name]:
            config = WeightOnlyConfig("few", block_n, block_m, warps, depth, programs=programs)
            found.append(Variant(config, shape.silu))
        if rows == 1:
            config = found[0].config
            found.append(Variant(replace(config, early=True), shape.silu))
    if rows >= 8:
        for block_n, block_m, warps, stages in TILES[min(max(rows, 16), 512)]:
            for silu in (shape.silu,):
                tiles = -(-shape.n // block_n) * -(-rows // block_m)
                base = WeightOnlyConfig("tile", block_n, block_m, warps, stages)
                stage = 2 * WORDS * (4 * block_m + block_n)
                resident = min(SHARED // (stage * stages), 3)
                if 2 * tiles <= resident * MULTIPROCESSORS:
                    found.append(Variant(replace(base, split=resident * MULTIPROCESSORS // tiles), silu=silu))
                    if resident > 1 and 2 * tiles <= MULTIPROCESSORS:
                        found.append(Variant(replace(base, split=MULTIPROCESSORS // tiles), silu=silu))
                else:
                    found.append(Variant(base, silu=silu))
                    found.append(Variant(replace(base, programs=resident), silu=silu))
    if rows >= 256:
        found.append(Variant(WeightOnlyConfig("dequantize")))
    return found


def random_weight(shape: Shape, name: str, device: str) -> GroupedWeight | Fp4Weight:
    """Random codes of the full range."""

    def allocate(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if device == "meta":
            return torch.empty(size, dtype=dtype, device=device)
        if dtype == torch.uint8:
            return torch.randint(0, 256, size, dtype=dtype, device=device)
        return (torch.rand(size, device=device) * 0.004 + 0.001).to(dtype)

    if name == "mxfp4":
        weight4 = Fp4Weight.allocate(shape[1:3], DTYPE, allocate)
        if device != "meta":
            weight4.scale.fill_(120)
        return weight4
    if name == "nvfp4":
        return Fp4Weight.allocate(shape[1:3], DTYPE, allocate, nvidia=True)
    bits, group = {"int4": (4, 128), "int4g32": (4, 32), "int8": (8, 128)}[name]
    weight = GroupedWeight.allocate(shape[1:3], DTYPE, allocate, bits, group, zeros=True)
    if device != "meta" and bits == 4:
        assert weight.zero is not None
        weight.zero.remainder_(16)
    return weight


class Inputs(NamedTuple):
    """Activations of a GEMM."""

    x: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor


def new_inputs(shape: Shape, rows: int, device: str) -> Inputs:
    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=DTYPE, device=device) if device == "meta" else torch.randn(
            size, dtype=DTYPE, device=device)  # fmt: skip

    return Inputs(normal(rows, shape.k), normal(rows, shape.k), normal(shape.k))


def gemm_of(variant: Variant, x: torch.Tensor, weight: object) -> WeightOnlyGemm:
    words = as_words(weight)  # type: ignore[arg-type]
    assert words is not None
    return WeightOnlyGemm(x, words, silu=variant.silu)


def compute(
    ops: TritonOps, shape: Shape, variant: Variant, inputs: Inputs, weight: GroupedWeight | Fp4Weight
) -> torch.Tensor:
    """The GEMM, with the norm before and the gate after it."""
    x = inputs.x
    if shape.norm:
        x, _ = add_rms_norm(x, inputs.residual, inputs.gain, EPS)
    if variant.config.kernel == "dequantize":
        words = as_words(weight)
        assert words is not None
        matrix = dequantize(words, scratch(words))
        return ops.gated_linear(x, matrix) if shape.silu else ops.linear(x, matrix)
    out = run(gemm_of(variant, x, weight), variant.config)
    return silu_mul(out) if shape.silu and not variant.silu else out


def reference(shape: Shape, inputs: Inputs, weight: GroupedWeight | Fp4Weight) -> torch.Tensor:
    """In float32, over dequantized weights."""
    x = inputs.x.float()
    if shape.norm:
        x = F.rms_norm((inputs.x + inputs.residual).float(), (shape.k,), inputs.gain.float(), EPS)
    out = F.linear(x, weight.dequantize().float())
    return silu_of(out) if shape.silu else out


def silu_of(out: torch.Tensor) -> torch.Tensor:
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


def compile_one(job: tuple[Shape, int, Variant, str]) -> str | None:
    shape, rows, variant, name = job
    inputs = new_inputs(shape, rows, "meta")
    try:
        gemm = gemm_of(variant, inputs.x, random_weight(shape, name, "meta"))
        compile_gemm(gemm, variant.config)
    except Exception as error:  # the others may still be timed
        return f"{shape.name} {rows} {variant}: {type(error).__name__} {str(error)[:200]}"
    return None


def bf16_time(ops: TritonOps, timer: GraphTimer, shape: Shape, inputs: Inputs, weights: list[torch.Tensor]) -> float:
    """The same with bfloat16 weights, as `TritonOps` runs it."""

    def once(weight: torch.Tensor) -> object:
        if shape.norm:
            return ops.norm_linear(inputs.x, inputs.residual, inputs.gain, EPS, weight, None, shape.silu)
        return ops.linear(inputs.x, weight)

    once(weights[0])
    return timer.time(once, weights, 10.0 + 2 * len(inputs.x) * shape.n * shape.k / 700e6)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer row counts")
    parser.add_argument("--rows", type=int, nargs="*", help="row counts")
    parser.add_argument("--format", default="int4", choices=["int4", "int4g32", "int8", "mxfp4", "nvfp4"])
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--all", action="store_true", help="print every candidate's time")
    options = parser.parse_args()
    row_counts = options.rows or (QUICK_ROWS if options.quick else ROWS)
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    began = time.perf_counter()
    jobs = [
        (shape, rows, variant, options.format)
        for shape in shapes
        for rows in row_counts
        for variant in candidates(shape, rows)
        if variant.config.kernel != "dequantize"
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for failure in filter(None, pool.map(compile_one, jobs, chunksize=4)):
            print("not compiled:", failure)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)

    ops, timer = TritonOps(), GraphTimer(replays=5)
    raise_clocks()
    best: dict[tuple[str, int], tuple[float, float, str]] = {}
    wrong = 0
    for shape in shapes:
        size = random_weight(shape, options.format, "meta").nbytes
        copies = -(-COLD_BYTES // size)
        weights = [random_weight(shape, options.format, "cuda") for _ in range(copies)]
        plain = [weight.dequantize() for weight in weights[: -(-COLD_BYTES // (2 * shape.n * shape.k))]]
        for rows in row_counts:
            inputs = new_inputs(shape, rows, "cuda")
            few = Inputs(inputs.x[:256], inputs.residual[:256].clone(), inputs.gain)
            expected = reference(shape, few, weights[-1])
            times: list[tuple[float, str]] = []
            for variant in candidates(shape, rows):
                checked = Inputs(few.x, few.residual.clone(), few.gain)
                try:
                    torch.full_like(expected, float("nan"), dtype=DTYPE)  # what the result's memory held before
                    out = compute(ops, shape, variant, checked, weights[-1])
                    error = ((out.float() - expected).norm() / expected.norm()).item()
                    if not error < TOLERANCE:
                        wrong += 1
                        print(f"WRONG {shape.name} {rows} {variant}: error {error:.1e}")
                        continue
                    us = timer.time(
                        lambda weight: compute(ops, shape, variant, inputs, weight),  # type: ignore[arg-type]  # noqa: B023
                        weights,  # type: ignore[arg-type]
                        3.0 + max(size / 4e6, 2 * rows * shape.n * shape.k / 600e6),
                    )
                except Exception as failure:  # the others may still be timed
                    print(f"FAILED {shape.name} {rows} {variant}: {type(failure).__name__} {str(failure)[:300]}")
                    continue
                times.append((us, str(variant)))
            # After the others: the clock falls in long products, and their bars are relative to this.
            bf16 = bf16_time(ops, timer, shape, inputs, plain)
            times.sort()
            if not times:
                continue
            if options.all or rows <= 512:
                print(f"{shape.name} {rows}: " + "; ".join(f"{us:.1f} {name}" for us, name in times), flush=True)
            best[shape.name, rows] = (times[0][0], bf16, times[0][1])
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{wrong} wrong. Best, us: share of memory speed, bfloat16's us, how much faster")
    for (name, rows), (us, bf16, text) in best.items():
        shape = next(shape for shape in shapes if shape.name == name)
        share = random_weight(shape, options.format, "meta").nbytes / us / MEMORY / 1000
        print(f"{name:8} {rows:5} {us:8.1f} {share:5.0%} {bf16:8.1f} {bf16 / us:5.2f}x  {text}")
    print("GEMMs of all layers, ms: rows, these, bfloat16")
    for rows in row_counts:
        if all((shape.name, rows) in best for shape in shapes):
            ours, theirs = (sum(best[shape.name, rows][i] for shape in shapes) * LAYERS / 1000 for i in (0, 1))
            print(f"{rows:5} {ours:8.3f} {theirs:8.3f} {theirs / ours:5.2f}x")


if __name__ == "__main__":
    main()
