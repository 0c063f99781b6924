"""Row-wise kernels of vision transformers: layer norm with the residual addition fused, and the rotation of heads.

Both are bound by memory; each docstring counts its bytes. An image of 1,024 x 1,024 pixels is 5,476 patches of 1,280
features: 14 MB for each pass over them, which torch makes three to eight times, some of them in float32.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

_TOKENS = 16
"""Of a program that rotates."""


@triton.jit(do_not_specialize=["eps"])
def _add_layer_norm(
    x, residual, weight, bias, out, x_stride, residual_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        stream = residual + row * residual_stride + columns
        values += tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the sum as stored, which is what the next layer reads.
        total = values.to(residual.dtype.element_ty)
        tl.store(stream, total, mask=inside)
        values = total.to(tl.float32)
    mean = tl.sum(values) / WIDTH
    centred = tl.where(inside, values - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, centred * inverse * scale + shift, mask=inside)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, and its layer norm; or the layer norm of x. Rows contiguous in their last dimension.

    Bytes: 4 values per feature (x and residual in, residual and out), or 2; weight and bias once.
    """
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    stream = x if residual is None else residual
    _add_layer_norm[(rows,)](
        x, stream, weight, bias, out, x.stride(0), stream.stride(0), eps, WIDTH=width, BLOCK=block,
        ADDS=residual is not None, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotate(x, cos, sin, tokens, stride, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (columns < HALF)[None, :]
    turn = row[:, None] * HALF + columns[None, :]
    c = tl.load(cos + turn, mask=inside, other=0.0)
    s = tl.load(sin + turn, mask=inside, other=0.0)
    start = x + row[:, None].to(tl.int64) * stride + columns[None, :]
    for head in range(HEADS):
        at = start + head * DIM
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, first * c - second * s, mask=inside)
        tl.store(at + HALF, second * c + first * s, mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [tokens, heads, dim] in place: pairs half a head apart, in float32. The dimensions of a token are
    contiguous; cos and sin [tokens, dim / 2] are float32.

    Bytes: 2 values per feature, and 8 bytes per token and pair, once for all heads.
    """
    tokens, heads, dim = x.shape
    size = min(_TOKENS, 4) if INTERPRETED else _TOKENS
    _rotate[(triton.cdiv(tokens, size),)](
        x, cos, sin, tokens, x.stride(0), HEADS=heads, DIM=dim, TOKENS=size,
        BLOCK=triton.next_power_of_2(dim // 2), num_warps=4,
    )  # fmt: skip
