"""Skinny GEMMs on a GPU: every candidate checked, then measured against cuBLAS, for the shapes of many models.

    python -m benchmarks.gpu.skinny_gemm --out tables                      # all of them
    python -m benchmarks.gpu.skinny_gemm --out tables --missing            # those not in the table, added to it
    python -m benchmarks.gpu.skinny_gemm --models Qwen3-4B --times t.json  # every candidate's time

writes `tables/<card>.json`, the table that `quire/kernels/triton/tables` ships. How a GEMM is measured, and against
what, is in `quire/kernels/triton/skinny_gemm/tuning.py` and `timing.py`. Beside the fastest kernel it prints what a GPU
or model without a table would use: `candidates.guess`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.timing import GemmInputs, GraphTimer, compile_all, raise_clocks, run
from quire.kernels.triton.skinny_gemm.tuning import (
    MEASURED_BUCKETS,
    GemmTimer,
    GemmTuner,
    GemmVariant,
    candidate_kernels,
    describe,
    entry_of,
    key_of,
    with_less_fused,
)
from quire.kernels.triton.tuning_table import Entry, TuningTables, current_gpu, read_table, shipped_path, write_table

DTYPE = torch.bfloat16
TOLERANCE = 8e-3
"""Relative error of bfloat16 results, rounded once (with a norm twice), against float32."""


class Model(NamedTuple):
    """The GEMMs of a step."""

    layers: int
    each: tuple[GemmShape, ...]
    head: GemmShape


def dense(layers: int, hidden: int, heads: int, kv_heads: int, head: int, mlp: int, vocab: int) -> Model:
    """A model with the Llama architecture."""
    each = (
        GemmShape("norm_linear", (heads + 2 * kv_heads) * head, hidden),
        GemmShape("linear", hidden, heads * head),
        GemmShape("norm_silu_linear", 2 * mlp, hidden),
        GemmShape("linear", hidden, mlp),
    )
    return Model(layers, each, GemmShape("linear", vocab, hidden))


MODELS = {
    "Qwen3-0.6B": dense(28, 1024, 16, 8, 128, 3072, 151936),
    "Llama-3.1-8B": dense(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3-30B-A3B (attention)": Model(
        48, (GemmShape("norm_linear", 5120, 2048), GemmShape("linear", 2048, 4096)), GemmShape("linear", 151936, 2048)
    ),
    "Qwen3-4B": dense(36, 2560, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": dense(36, 4096, 32, 8, 128, 12288, 151936),
    "Llama-3.2-1B": dense(16, 2048, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": dense(28, 3072, 24, 8, 128, 8192, 128256),
    "Qwen2.5-7B": dense(28, 3584, 28, 4, 128, 18944, 152064),
    "Mistral-7B": dense(32, 4096, 32, 8, 128, 14336, 32768),
    "Qwen3-1.7B": dense(28, 2048, 16, 8, 128, 6144, 151936),
    "Qwen3-14B": dense(40, 5120, 40, 8, 128, 17408, 151936),
    "Qwen2.5-1.5B": dense(28, 1536, 12, 2, 128, 8960, 151936),
    "SmolLM2-135M": dense(30, 576, 9, 3, 64, 1536, 49152),
    "Qwen2.5-0.5B": dense(24, 896, 14, 2, 64, 4864, 151936),
    "Qwen2.5-3B": dense(36, 2048, 16, 2, 128, 11008, 151936),
    "Qwen3-32B": dense(64, 5120, 64, 8, 128, 25600, 151936),
    "Llama-3.1-8B's EAGLE-3 head": Model(
        1, (GemmShape("linear", 4096, 3 * 4096), GemmShape("linear", 6144, 2 * 4096)), GemmShape("linear", 32000, 4096)
    ),
}


class Case(NamedTuple):
    """One measurement."""

    shape: GemmShape
    rows: int
    variant: GemmVariant


class CachingTimer(GraphTimer):
    """Measures nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[Case, float] = {}

    def __call__(self, shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        case = Case(shape, rows, variant)
        if case not in self.times:
            self.times[case] = self.measure(shape, rows, dtype, variant)
        return self.times[case]

    def measure(self, shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        return super().__call__(shape, rows, dtype, variant)


class CheckedTimer(CachingTimer):
    """Also compares what it times with float32."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.wrong: list[str] = []

    def measure(self, shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        us = super().measure(shape, rows, dtype, variant)
        if variant.config is None or us == float("inf"):
            return us
        # One row less than the bucket, where the kernel is the same: memory past the end must not matter.
        inputs = self._inputs(shape, rows - 1 if rows > 2 else rows, dtype)
        expected = reference(shape, inputs, inputs.weights[-1])
        poison(expected, dtype)
        out = run(shape, variant, inputs, inputs.weights[-1])
        error = ((out.float() - expected).norm() / expected.norm()).item()
        self.checked += 1
        if not error < TOLERANCE:
            self.wrong.append(f"{shape} {rows} rows, {variant.config}: error {error:.1e}")
            return float("inf")
        return us


def reference(shape: GemmShape, inputs: GemmInputs, weight: torch.Tensor) -> torch.Tensor:
    """The GEMM in float32; the residual is added in the dtype, as it is stored."""
    x = inputs.x.float()
    if shape.norm:
        x = (inputs.x + inputs.residual).float()
        x = F.rms_norm(x, (shape.k,), inputs.gain.float(), 1e-5)
    # In parts: an LM head in float32 takes gigabytes.
    out = torch.cat([F.linear(x, part.float()) for part in weight.split(16384)], dim=1)
    if shape.silu:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out


def poison(like: torch.Tensor, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the allocator hands out next for a result of this size."""
    torch.full_like(like, float("nan"), dtype=dtype)


def guessed(shape: GemmShape, rows: int) -> GemmVariant:
    """What `TritonOps` runs for a GEMM that is in no table."""
    tuner = GemmTuner(TuningTables(current_gpu(), None, None))
    kinds = {"norm_silu_linear": ("norm_silu_linear", "silu_linear"), "norm_linear": ("norm_linear",)}
    for kind in (*kinds.get(shape.kind, ()), "linear"):
        variant = GemmShape(kind, shape.n, shape.k)
        if config := tuner.choose(variant, rows, DTYPE):
            return GemmVariant(config, variant.norm, variant.silu)
    return GemmVariant()


def print_shape(shape: GemmShape, buckets: Iterable[int], found: dict[str, Entry], timer: GemmTimer) -> None:
    print(f"\n{shape.kind} {shape.n} x {shape.k}: rows, us, us of a guess, us of cuBLAS, GB/s")
    for rows in buckets:
        entry = found[key_of(shape, rows, DTYPE)]
        us, cublas = entry["us"], entry["cublas_us"]
        rate = shape.n * shape.k * 2 / us / 1000
        guess = timer(shape, rows, DTYPE, guessed(shape, rows))
        print(f"{rows:5} {us:8.2f} {guess:8.2f} {cublas:8.2f} {cublas / us:5.2f}x {rate:6.0f}  {describe(entry)}")


def print_model(name: str, model: Model, buckets: Iterable[int], found: dict[str, Entry], timer: GemmTimer) -> None:
    print(f"\n{name}: GEMMs of a step, ms: rows, tuned, guessed, cuBLAS")
    gemms = [*model.each * model.layers, model.head]
    for rows in buckets:
        entries = [found[key_of(shape, rows, DTYPE)] for shape in gemms]
        tuned, cublas = (sum(entry[column] for entry in entries) / 1000 for column in ("us", "cublas_us"))
        guess = sum(timer(shape, rows, DTYPE, guessed(shape, rows)) for shape in gemms) / 1000
        print(f"{rows:5} {tuned:8.3f} {guess:8.3f} {cublas:8.3f} {cublas / tuned:5.2f}x")


def write_times(path: Path, times: dict[Case, float]) -> None:
    """Every time, a line each: shape, rows, variant and microseconds."""
    lines = [
        json.dumps(
            [case.shape[:3], case.rows, case.variant.config and entry_of(case.variant.config), case.variant[1:], us]
        )
        for case, us in times.items()
    ]
    path.write_text("[" + ",\n".join(lines) + "]\n")


def missing_shapes(model: Model, buckets: Sequence[int], found: dict[str, Entry]) -> list[GemmShape]:
    """A model's GEMMs and their less fused kinds, without those already in `found`."""
    shapes = dict.fromkeys(part for shape in (*model.each, model.head) for part in with_less_fused(shape))
    return [shape for shape in shapes if any(key_of(shape, rows, DTYPE) not in found for rows in buckets)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--buckets", nargs="*", type=int, default=list(MEASURED_BUCKETS))
    parser.add_argument("--processes", type=int, help="compiler processes (default: one a core)")
    parser.add_argument("--unchecked", action="store_true", help="measure only")
    parser.add_argument("--missing", action="store_true", help="only what is not in the shipped table; add it")
    parser.add_argument("--times", type=Path, help="file for the time of every candidate")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after this time")
    options = parser.parse_args()

    gpu = current_gpu()
    found = read_table(shipped_path(gpu)) if options.missing else {}
    wanted = [shape for name in options.models for shape in missing_shapes(MODELS[name], options.buckets, found)]
    began = time.perf_counter()
    kernels = candidate_kernels(wanted, DTYPE, options.buckets, gpu)
    compile_all(kernels, options.processes)
    print(f"{gpu.name}: {len(kernels)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    timer = CachingTimer() if options.unchecked else CheckedTimer()
    tuner = GemmTuner(TuningTables(gpu, shipped_path(gpu) if options.missing else None, None))
    raise_clocks()
    for name in options.models:
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {name}")
            continue
        shapes = missing_shapes(MODELS[name], options.buckets, found)
        found |= tuner.tune(shapes, DTYPE, options.buckets, timer)
        for shape in shapes:
            print_shape(shape, options.buckets, found, timer)
        print_model(name, MODELS[name], options.buckets, found, timer)
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
        if options.out is not None:
            write_table(options.out / shipped_path(gpu).name, found)
        if options.times is not None:
            write_times(options.times, timer.times)
    if isinstance(timer, CheckedTimer):
        print(f"{timer.checked} results checked, {len(timer.wrong)} wrong")
        print(*timer.wrong, sep="\n")


if __name__ == "__main__":
    main()
