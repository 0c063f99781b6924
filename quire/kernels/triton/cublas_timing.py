"""Which of cuBLASLt's algorithms is fastest for a product of many rows, if one is faster than cuBLAS's own choice.

An algorithm serves the numbers of rows between two of `cublaslt.GRID`: it is measured for the larger one and for one
half way, and must win at both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels.cublaslt import FEW, GRID, CublasLt
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer, random_inputs
from quire.kernels.triton.skinny_gemm.tuning import MARGIN, Entry

TRIED = 6
"""Algorithms; those the library thinks of later hardly ever win."""
HEAD, HEAD_ROWS = 60_000, 1024
"""A weight of so many outputs is a head, which no more rows than draws come to."""

_TENSOR = 790e6  # operations a microsecond
_TOLERANCE = 8e-3


class CublasTimer:
    """Times products of any number of rows, in CUDA graphs, over weights that no cache holds."""

    def __init__(self) -> None:
        self._graphs = GraphTimer()

    def time(self, product: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], rows: int) -> float:
        """Microseconds."""
        n, k = weights[0].shape
        estimate = max(n * k * 2 / 4e6, 2 * rows * n * k / _TENSOR) + 2.0
        self._graphs.replays = 1 if estimate * len(weights) > 2000 else 3
        product(weights[0])  # what the library does the first time must not be captured
        return self._graphs.time(product, weights, estimate)


def grid_of(n: int) -> list[int]:
    """The numbers of rows to measure for a weight of n outputs."""
    return [rows for rows in GRID if rows <= HEAD_ROWS or n < HEAD]


def places(rows: int) -> list[int]:
    """The numbers of rows that stand for those an algorithm serves."""
    before = (FEW, *GRID)[GRID.index(rows)]
    return [rows, (rows + before) // 2]


def measure(lt: CublasLt, n: int, k: int, rows: int, dtype: torch.dtype, timer: CublasTimer) -> Entry:
    """A table's entry for a weight [n, k]: without an algorithm where cuBLAS chooses well."""
    copies = max(1, min(8, -(-COLD_BYTES // (n * k * dtype.itemsize))))
    weights = random_inputs(GemmShape("linear", n, k), 1, dtype, copies).weights
    ours: dict[bytes, list[float]] = {}
    cublas: list[float] = []
    for count in places(rows):
        x = torch.randn(count, k, dtype=dtype, device=weights[0].device)
        out = x.new_empty(count, n)
        if not cublas:
            ours = {algorithm: [] for algorithm in lt.algorithms(x, weights[0], out, TRIED)}
        cublas.append(timer.time(functools.partial(F.linear, x), weights, count))
        expected = F.linear(x, weights[0]).float()
        for algorithm, times in list(ours.items()):
            product = functools.partial(_multiply, lt, x, out, algorithm)
            out.fill_(float("nan"))
            if product(weights[0]) and (out.float() - expected).norm() < _TOLERANCE * expected.norm():
                times.append(timer.time(product, weights, count))
            else:
                del ours[algorithm]
    entry: Entry = {"cublas_us": round(cublas[0], 2)}
    if ours:
        best = min(ours, key=lambda algorithm: sum(a / b for a, b in zip(ours[algorithm], cublas, strict=True)))
        entry["us"] = round(ours[best][0], 2)
        if all(a <= MARGIN * b for a, b in zip(ours[best], cublas, strict=True)):
            entry["algorithm"] = best.hex()
    return entry


def _multiply(lt: CublasLt, x: torch.Tensor, out: torch.Tensor, algorithm: bytes, weight: torch.Tensor) -> bool:
    return lt.run(x, weight, out, algorithm, onto=False)
