"""Algorithms of cuBLASLt on a GPU: measured against the one that cuBLAS chooses, for products of many rows.

    python -m benchmarks.gpu.cublas --out tables

writes `tables/<card>-cublas-<version>.json`, which `quire/kernels/cublaslt.py` reads. An algorithm serves the numbers
of rows between two of its `GRID`: it is measured for the larger one and for one half way, and must win at both.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.thin import DTYPE, MODELS, TOLERANCE
from quire.kernels.cublaslt import GRID, CublasLt, library, table_path
from quire.kernels.triton.thin_candidates import Shape
from quire.kernels.triton.thin_timing import COLD_BYTES, GraphTimer, raise_clocks, random_inputs
from quire.kernels.triton.tuning import current_gpu, shipped_table

MARGIN = 0.98
"""What wins takes at most this share of cuBLAS's time."""
TENSOR = 790.0
"""TFLOP/s of an H200, measured."""


class Timer:
    """Times products of any number of rows, in CUDA graphs, over weights that no cache holds."""

    def __init__(self) -> None:
        self._graphs = GraphTimer()

    def time(self, product: Callable[[torch.Tensor], object], weights: list[torch.Tensor], rows: int) -> float:
        """Microseconds."""
        n, k = weights[0].shape
        estimate = max(n * k * 2 / 4e6, 2 * rows * n * k / (TENSOR * 1e6)) + 2.0
        launches = max(len(weights), min(40, int(self._graphs.window_us / estimate)))
        self._graphs.replays = 1 if estimate * launches > 2000 else 3

        def chain() -> None:
            for i in range(launches):
                product(weights[i % len(weights)])

        chain()
        return self._graphs.replay(chain) / launches


def places(rows: int) -> list[int]:
    """The numbers of rows that stand for those an algorithm serves."""
    at = GRID.index(rows)
    return [rows, (rows + GRID[at - 1]) // 32 * 16] if at else [rows]


def measure(lt: CublasLt, n: int, k: int, rows: int, most: int, timer: Timer) -> dict[str, Any]:
    """A table's entry."""
    copies = max(1, min(8, -(-COLD_BYTES // (n * k * DTYPE.itemsize))))
    weights = random_inputs(Shape("linear", n, k), 1, DTYPE, copies).weights
    ours: dict[bytes, list[float]] = {}
    cublas = []
    for place, count in enumerate(places(rows)):
        x = torch.randn(count, k, dtype=DTYPE, device=weights[0].device)
        out = x.new_empty(count, n)
        cublas.append(timer.time(functools.partial(F.linear, x), weights, count))
        expected = F.linear(x, weights[0])
        if place == 0:
            ours = {algorithm: [] for algorithm in lt.algorithms(x, weights[0], out, most)}
        for algorithm, times in list(ours.items()):
            product = functools.partial(multiply, lt, x, out, algorithm)
            out.fill_(float("nan"))
            if product(weights[0]) and not wrong(out, expected):
                times.append(timer.time(product, weights, count))
            else:
                del ours[algorithm]
    entry: dict[str, Any] = {"cublas_us": round(cublas[0], 2)}
    if ours:
        best = min(ours, key=lambda algorithm: sum(a / b for a, b in zip(ours[algorithm], cublas, strict=True)))
        entry["us"] = round(ours[best][0], 2)
        if all(a <= MARGIN * b for a, b in zip(ours[best], cublas, strict=True)):
            entry["algorithm"] = best.hex()
    return entry


def multiply(lt: CublasLt, x: torch.Tensor, out: torch.Tensor, algorithm: bytes, weight: torch.Tensor) -> bool:
    return lt.run(x, weight, out, algorithm, onto=False)


def wrong(out: torch.Tensor, expected: torch.Tensor) -> bool:
    error = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
    return not error < TOLERANCE


def weights_of(names: Iterable[str]) -> list[tuple[int, int]]:
    """Shapes of the weights of these models, each once. Heads are never multiplied by very many rows."""
    return list(
        dict.fromkeys((shape.n, shape.k) for name in names for shape in (*MODELS[name].each, MODELS[name].head))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(GRID), choices=GRID)
    parser.add_argument("--most", type=int, default=6, help="algorithms to try")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no weight after so long")
    options = parser.parse_args()
    lt = library()
    if lt is None:
        parser.error("there is no cuBLASLt here")
    path = table_path(shipped_table(current_gpu()).stem, lt.version)
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    timer, began = Timer(), time.perf_counter()
    raise_clocks()
    for n, k in weights_of(options.models):
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {n} x {k}")
            continue
        is_head = n > 60000  # which no more rows than draws come to
        for rows in [rows for rows in options.rows if rows <= 1024 or not is_head]:
            entry = table[f"{rows} {n}x{k} bfloat16"] = measure(lt, n, k, rows, options.most, timer)
            rate = 2 * rows * n * k / entry.get("us", entry["cublas_us"]) / 1e6
            print(
                f"{n:7} x {k:<6}{rows:6}{entry['cublas_us']:10.1f}{entry.get('us', 0.0):10.1f}"
                f"{entry['cublas_us'] / entry.get('us', float('inf')):6.3f}{rate:5.0f} TFLOP/s"
                f"{'  taken' if 'algorithm' in entry else ''}", flush=True,
            )  # fmt: skip
        if options.out is not None:
            won = {key: entry for key, entry in table.items() if "algorithm" in entry}
            lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in won.items()]
            (options.out / path.name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"version {lt.version}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
