"""The matrix products of a model, for those who prepare for them: compilers ahead of time, and `quire tune`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.embedding import LMHead
from quire.layers.linear import FusedLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.moe import SparseMLP


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
        if isinstance(module, SparseMLP):
            for normed in (True, False):  # few tokens; many
                router = LayerProduct(module.router, normed=normed, gated=False, bias=False)
                products.setdefault((tuple(module.router.shape), *router[1:]), router)
        elif isinstance(module, (FusedLinear, ReplicatedLinear, RowParallelLinear, LMHead)):
            gated = isinstance(module, FusedLinear) and module.gated
            bias = getattr(module, "bias", None) is not None
            product = LayerProduct(module.weight, isinstance(module, FusedLinear), gated, bias)
            products.setdefault((tuple(module.weight.shape), *product[1:]), product)
    return list(products.values())


class LayerExperts(NamedTuple):
    """The experts of a layer, and how many of them a token goes to."""

    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    renormalise: bool
    routed: int
    """Experts the router chooses among: more than there are here, where other ranks hold some."""


def layer_experts(model: nn.Module) -> list[LayerExperts]:
    """Experts of each form that `model` has: those of one layer. The weights need not be filled, nor be anywhere."""
    found: dict[object, LayerExperts] = {}
    for module in model.modules():
        if isinstance(module, SparseMLP):
            routing = module.routing
            experts = LayerExperts(module.gate_up, module.down, routing.top_k, routing.renormalise, routing.num_experts)
            found.setdefault((tuple(module.gate_up.shape), *experts[2:]), experts)
    return list(found.values())
