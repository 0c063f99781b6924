"""The distinct GEMMs and experts of a model: what is compiled ahead of time (`worker/warmup.py`) and tuned."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from quire.kernels.weights.base import QuantizedWeight, Weight
from quire.layers.embedding import LMHead
from quire.layers.linear import FusedLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.moe import SparseMLP


class LayerGemm(NamedTuple):
    """A GEMM, and what a step may fuse with it."""

    weight: Weight
    """One of the weights with this shape."""
    normed: bool
    """A norm precedes it (`Ops.norm_linear`)."""
    gated: bool
    bias: bool


def kind_of(weight: Weight) -> tuple[object, ...]:
    """Equal for weights that the same kernels serve."""
    return (*weight.shape, *(weight.layout if isinstance(weight, QuantizedWeight) else ()))


def layer_gemms(model: nn.Module) -> list[LayerGemm]:
    """One GEMM of each shape that `model` has. The weights need not be filled; they may be on the meta device."""
    gemms: dict[object, LayerGemm] = {}
    for module in model.modules():
        if isinstance(module, SparseMLP):
            for normed in (True, False):  # few tokens; many
                router = LayerGemm(module.router, normed=normed, gated=False, bias=False)
                gemms.setdefault((tuple(module.router.shape), *router[1:]), router)
        elif isinstance(module, (FusedLinear, ReplicatedLinear, RowParallelLinear, LMHead)):
            gated = isinstance(module, FusedLinear) and module.gated
            has_bias = isinstance(module, (FusedLinear, RowParallelLinear)) and module.bias is not None
            gemm = LayerGemm(module.weight, isinstance(module, FusedLinear) and module.normed, gated, has_bias)
            gemms.setdefault((kind_of(module.weight), *gemm[1:]), gemm)
    return list(gemms.values())


class LayerExperts(NamedTuple):
    """The experts of a layer, and how many of them a token is routed to."""

    gate_up: Weight
    down: Weight
    top_k: int
    renormalise: bool
    routed: int
    """Experts the router chooses among: more than are on this rank if other ranks hold some."""


def layer_experts(model: nn.Module) -> list[LayerExperts]:
    """Experts of each shape that `model` has, from one layer each. The weights may be on the meta device."""
    found: dict[object, LayerExperts] = {}
    for module in model.modules():
        if isinstance(module, SparseMLP):
            routing = module.routing
            experts = LayerExperts(module.gate_up, module.down, routing.top_k, routing.renormalise, routing.num_experts)
            found.setdefault((kind_of(module.gate_up), kind_of(module.down), *experts[2:]), experts)
    return list(found.values())
