"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783), and the parts its relatives share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec, LastTokens
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import GateUpLinear, Heads, QKVLinear, RowParallelLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rope import rope_tables
from quire.models.base import in_other_stage, stage_layers


@dataclass(frozen=True)
class LlamaVariant:
    """How a relative of Llama differs from it."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm on each query and key head before the rotation."""
    is_fused: bool = False
    """The checkpoint has q, k and v as one matrix `qkv_proj`, and gate and up as `gate_up_proj`."""
    interleaved_rotary: int = 0
    """Dimensions of each head whose rotary pairs are neighbours in the checkpoint, see `QKVLinear`."""
    unrotated: Collection[int] = ()
    """Layers without positions (NoPE)."""
    attention_scale: float | None = None
    """Factor on attention scores, if not 1 / sqrt(head_dim)."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    norm_eps: float | None = None
    """Of the norms on the residual stream, if not the config's."""
    attention: Callable[[BuildContext, LlamaVariant, int, torch.Tensor | None], Any] | None = None
    """Makes the attention of a layer, with its `qkv_proj` and `o_proj`; unset: `LlamaAttention`."""
    mlp: Callable[[BuildContext, int], nn.Module] | None = None
    """Makes the MLP of a layer; unset: one like Llama's. Called as `LlamaMLP` is."""
    layer: Callable[[BuildContext, LlamaVariant, int, torch.Tensor | None], nn.Module] | None = None
    """Makes a layer; unset: `LlamaLayer`. One that returns no residual has added everything to the stream itself."""
    norm: Callable[[BuildContext, str, int], RMSNorm | LayerNorm] | None = None
    """Makes the final norm, and those of `plain_layers`; unset: an RMS norm."""

    def make_norm(self, build: BuildContext, name: str) -> RMSNorm | LayerNorm:
        """A norm on the residual stream."""
        if self.norm is not None:
            return self.norm(build, name, build.config.hidden_size)
        return RMSNorm(build, name, build.config.hidden_size, self.norm_eps)

    def make_mlp(self, build: BuildContext, layer: int) -> Any:
        """The MLP of a layer."""
        return LlamaMLP(build, self.mlp_bias, is_fused=self.is_fused) if self.mlp is None else self.mlp(build, layer)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        config = build.config
        self.heads = heads = Heads.of_rank(build)
        norms = None
        if variant.qk_norm:
            q_norm, k_norm = RMSNorm(build, "q_norm", heads.dim), RMSNorm(build, "k_norm", heads.dim)
            self.q_norm, self.k_norm = q_norm, k_norm
            norms = (q_norm.weight, k_norm.weight, config.norm_eps)
        names = "qkv_proj" if variant.is_fused else ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = QKVLinear(build, heads, variant.qkv_bias, names, variant.interleaved_rotary)
        self.attention = Attention(build, heads, layer, cos_sin, norms, variant.attention_scale)
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

    def __init__(
        self, build: BuildContext, bias: bool = False, width: int | None = None, is_fused: bool = False
    ) -> None:
        """`width`: if not the model's intermediate_size. `is_fused`: the checkpoint has gate and up in one matrix."""
        super().__init__()
        config = build.config
        names = "gate_up_proj" if is_fused else ("gate_proj", "up_proj")
        self.gate_up_proj = GateUpLinear(build, bias, names, width)
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

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.input_layernorm = RMSNorm(build, "input_layernorm", size, variant.norm_eps)
        self.self_attn = (variant.attention or LlamaAttention)(build, variant, layer, cos_sin)
        self.post_attention_layernorm = RMSNorm(build, "post_attention_layernorm", size, variant.norm_eps)
        self.mlp = variant.make_mlp(build, layer)
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
        tables = rope_tables(build, variant.unrotated)
        make_layer = variant.layer or LlamaLayer
        self.ops = build.ops
        self.embedding_scale = variant.embedding_scale
        self.embed_tokens = VocabEmbedding(build, "embed_tokens") if build.ranks.is_first_stage else None
        self.layers = nn.ModuleDict({str(i): make_layer(build, variant, i, tables[i]) for i in stage_layers(build)})
        self.norm = variant.make_norm(build, "norm") if build.ranks.is_last_stage else None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden size]: what the first layer reads; on the first stage only."""
        hidden = self.embed_tokens(tokens)  # type: ignore[misc]
        return hidden if self.embedding_scale == 1 else hidden * self.embedding_scale

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = self.embed(tokens) if hidden is None else hidden
        residual = None
        features, deepstack = inputs.features, inputs.deepstack
        for (number, layer), cache in zip(self.layers.items(), kv, strict=True):
            if features is not None:
                features.take(self.ops, int(number), hidden, residual)
            hidden, residual = layer(hidden, residual, positions, cache, inputs)
            if deepstack is not None:
                deepstack.add(int(number), hidden, residual)
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, residual)
        if residual is None:  # the layers have added everything themselves
            return hidden if self.norm is None else self.norm.normed(hidden)
        if self.norm is None:  # only the sum is needed; this kernel, which also norms, can be replayed
            return layer.input_layernorm(hidden, residual)[1]  # type: ignore[operator]
        return self.norm(hidden, residual)[0]


class LlamaForCausalLM(nn.Module):
    """Llama 1 to 3, and models published as this architecture."""

    supports_last_tokens = True
    supports_features = True
    prediction: ClassVar[str] = ""
    """How its checkpoints have layers for multi-token prediction (`speculative/mtp.py`); empty: they have none."""
    is_gated: ClassVar[bool] = True
    """Whether the MLPs have gates, of which only `silu` is implemented."""

    def __init__(self, build: BuildContext, variant: LlamaVariant | None = None) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        if self.is_gated and (act := config.raw.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(
                f"{config.architecture} with hidden_act {act!r} is not implemented; only 'silu' is"
            )
        self.build = build
        self.variant = variant = variant or _variant(build)
        self.logit_scale = variant.logit_scale
        self.model = LlamaModel(build, variant)
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

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden size]: what the first layer reads, where some of it is replaced (`vision/base.py`)."""
        return self.model.embed(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        if self.logit_scale != 1:
            hidden = hidden * self.logit_scale
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def prediction_layer(self, build: BuildContext, number: int, cos_sin: torch.Tensor) -> nn.Module:
        """A layer like the model's own, with this number, for multi-token prediction."""
        return (self.variant.layer or LlamaLayer)(build, self.variant, number, cos_sin)

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and frequencies that old checkpoints carry."""
        ranks = self.build.ranks
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name.startswith("lm_head.") and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == "model.embed_tokens.weight" and not ranks.is_first_stage)
            or (name.startswith("model.norm.") and not ranks.is_last_stage)
            or in_other_stage(name, "model.layers", self.build)
        )

    @functools.cached_property
    def caches(self) -> Sequence[LayerCache]:
        """What each layer of the whole model keeps, on this rank."""
        build, kv_heads = self.build, len(Heads.of_rank(self.build).kv)
        windows = build.config.windows
        return [AttentionCache(kv_heads, build.config.head_dim, build.kv_format, window) for window in windows]

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.model.layers), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)


def _variant(build: BuildContext) -> LlamaVariant:
    attention_bias = bool(build.config.raw.get("attention_bias", False))
    return LlamaVariant(attention_bias, attention_bias, mlp_bias=bool(build.config.raw.get("mlp_bias", False)))
