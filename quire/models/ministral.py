"""Ministral: Mistral with windows layer by layer. Ministral 3 scales queries by their position."""

from __future__ import annotations

import torch

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaVariant
from quire.models.mistral import MistralForCausalLM


class PositionScaledAttention(LlamaAttention):
    """Attention whose queries grow with the logarithm of their position, in steps of the original length."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        rope = build.config.rope
        steps = torch.arange(build.max_model_len, device=build.device) // rope["original_max_position_embeddings"]
        factors = 1 + rope["llama_4_scaling_beta"] * torch.log1p(steps.float())
        self.register_buffer("factors", factors.to(build.dtype).unsqueeze(1), persistent=False)

    factors: torch.Tensor

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, before `o_proj`."""
        qkv[:, : len(self.heads.query) * self.heads.dim] *= self.factors[positions]
        return super().forward(qkv, positions, kv, inputs, last)


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral 8B and its relatives."""


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3."""

    def __init__(self, build: BuildContext) -> None:
        scaled = build.config.rope.get("llama_4_scaling_beta") is not None
        if scaled and not build.config.rope.get("original_max_position_embeddings"):
            raise UnsupportedModelError("llama_4_scaling_beta needs original_max_position_embeddings in the rope")
        super().__init__(build, LlamaVariant(attention=PositionScaledAttention if scaled else None))


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Mistral Small 3.1 and later, and Ministral 3, as published: with a vision tower, which is read apart."""

    def ignores(self, name: str) -> bool:
        """The vision tower, too."""
        other_parts = ("vision_tower.", "multi_modal_projector.")
        return name.removeprefix("model.").startswith(other_parts) or super().ignores(name)
