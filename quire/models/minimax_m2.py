"""MiniMax-M2: Mixtral with a norm over all query heads and one over all key heads, and sigmoid routing with a bias."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.routing import RouteRule
from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import ONE_BY_ONE
from quire.layers.moe import Routing, SparseMLP
from quire.models.base import refuse_other_values
from quire.models.llama import LlamaForCausalLM, LlamaVariant
from quire.models.mixtral import PUBLISHED
from quire.models.qk_norms import WideNormAttention

# Fields of the published configs, which transformers does not know: the only values that are implemented.
_FIXED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """MiniMax-M2 and M2.1."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        refuse_other_values(build.config, _FIXED)
        if any(kind != 1 for kind in raw.get("attn_type_list") or ()):
            raise UnsupportedModelError("MiniMax-M2 with linear attention in attn_type_list is not implemented")
        routing = Routing.from_config(build.config, "intermediate_size", renormalise=True)
        routing = replace(routing, rule=RouteRule(sigmoid=True), bias="block_sparse_moe.e_score_correction_bias")

        def experts(build: BuildContext, layer: int) -> nn.Module:
            return SparseMLP(build, routing, layer, (PUBLISHED, ONE_BY_ONE))

        super().__init__(build, LlamaVariant(attention=WideNormAttention, mlp=experts))
