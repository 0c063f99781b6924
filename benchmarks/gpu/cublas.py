"""cuBLASLt algorithms measured against cuBLAS's own choice, for GEMMs of many rows.

    python -m benchmarks.gpu.cublas --out tables

writes `tables/<card>-cublas-<version>.json`, the table that `quire/kernels/triton/tables` ships. How they are
measured is in `quire/kernels/triton/cublaslt.py`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.gpu.skinny_gemm import DTYPE, MODELS
from quire.kernels.triton.cublaslt import (
    ROW_GRID,
    CublasTimer,
    key_of,
    library,
    measure_algorithms,
    measured_rows,
    table_paths,
)
from quire.kernels.triton.skinny_gemm.timing import raise_clocks
from quire.kernels.triton.tuning_table import current_gpu, read_table, write_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROW_GRID), choices=ROW_GRID)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no weight after this time")
    options = parser.parse_args()
    lt = library()
    if lt is None:
        parser.error("cuBLASLt is not available")
    shapes = (shape for name in options.models for shape in (*MODELS[name].each, MODELS[name].head))
    path, _ = table_paths(current_gpu(), lt.version)
    found = read_table(path)
    timer, began = CublasTimer(), time.perf_counter()
    raise_clocks()
    for n, k in dict.fromkeys((shape.n, shape.k) for shape in shapes):
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {n} x {k}")
            continue
        print(f"{n} x {k}: rows, us of cuBLAS, us, TFLOP/s")
        for rows in sorted(set(options.rows) & set(measured_rows(n))):
            entry = measure_algorithms(lt, n, k, rows, DTYPE, timer)
            cublas, us = entry["cublas_us"], entry.get("us", float("inf"))
            rate = 2 * rows * n * k / us / 1e6
            taken = "  taken" if "algorithm" in entry else ""
            print(f"{rows:6}{cublas:10.1f}{us:10.1f}{cublas / us:6.3f}x{rate:6.0f}{taken}", flush=True)
            found.pop(key_of(rows, n, k, DTYPE), None)  # an earlier winner may no longer win
            if taken:
                found[key_of(rows, n, k, DTYPE)] = entry
        if options.out is not None:
            write_table(options.out / path.name, found)
    print(f"version {lt.version}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
