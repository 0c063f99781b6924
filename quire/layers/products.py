"""The matrix products of a model, for those who prepare for them: compilers ahead of time, and `quire tune`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.embedding import LMHead
from quire.layers.linear import FusedLinear, RowParallelLinear


class LayerProduct(NamedTuple):
    """A product, and what a step may fold into it."""

    weight: torch.Tensor
    """One of those that have this form."""
    normed: bool
    """A norm comes before it (`Ops.norm_linear`)."""
    gated: bool
    bias: bool


def layer_products(model: nn.Module) -> list[LayerProduct]:
    """One product of each form that `model` has. The weights need not be filled, nor be anywhere."""
    products: dict[object, LayerProduct] = {}
    for module in model.modules():
        if isinstance(module, (FusedLinear, RowParallelLinear, LMHead)):
            gated = isinstance(module, FusedLinear) and module.gated
            bias = getattr(module, "bias", None) is not None
            product = LayerProduct(module.weight, isinstance(module, FusedLinear), gated, bias)
            products.setdefault((tuple(module.weight.shape), *product[1:]), product)
    return list(products.values())
