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
from quire.layers.build_context import quantized_weights

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_copies(model: nn.Module, allowed: int) -> int:
    """Give every weight-only matrix a 16-bit copy, if all of them fit into `allowed` bytes; returns the bytes taken."""
    weights = [weight for held in quantized_weights(model) for weight in _parts(held)]
    wanted = [weight for weight in weights if weight.is_weight_only and weight.dim() == 2]
    total = sum(weight.numel() * weight.dtype.itemsize for weight in wanted)
    if not wanted or total > allowed:
        if wanted:
            logger.info(
                "no 16-bit copies of quantized weights: they need %.1f GiB, %.1f GiB may be used",
                total / 2**30,
                allowed / 2**30,
            )
        return 0
    for weight in wanted:
        weight.copy = weight.dequantize().contiguous()
    logger.info("16-bit copies of quantized weights, for steps of many rows: %.1f GiB", total / 2**30)
    return total


def _parts(weight: QuantizedWeight) -> list[QuantizedWeight]:
    if isinstance(weight, SplitWeight):
        return [part for part in weight.parts if isinstance(part, QuantizedWeight)]
    return [weight]
