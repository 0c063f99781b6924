"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783), and the parts its relatives share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec, LastTokens
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import GateUpLinear, Heads, QKVLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import rope_table
from quire.models.base import in_other_stage, stage_layers


@dataclass(frozen=True)
class LlamaVariant:
    """How a relative of Llama differs from it."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mlp: Callable[[BuildContext, int], nn.Module] | None = None
    """Makes the MLP of a layer; unset: one like Llama's. Called as `LlamaMLP` is."""
    attention: Callable[[BuildContext, int, torch.Tensor], nn.Module] | None = None
    """Makes the attention of a layer, with its `qkv_proj` and `o_proj`; unset: one like Llama's."""


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config = build.config
        heads = Heads.of_rank(build)
        norms = None
        if variant.qk_norm:
            self.q_norm = RMSNorm(build, "q_norm", heads.dim)
            self.k_norm = RMSNorm(build, "k_norm", heads.dim)
            norms = (self.q_norm.weight, self.k_norm.weight, config.norm_eps)
        self.qkv_proj = QKVLinear(build, heads, variant.qkv_bias)
        self.attention = Attention(build, heads, layer, cos_sin, norms)
        self.o_proj = RowParallelLinear(
            build, "o_proj", config.num_heads * heads.dim, config.hidden_size, variant.output_bias
        )

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, before `o_proj`."""
        return self.attention(qkv, positions, kv, inputs, last)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext, bias: bool = False, width: int | None = None) -> None:
        """`width`: if not the model's intermediate_size."""
        super().__init__()
        config = build.config
        self.gate_up_proj = GateUpLinear(build, bias, width=width)
        self.down_proj = RowParallelLinear(
            build, "down_proj", width or config.intermediate_size, config.hidden_size, bias
        )

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        gated, residual = self.gate_up_proj.norm_linear(norm, x, residual)
        return self.down_proj.linear_add(residual, gated), residual

    def forward_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP's output for an input that is already normed."""
        return self.down_proj(self.gate_up_proj(normed))


class LlamaLayer(nn.Module):
    """Attention, then MLP, each on the norm of the residual stream and added back to it.

    A norm is fused with the product that follows it, and an addition with the next norm, so that a device can do all
    three in one kernel.
    """

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.input_layernorm = RMSNorm(build, "input_layernorm", size)
        self.self_attn = (
            LlamaAttention(build, variant, layer, cos_sin)
            if variant.attention is None
            else variant.attention(build, layer, cos_sin)
        )
        self.post_attention_layernorm = RMSNorm(build, "post_attention_layernorm", size)
        self.mlp = LlamaMLP(build, variant.mlp_bias) if variant.mlp is None else variant.mlp(build, layer)
        self.is_last = layer == build.config.num_layers - 1

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        qkv, residual = self.self_attn.qkv_proj.norm_linear(self.input_layernorm, hidden, residual)
        last, slots = inputs.last if self.is_last else None, inputs.slots
        attended = self.self_attn(qkv, positions, kv, inputs, last)
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            residual, slots = residual[last.tokens], slots[last.tokens]
        hidden = self.self_attn.o_proj.linear_add(residual, attended)
        return self.mlp(self.post_attention_layernorm, hidden, residual, slots)


class LlamaModel(nn.Module):
    """Embedding, layers and final norm: those on this stage."""

    def __init__(self, build: BuildContext, variant: LlamaVariant) -> None:
        super().__init__()
        cos_sin = rope_table(build)
        self.embed_tokens = VocabEmbedding(build, "embed_tokens") if build.ranks.is_first_stage else None
        self.layers = nn.ModuleDict({str(i): LlamaLayer(build, variant, i, cos_sin) for i in stage_layers(build)})
        self.norm = RMSNorm(build, "norm", build.config.hidden_size) if build.ranks.is_last_stage else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self.embed_tokens(tokens)  # type: ignore[misc]  # there on the first stage
        residual = None
        for layer, cache in zip(self.layers.values(), kv, strict=True):
            hidden, residual = layer(hidden, residual, positions, cache, inputs)
        if self.norm is None:  # only the sum is needed; this kernel, which also norms, can be replayed
            return layer.input_layernorm(hidden, residual)[1]  # type: ignore[operator]
        return self.norm(hidden, residual)[0]


class LlamaForCausalLM(nn.Module):
    """Llama 1 to 3, and models published as this architecture."""

    supports_last_tokens = True

    def __init__(self, build: BuildContext, variant: LlamaVariant | None = None) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        if (act := config.raw.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(
                f"{config.architecture} with hidden_act {act!r} is not implemented; only 'silu' is"
            )
        self.build = build
        self.model = LlamaModel(build, variant or _variant(build))
        self.lm_head: LMHead | None = None
        if ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
            self.lm_head = LMHead(build, name, self.model.embed_tokens if config.tie_embeddings else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model(tokens, positions, kv, inputs, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and frequencies that old checkpoints carry."""
        ranks = self.build.ranks
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name.startswith("lm_head.") and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == "model.embed_tokens.weight" and not ranks.is_first_stage)
            or (name == "model.norm.weight" and not ranks.is_last_stage)
            or in_other_stage(name, "model.layers", self.build)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.model.layers), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)


def _variant(build: BuildContext) -> LlamaVariant:
    attention_bias = bool(build.config.raw.get("attention_bias", False))
    return LlamaVariant(attention_bias, attention_bias, mlp_bias=bool(build.config.raw.get("mlp_bias", False)))
