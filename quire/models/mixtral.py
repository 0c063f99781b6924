"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import ONE_BY_ONE, ExpertNaming
from quire.layers.moe import Routing, SparseMLP
from quire.models.llama import LlamaForCausalLM, LlamaVariant

PUBLISHED = ExpertNaming(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral 8x7B, 8x22B and their relatives."""

    def __init__(self, build: BuildContext) -> None:
        routing = Routing.from_config(build.config, "intermediate_size", renormalise=True)

        def experts(build: BuildContext, layer: int) -> nn.Module:
            return SparseMLP(build, routing, layer, (PUBLISHED, ONE_BY_ONE))

        super().__init__(build, LlamaVariant(mlp=experts))
