"""Norms and gates after a recurrence, and the output gate of attention. Row-wise: values go in and out once."""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.recurrent.common import power_of_two, silu

GATE_BLOCK = 1024


@triton.jit
def _norm_gate(
    x, gate, gate_stride, weight, out, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight + lane, mask=lane < DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    inside = (lane < DIM) & (head < HEADS)
    at = head * DIM + lane
    values = tl.load(x + token * (HEADS * DIM) + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None] * gain
    tl.store(out + token * (HEADS * DIM) + at, values * silu(z), mask=inside)


def norm_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = rms_norm(x) * weight * silu(gate), the norm over each head of x [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    block = power_of_two(dim)
    group = max(min(2048 // block, power_of_two(heads)), 1)
    _norm_gate[(tokens, -(-heads // group))](
        x, gate, gate.stride(0), weight, out, eps, HEADS=heads, DIM=dim, BLOCK=block, GROUP=group, num_warps=4, **pdl()
    )


@triton.jit
def _gated_norm(
    x, x_stride, gate, gate_stride, weight, out, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    at = tl.program_id(1) * WIDTH + lane
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    values = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    values *= silu(tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    values *= tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    tl.store(out + token * (GROUPS * WIDTH) + at, values * gain, mask=inside)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """rms_norm(x * silu(gate)) * weight, the norm over each of `groups` equal parts of a row."""
    tokens, width = len(x), x.shape[1] // groups
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    _gated_norm[(tokens, groups)](
        x, x.stride(0), gate, gate.stride(0), weight, out, eps, GROUPS=groups, WIDTH=width, BLOCK=block,
        num_warps=max(1, min(16, block // 256)), **pdl(),
    )  # fmt: skip
    return out


@triton.jit
def _sigmoid_mul(x, gate, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < WIDTH
    values = tl.load(x + token * WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + token * WIDTH + lane, values / (1.0 + tl.exp(-gates)), mask=inside)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x *= sigmoid(gate), in place; x is contiguous."""
    tokens, width = x.shape
    _sigmoid_mul[(tokens, -(-width // GATE_BLOCK))](
        x, gate, gate.stride(0), WIDTH=width, BLOCK=GATE_BLOCK, num_warps=4, **pdl()
    )
    return x
