"""Products with packed weights on a CPU, one row and several: formats in turn, against each other and against memory.

    python benchmarks/packed_products.py [--rounds 15] [--rows 1,4,16] [--threads 2]

A layer of a 2B model (BitNet b1.58 2B4T's shapes) is repeated until the weights are larger than any cache, so that a
product reads memory. For each format: milliseconds for all matrices (medians of alternating rounds), times faster than
Q4_0, and the bytes of weights read in a second as a share of what reading memory reaches (the best of several passes of
a plain sum over a buffer, on the same threads; a copy moves two bytes for each it is said to copy).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch

from quire.kernels.cpu.ops import CpuOps
from quire.kernels.weights.base import QuantizedWeight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.strips import StripWeight
from quire.kernels.weights.superblock import KINDS
from quire.platforms.base import MemoryArena

SHAPES = ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912))
"""Outputs and inputs: q, k and v; o; gate and up; down."""
LAYERS = 4
BUFFER = 512 << 20


def weights(name: str, memory: MemoryArena) -> list[QuantizedWeight]:
    made: list[QuantizedWeight] = []
    for shape in SHAPES * LAYERS:
        if name in KINDS:
            weight: QuantizedWeight = InterleavedWeight.allocate(shape, torch.float32, memory.zeros, KINDS[name])
        else:
            bits, group = {"int4 g128": (4, 128), "int8": (8, shape[1]), "ternary": (2, shape[1])}[name]
            block = None if bits == 4 else shape[1]
            weight = StripWeight.allocate(shape, torch.float32, memory.zeros, bits, group, block=block)
        for tensor in weight.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(0.01)
            else:
                tensor.view(torch.uint8).numpy()[...] = np.resize(
                    np.random.default_rng(0).integers(0, 64, 65536, np.uint8), tensor.shape
                )
        made.append(weight)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", default="Q4_0,Q4_K,Q8_0,int4 g128,int8,ternary")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops, memory = CpuOps(), MemoryArena(torch.device("cpu"))
    held = {name: weights(name, memory) for name in options.formats.split(",")}
    source = memory.zeros((BUFFER // 8,), torch.int64)
    source.fill_(1)
    target = torch.empty_like(source)
    for rows in map(int, options.rows.split(",")):
        inputs = {width: torch.randn(rows, width) for _, width in SHAPES}
        times: dict[str, list[float]] = {name: [] for name in (*held, "sum", "copy")}
        for _ in range(options.rounds):
            for name in times:
                start = time.perf_counter()
                if name == "sum":
                    source.sum()
                elif name == "copy":
                    target.copy_(source)
                else:
                    for weight in held[name]:
                        ops.linear(inputs[weight.shape[1]], weight)
                times[name].append(time.perf_counter() - start)
        middle = {name: statistics.median(values) for name, values in times.items()}
        best = {name: min(values) for name, values in times.items()}
        peak = max(BUFFER / best["sum"], 2 * BUFFER / best["copy"])
        print(
            f"\n{rows} rows, {options.threads} threads, load {os.getloadavg()[0]:.1f}; memory: sum "
            f"{BUFFER / best['sum'] / 1e9:.1f} GB/s, copy {BUFFER / best['copy'] / 1e9:.1f} GB/s"
        )
        for name, own in held.items():
            size = sum(weight.nbytes for weight in own)
            line = f"{name:>10}: {1e3 * middle[name]:7.2f} ms (best {1e3 * best[name]:.2f}), {size / 2**20:.0f} MiB"
            if "Q4_0" in held:
                line += f", {middle['Q4_0'] / middle[name]:.2f}x Q4_0 (best {best['Q4_0'] / best[name]:.2f}x)"
            print(f"{line}, {100 * size / best[name] / peak:.0f} % of memory", flush=True)


if __name__ == "__main__":
    main()
