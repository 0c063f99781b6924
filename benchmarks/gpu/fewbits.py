"""Products of one to sixteen rows with 4-bit weights, in the order of a layer: checked, then timed in a chain.

    python -m benchmarks.gpu.fewbits [--quick] [--rows 1 8]

What counts in a decode step is a layer's kernels one after the other, each launched while its predecessor runs. So
variants of a product are timed inside a chain of Llama-3.1-8B's layer, in a CUDA graph over weights that are not in L2:
its four products, and under `layer` the cache write and attention over 640 tokens between the first two. The last table
is microseconds a layer, and TB/s of the products' bytes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.gpu.kv_formats import BLOCK, DIM, HEADS, KV_HEADS, SCALE, Decodes
from benchmarks.gpu.weight_only_gemm import (
    EPS,
    SHAPES,
    TOLERANCE,
    Inputs,
    Shape,
    Variant,
    new_inputs,
    random_weight,
    reference,
)
from quire.kernels.triton.elementwise import add_rms_norm
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WordWeight, as_words
from quire.kernels.triton.quantized.tiled_rows import tiled
from quire.kernels.triton.quantized.weight_only import choose, compile_gemm, run
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.packing import pack_words, unpack_words

LAYERS = 6
"""Layers of a chain: 680 MB of weights; the smallest product of all of them does not fit into L2."""
CONTEXT = 640
SPAN = 256

TILED = {
    "qkv": [(16, 8, 2, 2), (16, 8, 2, 3), (16, 4, 4, 3), (16, 4, 2, 3), (16, 8, 2, 1)],
    "o": [(16, 8, 2, 2), (16, 4, 4, 2), (16, 4, 2, 2), (16, 8, 2, 1)],
    "gate_up": [
        (16, 8, 2, 2), (16, 4, 4, 3), (16, 4, 2, 4), (32, 4, 2, 2), (32, 4, 2, 3), (16, 8, 2, 1), (32, 8, 2, 1),
    ],
    "down": [(16, 4, 2, 2), (16, 8, 1, 2), (16, 4, 7, 2), (32, 8, 1, 1), (16, 8, 7, 2)],
}  # fmt: skip
"""(outputs, warps, spans in flight, programs a multiprocessor) of `tiled`."""


def variants(shape: Shape, rows: int) -> list[tuple[str, Variant]]:
    """Orders and variants; the first is what the engine runs."""
    chosen = choose(shape.n, shape.k // 128, rows)
    fused = rows == 1 and shape.norm
    found = [("few", Variant(chosen, fused and chosen.kernel == "few", shape.silu))]
    block_m = 8 if rows <= 8 else 16
    held = shape.k * 2 * (1 if rows == 1 else block_m)
    for number, (block_n, warps, depth, programs) in enumerate(TILED[shape.name]):
        config = WeightOnlyConfig("tiled", block_n, block_m, warps, depth, programs=programs, early=True)
        if (held + 8192) * programs > 220 << 10:
            continue
        found.append(("tiled", Variant(config, fused, shape.silu)))
        if number == 0 and rows == 1:
            found.append(("tiled", Variant(replace(config, prefetch=2), fused, shape.silu)))
            if shape.norm:
                found.append(("rows", Variant(config, fused, shape.silu)))
            if shape.silu:
                found.append(("tiled", Variant(replace(config, early=False), fused, shape.silu)))
    return found


def orders(weight: GroupedWeight) -> dict[str, WordWeight]:
    """The weight in every order."""
    words = as_words(weight)
    assert words is not None
    if words.codes.is_meta:
        wide = words._replace(span=SPAN)
        return {"few": words, "rows": wide, "tiled": wide._replace(tiled=True)}
    codes = pack_words(unpack_words(weight.codes, 4, words.span), 4, SPAN)
    wide = words._replace(codes=codes.view(torch.int16), span=SPAN)
    return {"few": words, "rows": wide, "tiled": tiled(wide)}


def gemm_of(inputs: Inputs, variant: Variant, weight: WordWeight, normed: bool) -> WeightOnlyGemm:
    gemm = WeightOnlyGemm(inputs.x, weight, silu=variant.silu)
    if variant.norm:
        gemm.gain, gemm.residual, gemm.eps = inputs.gain, inputs.residual, EPS
        gemm.stream = torch.empty_like(inputs.x)
    elif normed and not inputs.x.is_meta:
        gemm.x, _ = add_rms_norm(inputs.x, inputs.residual, inputs.gain, EPS)
    return gemm


def compile_one(job: tuple[Shape, int, str, Variant]) -> str | None:
    shape, rows, order, variant = job
    weight = random_weight(shape, "int4", "meta")
    assert isinstance(weight, GroupedWeight)
    try:
        compile_gemm(gemm_of(new_inputs(shape, rows, "meta"), variant, orders(weight)[order], False), variant.config)
    except Exception as error:  # the others may still be timed
        return f"{shape.name} {rows} {order} {variant}: {type(error).__name__} {str(error)[:200]}"
    return None


class Layers:
    """Weights and caches of some layers, and activations of some rows."""

    def __init__(self) -> None:
        self.plain: dict[str, GroupedWeight] = {}
        self.weights: list[dict[str, dict[str, WordWeight]]] = []
        for _ in range(LAYERS):
            layer = {}
            for shape in SHAPES:
                weight = random_weight(shape, "int4", "cuda")
                assert isinstance(weight, GroupedWeight)
                layer[shape.name] = orders(weight)
                self.plain[shape.name] = weight
            self.weights.append(layer)

    def set_rows(self, rows: int) -> None:
        self.inputs = {shape.name: new_inputs(shape, rows, "cuda") for shape in SHAPES}
        self.attention = Decodes("auto", [CONTEXT] * rows, LAYERS)
        self.kernel = self.attention.kernel()
        self.positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        blocks = self.attention.tables[:rows, (CONTEXT - 1) // BLOCK].long()
        self.slots = blocks * BLOCK + (CONTEXT - 1) % BLOCK
        self.angles = torch.randn(4096, DIM, device="cuda")

    def product(self, shape: Shape, order: str, variant: Variant, layer: int) -> torch.Tensor:
        gemm = gemm_of(self.inputs[shape.name], variant, self.weights[layer][shape.name][order], shape.norm)
        return run(gemm, variant.config)

    def step(self, chain: dict[str, tuple[str, Variant]], attends: bool) -> None:
        """A step of all layers."""
        attention = self.attention
        rows = len(attention.lens)
        plan = self.kernel.plan(attention.lens, attention.rows, rows, None)
        for layer in range(LAYERS):
            for shape in SHAPES:
                out = self.product(shape, *chain[shape.name], layer)
                if attends and shape.name == "qkv":
                    kv = attention.layers[layer]
                    q = prepare_qkv(
                        out, self.positions, self.angles, None, kv, self.slots, HEADS, KV_HEADS, DIM
                    )  # fmt: skip
                    self.kernel.attend(
                        q, kv, attention.out, attention.tables, attention.rows, attention.lens, plan, rows, SCALE, None
                    )  # fmt: skip

    def error(self, shape: Shape, order: str, variant: Variant) -> float:
        """The relative error of a variant."""
        inputs = self.inputs[shape.name]
        expected = reference(shape, inputs, self.plain[shape.name])
        torch.full_like(expected, float("nan"), dtype=inputs.x.dtype)  # what the result's memory held before
        kept = inputs.residual.clone()
        out = self.product(shape, order, variant, LAYERS - 1)
        inputs.residual.copy_(kept)
        return ((out.float() - expected).norm() / expected.norm()).item()


def attempt(measure: Callable[[], float], text: str) -> float:
    try:
        return measure()
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
        (shape, rows, order, variant)
        for rows in row_counts
        for shape in SHAPES
        for order, variant in variants(shape, rows)
        if variant.config.kernel != "dequantize"
    ]
    broken = set()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, failure in zip(jobs, pool.map(compile_one, jobs, chunksize=1), strict=True):
            if failure:
                broken.add(job)
                print("not compiled:", failure)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)

    raise_clocks()
    layers, timer = Layers(), GraphTimer(replays=4)
    nbytes = sum(weight.nbytes for weight in layers.plain.values())
    table = []

    def chain_us(chain: dict[str, tuple[str, Variant]], attends: bool = False) -> float:
        layers.step(chain, attends)
        return timer.replay(lambda: layers.step(chain, attends)) / LAYERS

    def solo_us(shape: Shape, order: str, variant: Variant) -> float:
        def products() -> None:
            for layer in range(LAYERS):
                layers.product(shape, order, variant, layer)

        return timer.replay(products) / LAYERS

    for rows in row_counts:
        layers.set_rows(rows)
        sound: dict[str, list[tuple[str, Variant]]] = {}
        for shape in SHAPES:
            sound[shape.name] = []
            for choice in variants(shape, rows):
                if (shape, rows, *choice) in broken:
                    continue
                text = f"{shape.name} {rows} {choice[0]} {choice[1]}"
                error = attempt(functools.partial(layers.error, shape, *choice), text)
                if error < TOLERANCE:
                    sound[shape.name].append(choice)
                elif error < float("inf"):
                    print(f"WRONG {text}: error {error:.1e}", flush=True)
        base = {name: found[0] for name, found in sound.items()}
        best = dict(base)
        for name in ("gate_up", "down", "qkv", "o"):  # each with the others as found best so far
            shape = next(shape for shape in SHAPES if shape.name == name)
            times = []
            for choice in sound[name]:
                text = f"{name} {choice[0]} {choice[1]}"
                us = attempt(functools.partial(chain_us, best | {name: choice}), text)
                times.append((us, attempt(functools.partial(solo_us, shape, *choice), text), choice))
            times.sort(key=lambda entry: entry[0])
            shown = "; ".join(f"{us:.1f}/{alone:.1f} {order} {variant}" for us, alone, (order, variant) in times)
            print(f"{name} {rows} chain/alone: {shown}", flush=True)
            best[name] = times[0][2]
        families = {"engine": base, "best": best}
        for title, chain in families.items():
            us = attempt(functools.partial(chain_us, chain), title)
            whole = attempt(functools.partial(chain_us, chain, True), title)
            table.append(f"{rows:3} {title:7} {us:7.1f} {nbytes / us / 1e6:5.2f} TB/s   layer {whole:7.1f}")
        for name in best:
            us = attempt(functools.partial(chain_us, best | {name: base[name]}, True), name)
            table.append(f"      {name}: {best[name][0]} {best[name][1]}; layer with the engine's: {us:.1f}")
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\nrows, us of a layer's products, TB/s of {nbytes / 1e6:.0f} MB, us with cache write and attention")
    print("\n".join(table))


if __name__ == "__main__":
    main()
