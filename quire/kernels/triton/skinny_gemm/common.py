"""What the kernels of `thin` share: what a product is, weights brought in ahead of time, and the end of a product."""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Config:
    """A kernel and the shape of its programs."""

    kernel: str
    """`vector`, `dot` or `tile`."""
    block_n: int
    """Outputs of a program (under the gate: gate features, and as many gated ones)."""
    block_m: int = 16
    """Rows of a program (`dot`, `tile`)."""
    block_k: int = 64
    """Inputs of one step of the loop: of each warp (`dot`), of the program (`tile`)."""
    warps: int = 4
    stages: int = 4
    """Steps of the loop whose reads are under way (`dot`, `tile`)."""
    split: int = 1
    """Programs that share the inputs of a tile (`tile`)."""
    programs: int = 0
    """Programs a multiprocessor, which share everything equally (`vector`, `tile`); 0: one program a tile."""
    tma: bool = False
    """Whether the copy engine reads the tiles, rather than the threads (`tile`)."""
    early: bool = False
    """Whether the next kernel may start before the one ahead of this has ended, rather than after (`vector`)."""


@dataclass(slots=True)
class Product:
    """One product: its inputs, and what is folded into it."""

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
    """Where residual + x goes."""

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def depth(self) -> int:
        return self.x.shape[1]

    def new_output(self) -> torch.Tensor:
        """Room for the result [rows, out]."""
        return self.x.new_empty(self.x.shape[0], self.weight.shape[0] // (2 if self.silu else 1))


class Launch(NamedTuple):
    """A kernel about to run, and the tensor it will fill."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    meta: dict[str, Any]
    """What it is compiled with."""
    out: torch.Tensor


@triton.jit
def prefetch_rows(at, K, PIECES: tl.constexpr, SPAN: tl.constexpr):
    """Bring the first PIECES * SPAN values of the rows of K values that begin `at` into the L2 cache."""
    BYTES: tl.constexpr = SPAN * at.dtype.element_ty.primitive_bitwidth // 8
    # In a row that is shorter the last pieces coincide.
    piece = tl.minimum(tl.arange(0, PIECES) * SPAN, K - SPAN)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at[:, None] + piece[None, :], BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@functools.cache
def prefetch_shape(rows: int, depth: int, itemsize: int, warps: int) -> tuple[int, int]:
    """(PIECES, SPAN) of `prefetch_rows` over rows of `depth` values: one piece a thread, 512 bytes of it at most.

    That is up to 16 KB a warp: enough to cover the wait for the kernel before, little enough for every program of the
    card to do so at once without pushing each other's weights out of the cache.
    """
    pieces = max(1, 32 * warps // rows)
    # Aligned to 16 bytes, like the row.
    aligned = 16 // itemsize
    span = max(depth // pieces // aligned, 1) * aligned
    return pieces, min(span, 512 // itemsize)


@triton.jit
def finish(out, up, bias, y, row, column, rows, N, SILU: tl.constexpr):
    """Bias, gate and store of a block of outputs; `row` and `column` broadcast to its shape."""
    inside = column < N
    if bias is not None:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias + N + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        out = out / (1 + tl.exp(-out)) * up
    tl.store(y + row.to(tl.int64) * N + column, out.to(y.dtype.element_ty), mask=inside & (row < rows))
