"""GLM-4 (arXiv 2406.12793), GLM-4-0414, GLM-4.5 (arXiv 2508.06471) and GLM-4.7-Flash.

GLM-4 is Llama that rotates half of each head, in neighbouring pairs; 0414 also norms the outputs of attention and MLP.
GLM-4.5 to 4.7 are mixtures routed as DeepSeek V3's; Flash has its latent attention too.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.models.deepseek import (
    DeepseekV3ForCausalLM,
    SharedMixture,
    is_of_prediction_layer,
    is_sparse,
    sigmoid_routing,
)
from quire.models.llama import LlamaForCausalLM, LlamaMLP, LlamaVariant
from quire.models.plain_layers import PreNormLayer


class SandwichLayer(PreNormLayer):
    """Attention, then MLP, each on a norm of the stream; their outputs are normed before they are added to it."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.post_self_attn_layernorm = variant.make_norm(build, "post_self_attn_layernorm")
        self.post_mlp_layernorm = variant.make_norm(build, "post_mlp_layernorm")

    def forward(
        self, hidden: torch.Tensor, residual: None, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, None]:
        attended, kept = self.attend(self.input_layernorm.normed(hidden), positions, kv, inputs)
        hidden = hidden[kept] + self.post_self_attn_layernorm.normed(attended)
        output = self.mlp.forward_normed(self.post_attention_layernorm.normed(hidden))
        return hidden + self.post_mlp_layernorm.normed(output), None


class GlmForCausalLM(LlamaForCausalLM):
    """GLM-4-9B and GLM-Edge."""

    layer: type[nn.Module] | None = None

    def __init__(self, build: BuildContext) -> None:
        config = build.config

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return LlamaMLP(build, is_fused=True)

        variant = LlamaVariant(
            qkv_bias=bool(config.raw.get("attention_bias", False)),
            interleaved_rotary=int(config.head_dim * config.rope.get("partial_rotary_factor", 1.0)),
            mlp=mlp,
            layer=self.layer,
        )
        super().__init__(build, variant)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 and GLM-Z1."""

    layer = SandwichLayer


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4.5, 4.5-Air, 4.6 and 4.7."""

    prediction = "nextn"

    def __init__(self, build: BuildContext) -> None:
        config, raw = build.config, build.config.raw
        routing = sigmoid_routing(config)

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            if not is_sparse(config, layer):
                return LlamaMLP(build)
            return SharedMixture(build, routing, layer, raw.get("n_shared_experts") or 0)

        bias, qk_norm = bool(raw.get("attention_bias", False)), bool(raw.get("use_qk_norm", False))
        super().__init__(build, LlamaVariant(qkv_bias=bias, qk_norm=qk_norm, mlp=mlp))

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_of_prediction_layer(name, self.build.config)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""
