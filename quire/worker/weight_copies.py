"""16-bit copies of weights in few bits, for steps of many rows.

Weight-only products read few bytes, which is what a step of few rows waits for. A step of many rows waits for
arithmetic, and there a 16-bit weight is faster than one that must be dequantized first. Where the device has memory to
spare, it has both: values are the same, so tokens are too.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.layers.build_context import quantized_weights

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_copies(model: nn.Module, allowed: int) -> int:
    """Give every weight-only matrix a 16-bit copy, if all of them fit into `allowed` bytes, and as many layers' experts
    as fit into the rest; returns the bytes taken."""
    weights = [weight for held in quantized_weights(model) for weight in _parts(held) if weight.is_weight_only]
    matrices = [weight for weight in weights if weight.dim() == 2]
    stacks = [weight for weight in weights if weight.dim() == 3 and isinstance(weight, (Fp4Weight, GroupedWeight))]
    total = sum(_bytes(weight) for weight in matrices)
    if total > allowed:
        logger.info(
            "no 16-bit copies of quantized weights: they need %.1f GiB, %.1f GiB may be used (weight_copy_share)",
            total / 2**30,
            allowed / 2**30,
        )
        matrices, total = [], 0
    wanted = len(stacks)
    while total + sum(map(_bytes, stacks)) > allowed:
        stacks = stacks[:-2]  # a layer has two
    total += sum(map(_bytes, stacks))
    for weight in (*matrices, *stacks):
        weight.copy = _dequantized(weight)
    if total:
        logger.info("16-bit copies of quantized weights, for steps of many rows: %.1f GiB", total / 2**30)
    if len(stacks) < wanted:
        logger.info("%d of %d stacks of experts have copies (weight_copy_share)", len(stacks), wanted)
    return total


def _bytes(weight: QuantizedWeight) -> int:
    return weight.numel() * weight.dtype.itemsize


def _dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """Its values. Of a stack, an expert at a time: dequantizing takes more memory than the result."""
    if weight.dim() == 2:
        return weight.dequantize().contiguous()
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if weight.device.type == "cuda":
        from quire.kernels.triton.quantized.expert_scratch import dequantize_stack
        from quire.kernels.triton.quantized.expert_stacks import stack_of

        if (stack := stack_of(weight)) is not None:
            return dequantize_stack(stack, out.view(-1))
    for index in range(weight.shape[0]):
        out[index] = weight[index].dequantize()
    return out


def _parts(weight: QuantizedWeight) -> list[QuantizedWeight]:
    if isinstance(weight, SplitWeight):
        return [part for part in weight.parts if isinstance(part, QuantizedWeight)]
    return [weight]
