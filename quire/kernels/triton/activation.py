"""The gated activation between the two products of an MLP."""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

BLOCK = 2048
"""Columns of one program: 12 KB of traffic in 16-bit floats. Smaller, and a long prompt is bound by how fast the card
starts programs; larger, and a single row is spread over too few multiprocessors."""


@triton.jit
def _silu_mul(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # One axis for rows and columns: the second axis of a grid ends at 65535, and neighbours should read neighbours.
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
    tl.store(out + row * WIDTH + columns, gate / (1 + tl.exp(-gate)) * up, mask=inside)


@functools.cache
def _meta(width: int) -> tuple[int, dict[str, Any]]:
    """(programs a row, what a launch is compiled with)."""
    block = min(BLOCK, triton.next_power_of_2(width))
    warps = max(block // 512, 1)
    return triton.cdiv(width, block), {"WIDTH": width, "BLOCK": block, "num_warps": warps, **pdl()}


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [rows, 2 * width], gate first; contiguous in the last dimension.

    Bytes: 3 values an output. Operations: about 5 an output, two of them on the special function unit.
    """
    rows, double = gate_up.shape
    width = double // 2
    blocks, meta = _meta(width)
    out = gate_up.new_empty((rows, width))
    _silu_mul[(rows * blocks,)](gate_up, out, gate_up.stride(0), **meta)
    return out
