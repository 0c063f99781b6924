"""Row-wise kernels: RMS norm, alone and with the residual addition fused; the gated activation; the logit mask.

All are bound by memory; each docstring counts its bytes. A norm has one program per row and holds the row in registers
between its two passes (sum of squares, then scaling), so memory is touched once. Weights are loaded before `gdc_wait`:
no kernel writes them, and the load overlaps the end of the preceding kernel.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

MAX_NORM_WIDTH = 32768
"""Widest row that fits the registers of one program."""
EARLY_ROWS = 16
"""Norms of so few rows let the following kernel start before they wait for the preceding one."""
SILU_BLOCK = 2048
"""Columns of a program: 12 KB of traffic in 16-bit floats. Smaller, and a long prompt is bound by the rate at which
programs start; larger, and a single row occupies too few multiprocessors."""
MASK_BLOCK = 2048
"""Tokens of a program."""


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Wait for the preceding kernel. EARLY: the following one, which multiplies the few rows that are normed here, may
    load weights meanwhile."""
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()


@triton.jit
def _normed(values, weight, eps, WIDTH: tl.constexpr):
    """values / rms(values) * weight in float32; lanes past WIDTH hold zeros."""
    inverse = tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    return values * inverse * weight.to(tl.float32)


@triton.jit
def _rms_norm(
    x, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        _begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, _normed(values, scale, eps, WIDTH), mask=inside)


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        _begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    stream = residual + row * residual_stride + columns
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(stream, mask=inside, other=0.0).to(tl.float32)
    # The norm is of the sum as stored, which is what the next layer reads.
    total = values.to(residual.dtype.element_ty)
    tl.store(stream, total, mask=inside)
    tl.store(out + row * WIDTH + columns, _normed(total.to(tl.float32), scale, eps, WIDTH), mask=inside)


@functools.cache
def _norm_constants(width: int, is_early: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options. 16 values per thread: two 16-byte loads in flight per 16-bit input."""
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 32)
    return {"WIDTH": width, "BLOCK": block, "EARLY": is_early, "num_warps": warps, **pdl()}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over rows x [rows, width], contiguous in the last dimension, any row stride.

    Bytes: 2 values per feature (x in, out), and the weight once. Operations: 4 per feature.
    """
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm[(rows,)](x, weight, out, x.stride(0), eps, **_norm_constants(width, rows <= EARLY_ROWS))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place; returns (rms_norm(residual), residual). Rows as in `rms_norm`.

    Bytes: 4 values per feature (x and residual in, residual and out), and the weight once. Operations: 5 per feature.
    """
    rows, width = residual.shape
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    constants = _norm_constants(width, rows <= EARLY_ROWS)
    _add_rms_norm[(rows,)](x, residual, weight, out, x.stride(0), residual.stride(0), eps, **constants)
    return out, residual


@triton.jit
def _gate_mul(
    gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    # One grid axis for rows and columns: the second axis ends at 65535, and adjacent programs read adjacent memory.
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = gate_up + row * stride + columns
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + columns, gate_mul(gate, up, ACTIVATION), mask=inside)


@functools.cache
def _silu_constants(width: int) -> tuple[int, dict[str, Any]]:
    """(programs per row, constexpr arguments and launch options)."""
    block = min(SILU_BLOCK, triton.next_power_of_2(width))
    warps = max(block // 512, 1)
    return triton.cdiv(width, block), {"WIDTH": width, "BLOCK": block, "num_warps": warps, **pdl()}


def silu_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """silu(gate) * up, or another activation, of gate_up [rows, 2 * width], gate first; contiguous in the last
    dimension.

    Bytes: 3 values per output. Operations: about 5 per output, two of them on the special function unit.
    """
    rows, double = gate_up.shape
    width = double // 2
    blocks, constants = _silu_constants(width)
    out = gate_up.new_empty((rows, width))
    _gate_mul[(rows * blocks,)](gate_up, out, gate_up.stride(0), ACTIVATION=activation, **constants)
    return out


def mask_logits(logits: torch.Tensor, indices: torch.Tensor, bits: torch.Tensor) -> None:
    """Set row indices[i] of logits [S, vocab] to -inf, in place, where its token's bit in bits [n, words] is not set.

    Token t has bit t % 32 of word t // 32. Bytes: 4 * words per row read, and the banned logits written; allowed logits
    are neither read nor written.
    """
    if len(indices) == 0:
        return
    vocab = logits.shape[1]
    _mask_kernel[(triton.cdiv(vocab, MASK_BLOCK), len(indices))](
        logits, logits.stride(0), indices, bits, bits.stride(0), vocab, BLOCK=MASK_BLOCK
    )


@triton.jit(do_not_specialize=["row_stride", "word_stride", "vocab"])
def _mask_kernel(logits, row_stride, indices, bits, word_stride, vocab, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.program_id(1).to(tl.int64)
    row = tl.load(indices + entry).to(tl.int64)
    inside = token < vocab
    word = tl.load(bits + entry * word_stride + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * row_stride + token, float("-inf"), mask=inside & banned)
