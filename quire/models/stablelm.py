"""StableLM (arXiv 2402.17834): Llama with layer norms and rotary positions on part of each head."""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.layers.norm import LayerNorm
from quire.models.llama import LlamaForCausalLM, LlamaVariant
from quire.models.plain_layers import ParallelLayer, PreNormLayer
from quire.models.qk_norms import HeadNormAttention


class StableLmAttention(HeadNormAttention):
    """The norms of StableLM 2 12B, a tensor for each head."""

    names = ("q_layernorm.norms.{}.weight", "k_layernorm.norms.{}.weight")


class StableLmForCausalLM(LlamaForCausalLM):
    """StableLM 3B and StableLM 2; in the largest, attention and MLP stand side by side."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        super().__init__(
            build,
            LlamaVariant(
                qkv_bias=bool(raw.get("use_qkv_bias", False)),
                attention=StableLmAttention if raw.get("qk_layernorm") else None,
                layer=ParallelLayer if raw.get("use_parallel_residual") else PreNormLayer,
                norm=LayerNorm,
            ),
        )
