"""What the skinny GEMM kernels share: the description of a GEMM, weight prefetch, and the epilogue."""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.adapters import SlotLowRank


@dataclass(frozen=True)
class GemmConfig:
    """A kernel and its tile shape."""

    kernel: str
    """`vector`, `direct`, `dot` or `tile`."""
    block_n: int
    """Outputs per program (with a gate: gate features, and as many up features)."""
    block_m: int = 16
    """Rows per program (`direct`, `dot`, `tile`)."""
    block_k: int = 64
    """Inputs per loop iteration: of each warp (`direct`, where it is fixed; `dot`), of the program (`tile`)."""
    warps: int = 4
    stages: int = 4
    """Software-pipeline stages (`dot`, `tile`); chunks of weights in flight (`direct`)."""
    split: int = 1
    """Split-K: programs that share the inputs of a tile (`tile`)."""
    programs: int = 0
    """Persistent programs per multiprocessor (`vector`, `direct`: for many tiles; `tile`: stream-K); 0: one a tile."""
    tma: bool = False
    """Whether TMA loads the tiles, rather than the threads (`tile`)."""
    early: bool = False
    """Whether dependents are launched before `gdc_wait` rather than after (`vector`, `direct`)."""


@dataclass(slots=True)
class Gemm:
    """One GEMM: its inputs, and what is fused into it."""

    x: torch.Tensor
    """[rows, in]."""
    weight: torch.Tensor
    """[out, in]; under `silu` [gate and up, in]."""
    bias: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    """The norm's weight [in]; None: no norm."""
    residual: torch.Tensor | None = None
    """Added to x before the norm."""
    eps: float = 0.0
    silu: bool = False
    stream: torch.Tensor | None = None
    """Output of residual + x."""
    low: SlotLowRank | None = None
    """What adapters change (`vector`)…"""
    inner: torch.Tensor | None = None
    """…and the rows' inner products with it, which another kernel has computed."""

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def depth(self) -> int:
        return self.x.shape[1]

    def new_output(self) -> torch.Tensor:
        """An uninitialized tensor for the result [rows, out]."""
        return self.x.new_empty(self.x.shape[0], self.weight.shape[0] // (2 if self.silu else 1))


class GemmLaunch(NamedTuple):
    """A kernel about to run, and the tensor it will fill."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """Its constexpr arguments and launch options."""
    out: torch.Tensor


@triton.jit
def prefetch_rows(at, K, SPANS: tl.constexpr, SPAN: tl.constexpr):
    """Prefetch the first SPANS * SPAN values of the rows of K values that begin `at` into L2."""
    BYTES: tl.constexpr = SPAN * at.dtype.element_ty.primitive_bitwidth // 8
    # In a shorter row the last spans coincide.
    offset = tl.minimum(tl.arange(0, SPANS) * SPAN, K - SPAN)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at[:, None] + offset[None, :], BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@functools.cache
def prefetch_shape(rows: int, depth: int, itemsize: int, warps: int) -> tuple[int, int]:
    """(SPANS, SPAN) of `prefetch_rows` over rows of `depth` values: one span per thread, of at most 512 bytes.

    That is up to 16 KB per warp: enough to cover the wait for the preceding kernel, little enough that all resident
    programs can do so at once without evicting each other's weights.
    """
    spans = max(1, 32 * warps // rows)
    # Aligned to 16 bytes, like the row.
    aligned = 16 // itemsize
    span = max(depth // spans // aligned, 1) * aligned
    return spans, min(span, 512 // itemsize)


@triton.jit
def finish(out, up, bias, y, row, column, rows, N, SILU: tl.constexpr):
    """Epilogue of a block of outputs: bias, gate, store; `row` and `column` broadcast to its shape."""
    inside = column < N
    if bias is not None:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias + N + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        out = out / (1 + tl.exp(-out)) * up
    tl.store(y + row.to(tl.int64) * N + column, out.to(y.dtype.element_ty), mask=inside & (row < rows))
