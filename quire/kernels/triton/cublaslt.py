"""GEMMs by measured cuBLASLt algorithms instead of the ones cuBLAS's heuristic chooses.

cuBLAS has hundreds of kernels and chooses by a heuristic that, for GEMMs of many rows, is often a few percent off the
best. cuBLASLt, the library underneath, names its candidates as *algorithms*: 64 bytes that have a fixed meaning within
one version of the library. `measure_algorithms` times them; those that win are in tuning tables (`tuning_table.py`) by
GPU and library version. A GEMM that is in no table is left to torch.

An algorithm serves the row counts between two of `ROW_GRID`: it is measured at the larger one and half way between,
and must win at both.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer, random_inputs
from quire.kernels.triton.skinny_gemm.tuning import MARGIN
from quire.kernels.triton.tuning_table import (
    Entry,
    Gpu,
    bucket_of,
    current_gpu,
    dtype_name,
    own_path,
    read_table,
    shipped_path,
)

log = logging.getLogger(__name__)

ROW_GRID = (32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
"""Row counts that algorithms are measured for. More rows use the last one's."""
MIN_ROWS = 17
"""With fewer rows no algorithm is used: the grid's first was not measured for them."""
WORKSPACE_BYTES = 32 << 20
"""What an algorithm may use for split-K sums."""
ALIGNMENT = 16
"""Bytes that all tensors are aligned to."""
CANDIDATES = 6
"""Algorithms measured: later ones in the library's list rarely win."""
HEAD_OUTPUTS, HEAD_ROWS = 60_000, 1024
"""A weight with at least this many outputs is an LM head, which sees at most this many rows: only sampled ones."""

# Constants of cublasLt.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT = 68
_TRANSPOSE_A, _TRANSPOSED = 3, 1
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_COMPUTE_TYPE = 2  # split-K sums in float32; in place they would be in the output's type
_COLUMNS, _STRIDE = 3, 4

_TENSOR_OPS = 790e6  # a microsecond, on an H200
_TOLERANCE = 8e-3


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the library's estimates for it."""

    _fields_ = (
        ("data", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self.data).cast("B"))


class GemmDescriptors:
    """cuBLASLt's descriptors of a GEMM: made once for a weight's shape, updated when the rows change."""

    def __init__(self) -> None:
        self.operation, self.weight, self.x, self.out = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        self.rows: tuple[int, int, int] | None = None


class CublasLt:
    """The library, on the current device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cublasLtGetVersion.restype = c_size_t
        self.version = int(library.cublasLtGetVersion())
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        self._prefer(_MAX_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        self._prefer(_REDUCTION_SCHEMES, c_uint32(_REDUCE_IN_COMPUTE_TYPE))
        for attribute in _MIN_ALIGNMENTS:
            self._prefer(attribute, c_uint32(ALIGNMENT))
        self._cached: dict[Any, GemmDescriptors] = {}
        matmul = library.cublasLtMatmul
        matmul.argtypes = [
            c_void_p, c_void_p, POINTER(c_float), c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_float), c_void_p,
            c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p,
        ]  # fmt: skip
        self._matmul = matmul

    def algorithms(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, limit: int) -> list[bytes]:
        """The library's candidates for out = x @ weight.T, its best guess first."""
        gemm = self._descriptors(x, weight, out)
        found, count = (HeuristicResult * limit)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, gemm.operation, gemm.weight, gemm.x, gemm.out, gemm.out,
            self._preference, c_int(limit), found, byref(count),
        )  # fmt: skip
        return [bytes(result) for result in found[: count.value] if result.status == 0]

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, algorithm: bytes, accumulate: bool) -> bool:
        """out (+)= x @ weight.T; False: the algorithm does not support this GEMM, and `out` is unchanged."""
        gemm = self._descriptors(x, weight, out)
        status: int = self._matmul(
            self._handle, gemm.operation, _ONE, weight.data_ptr(), gemm.weight, x.data_ptr(), gemm.x,
            _ONE if accumulate else _ZERO, out.data_ptr(), gemm.out, out.data_ptr(), gemm.out, algorithm,
            self._workspace.data_ptr(), WORKSPACE_BYTES, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return status == 0

    def _descriptors(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> GemmDescriptors:
        key = (weight.shape, weight.stride(0), x.dtype)
        gemm = self._cached.get(key)
        if gemm is None:
            gemm = self._cached[key] = self._describe(weight)
        rows = x.shape[0], x.stride(0), out.stride(0)
        if gemm.rows != rows:
            gemm.rows = rows
            for layout, stride in ((gemm.x, x.stride(0)), (gemm.out, out.stride(0))):
                self._set(layout, _COLUMNS, c_uint64(x.shape[0]))
                self._set(layout, _STRIDE, c_int64(stride))
        return gemm

    def _describe(self, weight: torch.Tensor) -> GemmDescriptors:
        """The library is column-major: it sees our tensors transposed, and x as the second operand."""
        dtype = _TYPES[weight.dtype]
        n, k = weight.shape
        gemm = GemmDescriptors()
        self._call(
            "cublasLtMatmulDescCreate", byref(gemm.operation), c_int(_COMPUTE_FLOAT), c_int(_TYPES[torch.float32])
        )
        transposed = c_int(_TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute", gemm.operation, c_int(_TRANSPOSE_A), byref(transposed), c_size_t(4)
        )  # fmt: skip
        for layout, length, columns in ((gemm.weight, k, n), (gemm.x, k, 1), (gemm.out, n, 1)):
            self._call(
                "cublasLtMatrixLayoutCreate", byref(layout), c_int(dtype), c_uint64(length), c_uint64(columns),
                c_int64(length),
            )  # fmt: skip
        self._set(gemm.weight, _STRIDE, c_int64(weight.stride(0)))
        return gemm

    def _prefer(self, attribute: int, value: c_uint32 | c_uint64) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulPreferenceSetAttribute", self._preference, c_int(attribute), byref(value), size)

    def _set(self, layout: c_void_p, attribute: int, value: c_int64 | c_uint64) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatrixLayoutSetAttribute", layout, c_int(attribute), byref(value), size)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")


_ONE, _ZERO = c_float(1.0), c_float(0.0)


@functools.cache
def library() -> CublasLt | None:
    """The cuBLASLt that torch has loaded; None where there is none, or no GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return CublasLt(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"))
    except (OSError, AttributeError, RuntimeError) as error:
        log.debug("cuBLASLt is not used: %s", error)
        return None


class TunedGemms:
    """GEMMs for which a table has a faster algorithm than cuBLAS's choice."""

    def __init__(self, library: CublasLt, table: dict[str, Entry]) -> None:
        """`table`: {"1024 4096x14336 bfloat16": {"algorithm": 128 hexadecimal digits}, ...}, rows of `ROW_GRID`."""
        self._library = library
        self._algorithms = {key: algorithm_of(entry) for key, entry in table.items()}
        self._found: dict[tuple[int, int, int, torch.dtype], bytes | None] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """x @ weight.T; None: use cuBLAS."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None:
            return None
        out = x.new_empty(x.shape[0], weight.shape[0])
        return out if self._library.run(x, weight, out, algorithm, accumulate=False) else None

    def linear_add(self, stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Add x @ weight.T to `stream`, in place; False: `stream` is unchanged, use cuBLAS."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None or stream.data_ptr() % ALIGNMENT or stream.stride(1) != 1:
            return False
        return self._library.run(x, weight, stream, algorithm, accumulate=True)

    def _algorithm(self, x: torch.Tensor, weight: torch.Tensor) -> bytes | None:
        rows, (n, k) = x.shape[0], weight.shape
        key = rows, n, k, x.dtype
        if key not in self._found:
            known = self._algorithms.get(key_of(grid_rows(rows), n, k, x.dtype))
            self._found[key] = known if rows >= MIN_ROWS else None
        found = self._found[key]
        aligned = not (x.data_ptr() | weight.data_ptr() | (x.stride(0) * x.itemsize)) % ALIGNMENT
        return found if found is not None and aligned and x.stride(1) == 1 and weight.stride(1) == 1 else None


@functools.cache
def tuned_gemms() -> TunedGemms | None:
    """GEMMs with measured algorithms on the current device; None if there are none."""
    found = library()
    if found is None:
        return None
    shipped, own = table_paths(current_gpu(), found.version)
    table = read_table(shipped) | read_table(own)
    return TunedGemms(found, table) if table else None


def table_paths(gpu: Gpu, version: int) -> tuple[Path, Path]:
    """The shipped and the user's table of a version of the library."""
    return shipped_path(gpu, f"cublas-{version}"), own_path(gpu, f"cublas-{version}")


def key_of(rows: int, n: int, k: int, dtype: torch.dtype) -> str:
    """A GEMM's key in a table."""
    return f"{rows} {n}x{k} {dtype_name(dtype)}"


def algorithm_of(entry: Entry) -> bytes | None:
    """The algorithm of a table's entry; None where cuBLAS's choice won, and for a malformed one."""
    try:
        found = bytes.fromhex(entry["algorithm"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if len(found) == 64 else None


def grid_rows(rows: int) -> int:
    """The row count of the grid whose algorithm serves `rows`."""
    return bucket_of(rows, ROW_GRID) or ROW_GRID[-1]


# Measuring


class CublasTimer:
    """Times GEMMs of any number of rows in CUDA graphs, over weights that are not in L2."""

    def __init__(self) -> None:
        self._graphs = GraphTimer()

    def time(self, gemm: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], rows: int) -> float:
        """Microseconds."""
        n, k = weights[0].shape
        estimate = max(n * k * 2 / 4e6, 2 * rows * n * k / _TENSOR_OPS) + 2.0
        self._graphs.replays = 1 if estimate * len(weights) > 2000 else 3
        gemm(weights[0])  # the library's first-call initialization must not be captured
        return self._graphs.time(gemm, weights, estimate)


def measured_rows(n: int) -> list[int]:
    """The row counts to measure for a weight of n outputs."""
    return [rows for rows in ROW_GRID if rows <= HEAD_ROWS or n < HEAD_OUTPUTS]


def sampled_rows(rows: int) -> list[int]:
    """The row counts at which an algorithm for `rows` is measured."""
    before = (MIN_ROWS - 1, *ROW_GRID)[ROW_GRID.index(rows)]
    return [rows, (rows + before) // 2]


def measure_algorithms(lt: CublasLt, n: int, k: int, rows: int, dtype: torch.dtype, timer: CublasTimer) -> Entry:
    """A table's entry for a weight [n, k]: without an algorithm where cuBLAS's choice won."""
    copies = max(1, min(8, -(-COLD_BYTES // (n * k * dtype.itemsize))))
    weights = random_inputs(GemmShape("linear", n, k), 1, dtype, copies).weights
    ours: dict[bytes, list[float]] = {}
    cublas: list[float] = []
    for count in sampled_rows(rows):
        x = torch.randn(count, k, dtype=dtype, device=weights[0].device)
        out = x.new_empty(count, n)
        if not cublas:
            ours = {algorithm: [] for algorithm in lt.algorithms(x, weights[0], out, CANDIDATES)}
        cublas.append(timer.time(functools.partial(F.linear, x), weights, count))
        expected = F.linear(x, weights[0]).float()
        for algorithm, times in list(ours.items()):
            gemm = functools.partial(_multiply, lt, x, out, algorithm)
            out.fill_(float("nan"))
            if gemm(weights[0]) and (out.float() - expected).norm() < _TOLERANCE * expected.norm():
                times.append(timer.time(gemm, weights, count))
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
    return lt.run(x, weight, out, algorithm, accumulate=False)
