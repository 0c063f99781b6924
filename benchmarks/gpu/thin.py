"""Thin products on a GPU: every candidate checked, then measured against cuBLAS for the shapes of three models.

    python -m benchmarks.gpu.thin --out tables

writes `tables/<card>.json`, the table that `quire/kernels/triton/tables` ships. What a product is measured as, and
against what, is in `quire/kernels/triton/tuning.py` and `thin_timing.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.triton.thin_candidates import Shape
from quire.kernels.triton.thin_timing import GraphTimer, Inputs, compile_all, raise_clocks, run
from quire.kernels.triton.tuning import (
    MEASURED_BUCKETS,
    Entry,
    Plan,
    Tuner,
    current_gpu,
    describe,
    key_of,
    shipped_table,
    tuning_jobs,
    with_parts,
    write_table,
)

TOLERANCE = 8e-3
"""Of bfloat16 results, rounded once or (their norm) twice, against float32."""


class Model(NamedTuple):
    """The products of a step."""

    layers: int
    each: tuple[Shape, ...]
    head: Shape


MODELS = {
    "Qwen3-0.6B": Model(
        28,
        (
            Shape("norm_linear", 4096, 1024),
            Shape("linear", 1024, 2048),
            Shape("norm_silu_linear", 6144, 1024),
            Shape("linear", 1024, 3072),
        ),
        Shape("linear", 151936, 1024),
    ),
    "Llama-3.1-8B": Model(
        32,
        (
            Shape("norm_linear", 6144, 4096),
            Shape("linear", 4096, 4096),
            Shape("norm_silu_linear", 28672, 4096),
            Shape("linear", 4096, 14336),
        ),
        Shape("linear", 128256, 4096),
    ),
    "Qwen3-30B-A3B (attention)": Model(
        48, (Shape("norm_linear", 5120, 2048), Shape("linear", 2048, 4096)), Shape("linear", 151936, 2048)
    ),
}


class CheckedTimer(GraphTimer):
    """Compares what it times with float32, the first time it sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.wrong: list[str] = []

    def __call__(self, shape: Shape, rows: int, dtype: torch.dtype, plan: Plan) -> float:
        us = super().__call__(shape, rows, dtype, plan)
        if plan.config is None or us == float("inf"):
            return us
        # A row less than the bucket holds, where that is no other kernel: what lies past the end must not matter.
        inputs = self._inputs(shape, rows - 1 if rows > 2 else rows, dtype)
        expected = reference(shape, inputs, inputs.weights[-1])
        poison(expected, dtype)
        out = run(shape, plan, inputs, inputs.weights[-1])
        error = ((out.float() - expected).norm() / expected.norm()).item()
        self.checked += 1
        if not error < TOLERANCE:
            self.wrong.append(f"{shape} {rows} rows, {plan.config}: error {error:.1e}")
            return float("inf")
        return us


def reference(shape: Shape, inputs: Inputs, weight: torch.Tensor) -> torch.Tensor:
    """The product in float32; the residual is added in the dtype, as it is stored."""
    x = inputs.x.float()
    if shape.norm:
        x = (inputs.x + inputs.residual).float()
        x = F.rms_norm(x, (shape.k,), inputs.gain.float(), 1e-5)
    # In pieces: a head in float32 takes gigabytes.
    out = torch.cat([F.linear(x, part.float()) for part in weight.split(16384)], dim=1)
    if shape.silu:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out


def poison(like: torch.Tensor, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the allocator hands out next for a result of this size."""
    torch.full_like(like, float("nan"), dtype=dtype)


def print_shape(shape: Shape, buckets: Iterable[int], found: dict[str, Entry]) -> None:
    print(f"\n{shape.kind} {shape.n} x {shape.k}: rows, us, us of cuBLAS, GB/s")
    for rows in buckets:
        entry = found[key_of(shape, rows, torch.bfloat16)]
        us, cublas = entry["us"], entry["cublas_us"]
        rate = shape.n * shape.k * 2 / us / 1000
        print(f"{rows:5} {us:8.2f} {cublas:8.2f} cuBLAS {cublas / us:5.2f}x {rate:6.0f}  {describe(entry)}")


def print_model(name: str, model: Model, buckets: Iterable[int], found: dict[str, Entry]) -> None:
    print(f"\n{name}: products of a step, ms")
    for rows in buckets:
        totals = []
        for column in ("us", "cublas_us"):
            layer = sum(found[key_of(shape, rows, torch.bfloat16)][column] for shape in model.each)
            head = found[key_of(model.head, rows, torch.bfloat16)][column]
            totals.append((model.layers * layer + head) / 1000)
        ours, cublas = totals
        print(f"{rows:5} {ours:8.3f} {cublas:8.3f} cuBLAS {cublas / ours:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--buckets", nargs="*", type=int, default=list(MEASURED_BUCKETS))
    parser.add_argument("--processes", type=int, help="compilers at a time (default: one a core)")
    parser.add_argument("--unchecked", action="store_true", help="measure only")
    options = parser.parse_args()

    models = [MODELS[name] for name in options.models]
    shapes = list(
        dict.fromkeys(part for model in models for shape in (*model.each, model.head) for part in with_parts(shape))
    )
    gpu, dtype = current_gpu(), torch.bfloat16
    began = time.perf_counter()
    jobs = tuning_jobs(shapes, dtype, options.buckets, gpu)
    compile_all(jobs, options.processes)
    print(f"{gpu.name}: {len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    timer = GraphTimer() if options.unchecked else CheckedTimer()
    raise_clocks()
    found = Tuner(gpu, None, None).tune(shapes, dtype, options.buckets, timer)
    for shape in dict.fromkeys(shape for model in models for shape in (*model.each, model.head)):
        print_shape(shape, options.buckets, found)
    for name in options.models:
        print_model(name, MODELS[name], options.buckets, found)
    print(f"\nmeasured in {time.perf_counter() - began:.0f} s")
    if isinstance(timer, CheckedTimer):
        print(f"{timer.checked} results checked, {len(timer.wrong)} wrong")
        print(*timer.wrong, sep="\n")
    if options.out is not None:
        path = options.out / shipped_table(gpu).name
        write_table(path, found)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
