"""Products with GGUF's blocks on a GPU: every tile shape against the dequantized matrix, timed as a step runs them.

    python -m benchmarks.gpu.gguf_gemm [--quick]

Checks each kernel against float32, times each in CUDA graphs over weights that are not in L2, and prints for the shapes
of an 8B model the best tile shape by number of rows, beside cuBLAS with 16-bit weights and beside dequantizing first.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F

from quire.kernels.triton.quantized import superblock
from quire.kernels.triton.quantized.superblock import (
    SuperblockConfig,
    _dequantized_linear,
    _Launch,
    superblock_linear,
    superblock_values,
)
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer, raise_clocks
from quire.kernels.weights.superblock import KINDS, SuperblockWeight

DTYPE = torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
TOLERANCE = 4e-3
"""Of results rounded once to bfloat16, against float32."""


def config(block_n: int, block_m: int, slices: int, warps: int = 4, stages: int = 2) -> SuperblockConfig:
    return SuperblockConfig(block_n, block_m, slices, warps, stages)


def configs(rows: int) -> list[SuperblockConfig]:
    """The tile shapes to try."""
    m = max(8, rows)
    if rows <= 16:
        return [
            config(16, m, 4, 4, 2), config(16, m, 4, 4, 3), config(16, m, 4, 4, 4), config(16, m, 8, 8, 2),
            config(16, m, 8, 8, 3), config(16, m, 2, 2, 3), config(16, m, 2, 2, 4), config(64, m, 1, 4, 3),
            config(128, m, 1, 4, 3),
        ]  # fmt: skip
    if rows <= 32:
        return [config(16, m, 4, 4, 2), config(16, m, 8, 8, 2), config(64, m, 1, 4, 2), config(64, m, 1, 4, 3)]
    return [config(16, 32, 4, 4, 2), config(64, 64, 1, 4, 2), config(64, 64, 1, 4, 3), config(128, 64, 1, 8, 2)]


def random_weight(name: str, outputs: int, width: int, device: str = "cuda") -> SuperblockWeight:
    """Codes and scales of the full range; values about width^-1/2."""
    kind, planes = KINDS[name], {}
    largest = (1 << kind.low.bits + (kind.high.bits if kind.high else 0)) * (32 if kind.scales != "none" else 1)
    for plane, (dtype, _) in kind.held.items():
        shape = kind.shape_of(plane, (outputs, width))
        if dtype is torch.float16:
            planes[plane] = (torch.rand(shape, device=device) * (2 / largest * width**-0.5)).half()
        elif dtype is torch.int8:
            low = 0 if kind.minimums != "none" else -64
            planes[plane] = torch.randint(low, 64, shape, dtype=dtype, device=device)
        else:
            planes[plane] = torch.randint(0, 256, shape, dtype=dtype, device=device)
    return SuperblockWeight(kind, planes, DTYPE)


def compile_one(task: tuple[str, int, SuperblockConfig]) -> str | None:
    """Compile a kernel, into Triton's cache on disk."""
    name, rows, chosen = task
    weight = random_weight(name, 4096, 4096, "meta")
    try:
        _Launch(torch.empty(rows, 4096, dtype=DTYPE, device="meta"), weight, None, chosen).compile()
    except Exception as error:
        return f"{task}: {str(error)[:200]}"
    return None


class Bench:
    """Times products with weights of one encoding and shape."""

    def __init__(self) -> None:
        self.timer = GraphTimer()
        self.wrong: list[str] = []

    def packed(self, weights: list[SuperblockWeight], rows: int, chosen: SuperblockConfig | None) -> float:
        """Microseconds; `chosen` None: dequantized first."""
        x = torch.randn(rows, weights[0].shape[1], dtype=DTYPE, device="cuda")

        def run(weight: SuperblockWeight) -> torch.Tensor:
            return (
                _dequantized_linear(x, weight, None) if chosen is None else superblock_linear(x, weight, None, chosen)
            )

        try:
            self.check(run(weights[-1]), x, weights[-1], chosen)
            us = self.timer.time(run, weights, 3 + weights[0].nbytes / 3e6)  # type: ignore[arg-type]
        except Exception as error:
            self.wrong.append(f"{weights[0].kind.name} {chosen}: {type(error).__name__} {str(error)[:150]}")
            return math.inf
        return us

    def check(
        self, out: torch.Tensor, x: torch.Tensor, weight: SuperblockWeight, chosen: SuperblockConfig | None
    ) -> None:
        outputs = 4096  # the others are computed alike
        exact = SuperblockWeight(weight.kind, weight[:outputs].tensors, torch.float32).dequantize()
        expected = F.linear(x.float(), exact)
        error = ((out[:, :outputs].float() - expected).norm() / expected.norm()).item()
        if not error < TOLERANCE:
            self.wrong.append(f"{weight.kind.name} {tuple(weight.shape)} {len(x)} rows {chosen}: error {error:.1e}")

    def dense(self, shape: tuple[int, int], rows: int) -> float:
        x = torch.randn(rows, shape[1], dtype=DTYPE, device="cuda")
        copies = -(-COLD_BYTES // (shape[0] * shape[1] * 2))
        weights = [torch.randn(shape, dtype=DTYPE, device="cuda") * shape[1] ** -0.5 for _ in range(copies)]
        return self.timer.time(lambda weight: F.linear(x, weight), weights, 3 + weights[0].nbytes / 4e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two encodings, two row counts")
    parser.add_argument("--kinds", nargs="*", default=["Q4_K", "Q6_K", "Q8_0", "Q4_1"])
    options = parser.parse_args()
    kinds = options.kinds[:2] if options.quick else options.kinds
    counts = (1, 16) if options.quick else (1, 8, 16, 32, 64)
    many = (128,) if options.quick else (64, 128, 256, 2048)

    began = time.perf_counter()
    tasks = list(dict.fromkeys((name, rows, each) for name in kinds for rows in counts for each in configs(rows)))
    unique = list({(name, each): (name, rows, each) for name, rows, each in tasks}.values())
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = [error for error in pool.map(compile_one, unique, chunksize=2) if error]
    print(f"{len(unique)} kernels compiled in {time.perf_counter() - began:.0f} s", *failed, sep="\n", flush=True)

    bench = Bench()
    raise_clocks()
    for name in kinds:  # values bit by bit
        weight = random_weight(name, 512, 4096)
        if not torch.equal(superblock_values(weight, DTYPE), weight.dequantize()):
            bench.wrong.append(f"{name}: dequantized values differ")
    dense = {(key, rows): bench.dense(shape, rows) for key, shape in SHAPES.items() for rows in {*counts, *many}}
    table: list[str] = []
    for name in kinds:
        found: dict[tuple[str, int], dict[SuperblockConfig | None, float]] = {}
        size = 0
        for key, shape in SHAPES.items():
            one = random_weight(name, *shape)
            size += one.nbytes
            weights = [one, *(random_weight(name, *shape) for _ in range(COLD_BYTES // one.nbytes))]
            for rows in counts:
                found[key, rows] = {each: bench.packed(weights, rows, each) for each in configs(rows)}
            for rows in many:
                found.setdefault((key, rows), {})[None] = bench.packed(weights, rows, None)
        for rows in sorted({*counts, *many}):
            total = {each: sum(found[key, rows].get(each, math.inf) for key in SHAPES) for each in found["o", rows]}
            best = sorted(total, key=lambda each: total[each])
            print(f"\n{name}, {rows} rows: us of qkv, o, gate_up, down; all; GB/s; cuBLAS of 16 bits")
            bf16 = sum(dense[key, rows] for key in SHAPES)
            for each in best:
                times = " ".join(f"{found[key, rows].get(each, math.inf):7.1f}" for key in SHAPES)
                shown = "dequantized" if each is None else (
                    f"n{each.block_n} m{each.block_m} slices {each.slices} warps {each.warps} stages {each.stages}"
                )  # fmt: skip
                print(f"{times} {total[each]:8.1f} {size / total[each] / 1000:6.0f} {bf16:8.1f}  {shown}")
            apart = sum(min(found[key, rows].values()) for key in SHAPES)
            table.append(
                f"{name:5} {rows:5} {total[best[0]]:8.1f} {apart:8.1f} {bf16:8.1f} {bf16 / apart:5.2f}x "
                f"{size / apart / 1000:6.0f} {apart * LAYERS / 1000:7.2f}  {best[0]}"
            )
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    # How much to dequantize at a time.
    if not options.quick:
        weights = [random_weight("Q4_K", *SHAPES["gate_up"]) for _ in range(2)]
        for share in (4, 8, 16, 32, 128):
            superblock.SCRATCH_VALUES = share << 20
            us = [bench.packed(weights, rows, None) for rows in (256, 2048)]
            print(f"Q4_K gate_up, {share} M values at a time: {us[0]:.1f} us (256 rows), {us[1]:.1f} us (2048 rows)")
        tokens = torch.randint(0, 28672, (64,), device="cuda")
        us = bench.timer.time(lambda weight: superblock_values(weight, DTYPE, tokens), weights, 5)  # type: ignore[arg-type]
        print(f"64 rows of an embedding: {us:.1f} us; all: ", end="")
        us = bench.timer.time(lambda weight: superblock_values(weight, DTYPE), weights, 100)  # type: ignore[arg-type]
        print(f"{us:.1f} us, {28672 * 4096 * 2 / us / 1000:.0f} GB/s written")
    print(f"\n{len(bench.wrong)} wrong", *bench.wrong[:20], sep="\n")
    print("\nkind   rows  best us  by shape  cuBLAS       x    GB/s  ms of 32 layers")
    print(*table, sep="\n")


if __name__ == "__main__":
    main()
