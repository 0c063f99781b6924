"""Granite 3: Llama with factors on the embedding, on attention scores, on what a layer adds, and on the logits."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import ExpertNaming
from quire.layers.moe import Routing, SparseMLP
from quire.loading.model_config import ModelConfig
from quire.models.base import refuse_other_values
from quire.models.llama import LlamaForCausalLM, LlamaVariant

_GATE_UP, _IN_MEMORY_GATE_UP = "block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"
_PUBLISHED = ExpertNaming(
    "block_sparse_moe.router.layer.weight", _GATE_UP, _GATE_UP, "block_sparse_moe.output_linear.weight"
)
_IN_MEMORY = ExpertNaming(
    "block_sparse_moe.router.weight", _IN_MEMORY_GATE_UP, _IN_MEMORY_GATE_UP, "block_sparse_moe.experts.down_proj"
)
EXPERT_NAMINGS = (_PUBLISHED, _IN_MEMORY)
IMPLEMENTED = {"position_embedding_type": "rope", "normalization_function": "rmsnorm"}


def with_factors(variant: LlamaVariant, config: ModelConfig) -> LlamaVariant:
    """The variant with Granite's four factors.

    What layers add is not multiplied by `residual_multiplier`; the stream is kept divided by it instead. An RMS norm
    of the stream does not notice, once its epsilon is divided by the factor's square.
    """
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, logits = (float(config.raw.get(name) or 1.0) for name in names)
    eps = config.norm_eps / residual**2
    return replace(
        variant, embedding_scale=embedding / residual, norm_eps=eps, attention_scale=attention, logit_scale=1 / logits
    )


class GraniteForCausalLM(LlamaForCausalLM):
    """The dense Granite 3 models."""

    def __init__(self, build: BuildContext) -> None:
        refuse_other_values(build.config, IMPLEMENTED)
        bias, mlp_bias = (bool(build.config.raw.get(name, False)) for name in ("attention_bias", "mlp_bias"))
        super().__init__(build, with_factors(LlamaVariant(bias, bias, mlp_bias), build.config))


class GraniteMoeForCausalLM(LlamaForCausalLM):
    """The Granite 3 mixtures."""

    def __init__(self, build: BuildContext) -> None:
        refuse_other_values(build.config, IMPLEMENTED)
        bias = bool(build.config.raw.get("attention_bias", False))
        routing = Routing.from_config(build.config, "intermediate_size", renormalise=True)

        def experts(build: BuildContext, layer: int) -> nn.Module:
            return SparseMLP(build, routing, layer, EXPERT_NAMINGS)

        super().__init__(build, with_factors(LlamaVariant(bias, bias, mlp=experts), build.config))
