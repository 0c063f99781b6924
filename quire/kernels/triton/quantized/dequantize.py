"""A weight-only matrix into 16 bits, for products of many rows by cuBLAS.

Bytes: codes, scales and zeros in, 2 bytes a weight out: 80 microseconds for [28672, 4096] on an H200. One scratch
matrix serves all layers: products run one after the other on one stream, and graphs keep its address.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized.gemm import WordWeight
from quire.kernels.triton.quantized.tile_rows import _load_groups, _weights
from quire.kernels.triton.quantized.words import split, weight_of, word_at

BLOCK_N, SPANS = 32, 4
"""Outputs and spans of a program: 16 KB of codes a multiprocessor in flight with two programs."""


@triton.jit
def _dequantize(
    codes, scale, zero, minimum, factor, out, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    BLOCKS: tl.constexpr = (K // SPAN + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    lines = tl.minimum(program // BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    column = tl.arange(0, WORDS)[None, :]
    factors = None
    if factor is not None:
        factors = tl.load(factor + lines)
    first = program % BLOCKS * BLOCK_K
    tiles = ()
    groups = ()
    for index in tl.static_range(BLOCK_K):
        span = tl.minimum(first + index, K // SPAN - 1)
        tiles = tiles + (
            tl.load(
                codes + word_at(lines[:, None], span, column, K, FIELDS, WORDS, LINES), eviction_policy="evict_first"
            ),
        )  # fmt: skip
        groups = groups + (_load_groups(scale, zero, minimum, lines, span, GROUPS, GROUP, SPAN, LINES),)
    if PDL:
        # The preceding kernel may still read the scratch matrix.
        gdc_wait()
        gdc_launch_dependents()
    for index in tl.static_range(BLOCK_K):
        span = tl.minimum(first + index, K // SPAN - 1)
        fields = split(tiles[index], FORMAT, DTYPE)
        for field in tl.static_range(FIELDS):
            weights = _weights(
                fields, groups[index], factors, field, WORDS, GROUP, SPAN, FORMAT, minimum is not None, DTYPE
            )
            tl.store(out + lines[:, None] * K + span * SPAN + field * WORDS + column, weight_of(weights, FORMAT, DTYPE))


def dequantize(weight: WordWeight, out: torch.Tensor) -> torch.Tensor:
    """The numbers [outputs, inputs], written to `out`."""
    blocks = triton.cdiv(weight.outputs, BLOCK_N) * triton.cdiv(weight.inputs // weight.span, SPANS)
    _dequantize[(blocks,)](*weight.tensors, out, weight.outputs, **_constants(weight))
    return out


def compile_dequantize(weight: WordWeight) -> None:
    """Compile the kernel, without running it; the weight may be on the `meta` device."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=weight.dtype, device="meta")
    _dequantize.warmup(*weight.tensors, out, weight.outputs, grid=(1,), **_constants(weight))


def _constants(weight: WordWeight) -> dict[str, Any]:
    return weight.constants | {"BLOCK_N": BLOCK_N, "BLOCK_K": SPANS, "num_warps": 4, **pdl()}


_scratch: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}


def scratch(weight: WordWeight) -> torch.Tensor:
    """The scratch matrix, in this weight's shape. Larger ones replace it, but graphs keep those they were given."""
    held = _scratch.setdefault((weight.codes.device, weight.dtype), [])
    size = weight.outputs * weight.inputs
    if not held or held[-1].numel() < size:
        held.append(torch.empty(size, dtype=weight.dtype, device=weight.codes.device))
    return held[-1][:size].view(weight.outputs, weight.inputs)
