"""Products of one to sixteen rows with 4-bit weights, in the order of a layer: checked, then timed in a chain.

    python -m benchmarks.gpu.fewbits [--quick] [--rows 1 8] [--solo]

What counts in a decode step is a layer's kernels one after the other, each launched while its predecessor runs. So
variants of a product are timed inside a chain of Llama-3.1-8B's layer, in a CUDA graph over weights that are not in L2:
its four products, and with `layer` the cache write and attention over 640 tokens between the first two. The last table
is microseconds a layer, and TB/s of the products' bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.kv_formats import BLOCK, DIM, HEADS, KV_HEADS, SCALE, Decodes
from benchmarks.gpu.weight_only_gemm import (
    EPS,
    SHAPES,
    TOLERANCE,
    Inputs,
    Shape,
    Variant,
    compile_one,
    compute,
    new_inputs,
    random_weight,
    reference,
)
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig
from quire.kernels.triton.quantized.weight_only import choose
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks

LAYERS = 8
"""Layers of a chain: 880 MB of codes; the smallest product of all of them does not fit into L2."""
CONTEXT = 640
Chain = dict[str, Variant]


def stream(
    block_n: int, warps: int, depth: int, programs: int, steps: int, early: bool = True, block_m: int = 8
) -> Any:
    return WeightOnlyConfig("stream", block_n, block_m, warps, depth, programs=programs, early=early, steps=steps)


STREAMS = {
    "qkv": [
        (16, 8, 4, 3, 1), (16, 8, 2, 3, 2), (16, 4, 4, 3, 2), (16, 8, 8, 2, 1), (32, 8, 4, 2, 1), (16, 16, 2, 2, 1),
        (16, 8, 8, 1, 1), (32, 8, 4, 1, 1), (16, 16, 4, 1, 1),
    ],
    "o": [
        (16, 8, 4, 2, 1), (16, 8, 2, 2, 2), (16, 4, 4, 2, 2), (32, 8, 4, 1, 1), (16, 16, 2, 2, 1), (16, 8, 1, 2, 4),
        (16, 8, 8, 1, 1), (16, 16, 4, 1, 1),
    ],
    "gate_up": [
        (16, 8, 8, 2, 1), (16, 8, 4, 2, 2), (16, 8, 3, 2, 4), (32, 8, 4, 2, 1), (32, 8, 8, 1, 1), (32, 16, 4, 1, 1),
        (32, 8, 4, 1, 2), (16, 16, 8, 1, 1), (16, 16, 4, 1, 2), (16, 4, 8, 4, 1),
        (16, 4, 4, 4, 2), (32, 4, 4, 2, 2), (16, 8, 4, 3, 1),
    ],
    "down": [
        (16, 8, 8, 2, 1), (16, 8, 4, 2, 2), (16, 8, 6, 2, 2), (32, 8, 8, 1, 1), (32, 8, 4, 1, 2), (16, 16, 4, 2, 1),
        (32, 16, 4, 1, 1), (16, 4, 8, 2, 2),
    ],
}  # fmt: skip
"""(outputs, warps, stages, programs a multiprocessor, spans of a warp in a stage) of `stream`."""
SHARED = 220 << 10


def variants(shape: Shape, rows: int) -> list[Variant]:
    """What is timed; the first is what the engine runs."""
    chosen = choose(shape.n, shape.k // 128, rows)
    fused = rows == 1 and shape.norm
    found = [Variant(chosen, fused and chosen.kernel in ("few", "stream"), shape.silu)]
    block_m = 8 if rows <= 8 else 16
    for block_n, warps, depth, programs, steps in STREAMS[shape.name]:
        held = shape.k * 2 * (1 if rows == 1 else block_m)
        ring = depth * steps * warps * block_n * 64
        if (held + ring + 4 * shape.k // 128 * block_n + 2048) * programs <= SHARED:
            for early in (True, False) if rows == 1 and (block_n, steps) == (16, 1) else (True,):
                config = stream(block_n, warps, depth, programs, steps, early, block_m)
                found.append(Variant(config, fused, shape.silu))
    return found


class Layers:
    """Weights and caches of some layers, and activations of some rows."""

    def __init__(self) -> None:
        self.weights = [{shape.name: random_weight(shape, "int4", "cuda") for shape in SHAPES} for _ in range(LAYERS)]
        self.ops = TritonOps()

    def set_rows(self, rows: int) -> None:
        self.inputs = {shape.name: new_inputs(shape, rows, "cuda") for shape in SHAPES}
        self.attention = Decodes("auto", [CONTEXT] * rows, LAYERS)
        self.kernel = self.attention.kernel()
        self.positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        blocks = self.attention.tables[:rows, (CONTEXT - 1) // BLOCK].long()
        self.slots = blocks * BLOCK + (CONTEXT - 1) % BLOCK
        self.angles = torch.randn(4096, DIM, device="cuda")

    def run(self, chain: Chain, attends: bool) -> None:
        """A step of all layers."""
        attention = self.attention
        rows = len(attention.lens)
        plan = self.kernel.plan(attention.lens, attention.rows, rows, None) if attends else None
        for layer, weights in enumerate(self.weights):
            for shape in SHAPES:
                inputs = self.inputs[shape.name]
                out = compute(self.ops, shape, chain[shape.name], inputs, weights[shape.name])
                if attends and shape.name == "qkv":
                    kv = attention.layers[layer]
                    q = prepare_qkv(
                        out, self.positions, self.angles, None, kv, self.slots, HEADS, KV_HEADS, DIM
                    )  # fmt: skip
                    self.kernel.attend(
                        q, kv, attention.out, attention.tables, attention.rows, attention.lens, plan, rows, SCALE, None
                    )  # fmt: skip


def check(layers: Layers, shape: Shape, variant: Variant) -> float:
    """The relative error of a variant."""
    inputs = layers.inputs[shape.name]
    weight = layers.weights[-1][shape.name]
    expected = reference(shape, inputs, weight)
    torch.full_like(expected, float("nan"), dtype=inputs.x.dtype)  # what the result's memory held before
    out = compute(layers.ops, shape, variant, Inputs(inputs.x, inputs.residual.clone(), inputs.gain), weight)
    return ((out.float() - expected).norm() / expected.norm()).item()


def attempt(run: Callable[[], float], text: str) -> float:
    try:
        return run()
    except Exception as failure:  # the others may still be timed
        print(f"FAILED {text}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 1 and 8 rows")
    parser.add_argument("--rows", type=int, nargs="*", default=None, help="row counts")
    options = parser.parse_args()
    row_counts = options.rows or ([1, 8] if options.quick else [1, 2, 4, 8, 16])
    began = time.perf_counter()
    jobs = [
        (shape, rows, variant, "int4")
        for rows in row_counts
        for shape in SHAPES
        for variant in variants(shape, rows)
        if variant.config.kernel != "dequantize"
    ]
    broken = set()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, failure in zip(jobs, pool.map(compile_one, jobs, chunksize=2), strict=True):
            if failure:
                broken.add(job[:3])
                print("not compiled:", failure)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)

    raise_clocks()
    layers, timer = Layers(), GraphTimer(replays=4)
    nbytes = sum(weight.nbytes for weight in layers.weights[0].values())
    table = []
    for rows in row_counts:
        layers.set_rows(rows)
        sound = {}
        for shape in SHAPES:
            sound[shape.name] = []
            for variant in variants(shape, rows):
                if (shape, rows, variant) in broken:
                    continue
                text = f"{shape.name} {rows} {variant}"
                error = attempt(lambda: check(layers, shape, variant), text)  # noqa: B023
                if error < TOLERANCE:
                    sound[shape.name].append(variant)
                elif error < float("inf"):
                    print(f"WRONG {text}: error {error:.1e}", flush=True)

        def chain_us(chain: Chain, attends: bool = False) -> float:
            layers.run(chain, attends)
            return timer.replay(lambda: layers.run(chain, attends)) / LAYERS

        def solo_us(shape: Shape, variant: Variant) -> float:
            weights = [held[shape.name] for held in layers.weights]
            inputs = layers.inputs[shape.name]

            def products() -> None:
                for weight in weights:
                    compute(layers.ops, shape, variant, inputs, weight)

            return timer.replay(products) / LAYERS

        base: Chain = {name: found[0] for name, found in sound.items()}
        best = dict(base)
        for shape in SHAPES:  # one product after the other, the others as found best so far
            times = []
            for variant in sound[shape.name]:
                us = attempt(lambda: chain_us(best | {shape.name: variant}), f"chain {shape.name} {variant}")  # noqa: B023
                alone = attempt(lambda: solo_us(shape, variant), f"solo {shape.name} {variant}")  # noqa: B023
                times.append((us, alone, variant))
            times.sort(key=lambda entry: entry[0])
            shown = "; ".join(f"{us:.1f}/{alone:.1f} {variant}" for us, alone, variant in times)
            print(f"{shape.name} {rows} chain/alone: {shown}", flush=True)
            best[shape.name] = times[0][2]
        for name, chain in (("engine", base), ("best", best)):
            us = attempt(lambda: chain_us(chain), name)  # noqa: B023
            whole = attempt(lambda: chain_us(chain, True), name)  # noqa: B023
            table.append(f"{rows:3} {name:7} {us:7.1f} {nbytes / us / 1e6:5.2f} TB/s   layer {whole:7.1f}")
        # Which products gain or lose where attention runs between them.
        for shape in SHAPES:
            us = attempt(lambda: chain_us(best | {shape.name: base[shape.name]}, True), shape.name)  # noqa: B023
            print(f"  layer with the engine's {shape.name}: {us:.1f}")
        for name, variant in best.items():
            table.append(f"      {name}: {variant}")
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print(
        f"\nrows, us of a layer's products, TB/s of {nbytes / 1e6:.0f} MB, us with cache write and attention ({EPS=})"
    )
    print("\n".join(table))


if __name__ == "__main__":
    main()
