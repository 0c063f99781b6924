"""cuBLAS's products by algorithms that were measured, not by those it would choose.

cuBLAS knows hundreds of kernels and chooses by a heuristic; for products of many rows it is often a few percent off.
cuBLASLt, the library underneath, names its best guesses as *algorithms*: 64 bytes that mean the same to one version of
the library for ever. `triton/cublas_timing.py` measures them. Those that win are in tables for a card and a version:
the user's own, which `quire tune` writes, and the one that comes with quire. What neither knows goes as torch does it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from bisect import bisect_left
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from quire.paths import cache_dir

log = logging.getLogger(__name__)

GRID = (32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
"""Rows that algorithms are measured for: one serves all numbers of rows down to the one before. More go as the last."""
FEW = 16
"""So many rows, or fewer, are not served: the first of the grid was not measured for them."""
WORKSPACE = 32 << 20
"""Bytes that an algorithm may use to add up what several programs computed."""
ALIGNMENT = 16
"""Bytes that tensors are aligned to, at least."""

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT = 68
_TRANSPOSE_A, _TRANSPOSED = 3, 1
_MOST_WORKSPACE, _REDUCTIONS, _LEAST_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_FLOAT = 2  # parts of a sum are added up in the type of computing; in place it would be the output's
_COLUMNS, _STRIDE = 3, 4


class Algorithm(ctypes.Structure):
    """How a product is computed, and whatever came with it."""

    _fields_ = (
        ("data", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self.data).cast("B"))


class CublasLt:
    """The library, on the current device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cublasLtGetVersion.restype = c_size_t
        self.version = int(library.cublasLtGetVersion())
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self._preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        self._prefer(_MOST_WORKSPACE, c_uint64(WORKSPACE))
        self._prefer(_REDUCTIONS, c_uint32(_IN_FLOAT))
        for attribute in _LEAST_ALIGNMENTS:
            self._prefer(attribute, c_uint32(ALIGNMENT))
        self._forms: dict[Any, Form] = {}
        matmul = library.cublasLtMatmul
        matmul.argtypes = [
            c_void_p, c_void_p, POINTER(c_float), c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_float), c_void_p,
            c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p,
        ]  # fmt: skip
        self._matmul = matmul

    def algorithms(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, most: int) -> list[bytes]:
        """What the library would try for out = x @ weight.T, its best guess first."""
        form = self._form(x, weight, out)
        found, count = (Algorithm * most)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, form.product, form.weight, form.x, form.out, form.out,
            self._preference, c_int(most), found, byref(count),
        )  # fmt: skip
        return [bytes(algorithm) for algorithm in found[: count.value] if algorithm.status == 0]

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, algorithm: bytes, onto: bool) -> bool:
        """out = x @ weight.T, added to what is there if `onto`; False: it cannot be done this way, and was not."""
        form = self._form(x, weight, out)
        status: int = self._matmul(
            self._handle, form.product, _ONE, weight.data_ptr(), form.weight, x.data_ptr(), form.x,
            _ONE if onto else _ZERO, out.data_ptr(), form.out, out.data_ptr(), form.out, algorithm,
            self._workspace.data_ptr(), WORKSPACE, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return status == 0

    def _form(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Form:
        key = (weight.shape, weight.stride(0), x.dtype)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._describe(weight)
        rows = x.shape[0], x.stride(0), out.stride(0)
        if form.rows != rows:
            form.rows = rows
            for layout, stride in ((form.x, x.stride(0)), (form.out, out.stride(0))):
                self._set(layout, _COLUMNS, c_uint64(x.shape[0]))
                self._set(layout, _STRIDE, c_int64(stride))
        return form

    def _describe(self, weight: torch.Tensor) -> Form:
        """Columns lie together for this library: it sees our tensors transposed, and x after the weight."""
        kind = _TYPES[weight.dtype]
        n, k = weight.shape
        form = Form()
        self._call("cublasLtMatmulDescCreate", byref(form.product), c_int(_COMPUTE_FLOAT), c_int(_TYPES[torch.float32]))
        transposed = c_int(_TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute", form.product, c_int(_TRANSPOSE_A), byref(transposed), c_size_t(4)
        )  # fmt: skip
        for layout, length, columns in ((form.weight, k, n), (form.x, k, 1), (form.out, n, 1)):
            self._call(
                "cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), c_uint64(length), c_uint64(columns),
                c_int64(length),
            )  # fmt: skip
        self._set(form.weight, _STRIDE, c_int64(weight.stride(0)))
        return form

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


class Form:
    """A product's description: made once for a weight's shape, and changed as its rows change."""

    def __init__(self) -> None:
        self.product, self.weight, self.x, self.out = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        self.rows: tuple[int, int, int] | None = None


_ONE, _ZERO = c_float(1.0), c_float(0.0)


class Products:
    """Products that a table knows a better algorithm for than cuBLAS does."""

    def __init__(self, library: CublasLt, table: dict[str, dict[str, Any]]) -> None:
        """`table`: {"1024 4096x14336 bfloat16": {"algorithm": 128 hexadecimal digits, ...}, ...}, rows of `GRID`."""
        self._library = library
        self._algorithms = {key: algorithm_of(entry) for key, entry in table.items()}
        self._found: dict[tuple[int, int, int, torch.dtype], bytes | None] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """x @ weight.T; None: leave it to cuBLAS."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None:
            return None
        out = x.new_empty(x.shape[0], weight.shape[0])
        return out if self._library.run(x, weight, out, algorithm, onto=False) else None

    def add_linear(self, stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Add x @ weight.T to `stream`, in place; False: nothing was done, leave it to cuBLAS."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None or stream.data_ptr() % ALIGNMENT or stream.stride(1) != 1:
            return False
        return self._library.run(x, weight, stream, algorithm, onto=True)

    def _algorithm(self, x: torch.Tensor, weight: torch.Tensor) -> bytes | None:
        rows, (n, k) = x.shape[0], weight.shape
        key = rows, n, k, x.dtype
        if key not in self._found:
            known = self._algorithms.get(key_of(cell_of(rows), n, k, x.dtype))
            self._found[key] = known if rows > FEW else None
        found = self._found[key]
        aligned = not (x.data_ptr() | weight.data_ptr() | (x.stride(0) * x.itemsize)) % ALIGNMENT
        return found if found is not None and aligned and x.stride(1) == 1 and weight.stride(1) == 1 else None


def algorithm_of(entry: dict[str, Any]) -> bytes | None:
    """The algorithm of a table's entry; None where cuBLAS chooses well, and for what is no algorithm."""
    try:
        found = bytes.fromhex(entry["algorithm"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if len(found) == 64 else None


def cell_of(rows: int) -> int:
    """The number of rows of the grid that stands for so many."""
    return GRID[min(bisect_left(GRID, rows), len(GRID) - 1)]


@functools.cache
def library() -> CublasLt | None:
    """The one that torch has loaded; None where there is none, or no card."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return CublasLt(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"))
    except (OSError, AttributeError, RuntimeError) as error:
        log.debug("cuBLASLt is not used: %s", error)
        return None


def key_of(rows: int, n: int, k: int, dtype: torch.dtype) -> str:
    """A product's name in a table."""
    return f"{rows} {n}x{k} {str(dtype).removeprefix('torch.')}"


def shipped_table(card: str, version: int) -> Path:
    """The table that comes with quire for a card and a version of the library; there may be none."""
    return Path(__file__).parent / "triton" / "tables" / f"{card}-cublas-{version}.json"


def own_table(card: str, version: int) -> Path:
    """The user's table."""
    return cache_dir("tuning", f"{card}-cublas-{version}.json")
