"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with mixtures of experts, without a shared expert."""

from __future__ import annotations

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.moe import SparseMLP
from quire.models.llama import LlamaForCausalLM, LlamaMLP, LlamaVariant
from quire.models.qwen2_moe import qwen_routing, sparse_layers


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their relatives."""

    renormalises = False
    """Whether the weights of the chosen experts are made to sum to 1, if the config does not say."""
    sparse_mlp: type[SparseMLP] = SparseMLP

    def __init__(self, build: BuildContext) -> None:
        routing = qwen_routing(build.config, self.renormalises)
        sparse = sparse_layers(build.config)
        bias = bool(build.config.raw.get("attention_bias", False))

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return self.sparse_mlp(build, routing, layer) if layer in sparse else LlamaMLP(build)

        super().__init__(build, LlamaVariant(qkv_bias=bias, output_bias=bias, qk_norm=True, mlp=mlp))
