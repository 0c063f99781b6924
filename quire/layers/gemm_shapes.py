"""The distinct GEMMs and experts of a model: what is compiled ahead of time (`worker/warmup.py`) and tuned."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from quire.kernels.gates import ExpertVariant
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
                router = LayerGemm(module.router, normed, gated=False, bias=module.variant.router_bias is not None)
                gemms.setdefault((tuple(module.router.shape), *router[1:]), router)
        elif isinstance(module, (FusedLinear, ReplicatedLinear, RowParallelLinear, LMHead)):
            gated = isinstance(module, FusedLinear) and module.gated
            has_bias = isinstance(module, (FusedLinear, RowParallelLinear)) and module.bias is not None
            normed = isinstance(module, FusedLinear) and module.normed
            gemm = LayerGemm(module.weight, normed, gated, has_bias)
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
    variant: ExpertVariant

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for experts that the same kernels serve."""
        return kind_of(self.gate_up), kind_of(self.down), *self[2:5], *self.variant.kind


def layer_experts(model: nn.Module) -> list[LayerExperts]:
    """Experts of each shape that `model` has, from one layer each. The weights may be on the meta device."""
    found: dict[object, LayerExperts] = {}
    for module in model.modules():
        if isinstance(module, SparseMLP):
            routing = module.routing
            experts = LayerExperts(
                module.gate_up, module.down, module.choices, routing.renormalise, routing.num_experts, module.variant
            )
            found.setdefault(experts.kind, experts)
    return list(found.values())
