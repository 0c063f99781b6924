"""Attention with norms of queries and keys that are not RMS norms of single heads: those are in the kernels."""

from __future__ import annotations

import torch

from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext
from quire.layers.norm import HeadLayerNorm, WideRMSNorm
from quire.models.llama import LlamaAttention, LlamaVariant


class NormedAttention(LlamaAttention):
    """Attention with any norm of the queries and of the keys before the rotation."""

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, before `o_proj`."""
        dim = self.heads.dim
        q, k, v = qkv.split([len(self.heads.query) * dim, *[len(self.heads.kv) * dim] * 2], dim=-1)
        return super().forward(torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1), positions, kv, inputs, last)


class WideNormAttention(NormedAttention):
    """An RMS norm over all query heads at once, and one over all key heads."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        config, heads = build.config, self.heads
        self.q_norm = WideRMSNorm(build, "q_norm", config.num_heads * heads.dim, heads.rows)
        self.k_norm = WideRMSNorm(build, "k_norm", config.num_kv_heads * heads.dim, heads.kv_rows)


class HeadNormAttention(NormedAttention):
    """A layer norm of each head, with weights of its own."""

    names: tuple[str, str] = ("q_norm.weight", "k_norm.weight")

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        config, heads, pairs = build.config, self.heads, variant.interleaved_rotary
        self.q_norm = HeadLayerNorm(build, self.names[0], heads.query, config.num_heads, heads.dim, pairs)
        self.k_norm = HeadLayerNorm(build, self.names[1], heads.kv, config.num_kv_heads, heads.dim, pairs)
