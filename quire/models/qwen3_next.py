"""Qwen3-Next: gated delta nets, every few layers attention with an output gate, and mixtures with a shared expert.

Qwen3.5 (`qwen3_5.py`) has the same layers and stores the delta net's input matrices otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.embedding import LMHead
from quire.layers.linear import ArrangedLinear, FusedPart, Heads, RowParallelLinear
from quire.layers.norm import ZeroCenteredRMSNorm
from quire.layers.recurrent import DeltaNetHeads, DeltaNetRecurrence
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.base import in_other_stage
from quire.models.llama import LlamaMLP, LlamaModel, LlamaVariant
from quire.models.qwen2_moe import SharedExpertMLP, qwen_routing, sparse_layers


@dataclass(frozen=True)
class QwenHybridVariant:
    """How models of this family differ."""

    mlp: Callable[[BuildContext, int], nn.Module]
    """Makes the MLP of a layer."""
    delta_parts: Callable[[DeltaNetHeads], list[FusedPart]]
    """The delta net's input matrices, as q | k | v | z | b | a."""


class GatedAttention(nn.Module):
    """Attention whose output is multiplied by sigmoid(gate); the q matrix has query and gate of each head."""

    def __init__(self, build: BuildContext, layer: int, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config = build.config
        heads = Heads.of_rank(build)
        bias = bool(config.raw.get("attention_bias", False))
        self.ops = build.ops
        self.q_norm = ZeroCenteredRMSNorm(build, "q_norm", heads.dim)
        self.k_norm = ZeroCenteredRMSNorm(build, "k_norm", heads.dim)
        self.gates = len(heads.query) * heads.dim

        def gates_first(rows: torch.Tensor) -> torch.Tensor:
            query, gate = rows.unflatten(0, (-1, 2, heads.dim)).unbind(1)
            return torch.cat((gate.flatten(0, 1), query.flatten(0, 1)))

        width, kv_width = config.num_heads * heads.dim, config.num_kv_heads * heads.dim
        q_rows = slice(2 * heads.rows.start, 2 * heads.rows.stop)
        parts = [
            FusedPart("q_proj", 2 * width, q_rows, gates_first),
            FusedPart("k_proj", kv_width, heads.kv_rows),
            FusedPart("v_proj", kv_width, heads.kv_rows),
        ]
        self.in_proj = ArrangedLinear(build, config.hidden_size, parts, bias)
        norms = (self.q_norm.weight, self.k_norm.weight, config.norm_eps)
        self.attention = Attention(build, heads, layer, cos_sin, norms)
        self.out_proj = RowParallelLinear(build, "o_proj", width, config.hidden_size, bias)

    def forward(
        self,
        projected: torch.Tensor,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """What `out_proj` takes."""
        gate = projected[:, : self.gates]
        attended = self.attention(projected[:, self.gates :], positions, kv, inputs, last)
        return self.ops.sigmoid_mul(attended, gate if last is None else gate[last.tokens])


class GatedDeltaNet(nn.Module):
    """A gated delta net with its input and output products."""

    def __init__(self, build: BuildContext, layer: int, variant: QwenHybridVariant) -> None:
        super().__init__()
        config = build.config
        heads = delta_net_heads(build)
        self.in_proj = ArrangedLinear(build, config.hidden_size, variant.delta_parts(heads), bias=False)
        self.recurrence = DeltaNetRecurrence(build, heads, layer, _taps(config))
        self.out_proj = RowParallelLinear(build, "out_proj", heads.value_size, config.hidden_size, bias=False)

    def forward(
        self,
        projected: torch.Tensor,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """What `out_proj` takes."""
        out = self.recurrence(projected, kv, inputs)
        return out if last is None else out[last.tokens]


def _taps(config: ModelConfig) -> int:
    return positive_integer(config.raw, "linear_conv_kernel_dim")


def delta_net_heads(build: BuildContext) -> DeltaNetHeads:
    """The heads of the model's delta nets on this rank."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return DeltaNetHeads(build, *(positive_integer(build.config.raw, f"linear_{name}") for name in names))


class QwenHybridLayer(nn.Module):
    """Delta net or attention, then MLP, each on the norm of the residual stream and added back to it."""

    def __init__(
        self, build: BuildContext, variant: QwenHybridVariant, layer: int, kind: str, cos_sin: torch.Tensor
    ) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.input_layernorm = ZeroCenteredRMSNorm(build, "input_layernorm", size)
        # The checkpoint has one name for each kind.
        self.self_attn = GatedAttention(build, layer, cos_sin) if kind == "full_attention" else None
        self.linear_attn = GatedDeltaNet(build, layer, variant) if kind == "linear_attention" else None
        self.post_attention_layernorm = ZeroCenteredRMSNorm(build, "post_attention_layernorm", size)
        self.mlp = variant.mlp(build, layer)
        self.is_last = layer == build.config.num_layers - 1

    @property
    def mixer(self) -> GatedAttention | GatedDeltaNet:
        """The attention or delta net."""
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        assert mixer is not None
        return mixer

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        mixer = self.mixer
        projected, residual = mixer.in_proj.norm_linear(self.input_layernorm, hidden, residual)
        last, slots = inputs.last if self.is_last else None, inputs.slots
        mixed = mixer(projected, positions, kv, inputs, last)
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            residual, slots = residual[last.tokens], slots[last.tokens]
        hidden = mixer.out_proj.linear_add(residual, mixed)
        return self.mlp(self.post_attention_layernorm, hidden, residual, slots)


class QwenHybridForCausalLM(nn.Module):
    """What Qwen3-Next and Qwen3.5 share."""

    supports_last_tokens = True
    supports_features = True
    prediction = "mtp"
    nested = False
    """Whether the checkpoint has the text model beside a vision tower."""

    def __init__(self, build: BuildContext, variant: QwenHybridVariant) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        if (act := config.raw.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(
                f"{config.architecture} with hidden_act {act!r} is not implemented; only 'silu' is"
            )
        self.build, self.variant = build, variant
        kinds = layer_kinds(config)

        def layer(build: BuildContext, _: LlamaVariant, number: int, cos_sin: torch.Tensor | None) -> nn.Module:
            assert cos_sin is not None
            return QwenHybridLayer(build, variant, number, kinds[number], cos_sin)

        text = LlamaModel(build, LlamaVariant(layer=layer, norm=ZeroCenteredRMSNorm))
        self.prefix = "model.language_model" if self.nested else "model"
        self.model: nn.Module = text
        if self.nested:
            self.model = nn.Module()
            self.model.language_model = text
        self.caches = self._caches(build)
        self.lm_head: LMHead | None = None
        if ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = f"{self.prefix}.embed_tokens" if config.tie_embeddings else "lm_head"
            self.lm_head = LMHead(build, name, text.embed_tokens if config.tie_embeddings else None)

    def _caches(self, build: BuildContext) -> list[LayerCache]:
        """What each layer of the whole model keeps, on this rank."""
        heads = Heads.of_rank(build)
        attention = AttentionCache(len(heads.kv), heads.dim, build.kv_format)
        state = delta_net_heads(build).cache(_taps(build.config), build.dtype)
        return [attention if kind == "full_attention" else state for kind in layer_kinds(build.config)]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[Any],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._text(tokens, positions, kv, inputs, hidden)

    @property
    def _text(self) -> Any:
        return self.model.language_model if self.nested else self.model

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden size]: what the first layer reads, where some of it is replaced (`vision/base.py`)."""
        return self._text.embed(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def prediction_layer(self, build: BuildContext, number: int, cos_sin: torch.Tensor) -> nn.Module:
        """A layer like the model's own with attention, for multi-token prediction."""
        return QwenHybridLayer(build, self.variant, number, "full_attention", cos_sin)

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and the draft layer for speculative decoding."""
        ranks = self.build.ranks
        return (
            name.startswith("mtp.")
            or name.endswith("rotary_emb.inv_freq")
            or (name.startswith("lm_head.") and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == f"{self.prefix}.embed_tokens.weight" and not ranks.is_first_stage)
            or (name == f"{self.prefix}.norm.weight" and not ranks.is_last_stage)
            or in_other_stage(name, f"{self.prefix}.layers", self.build)
        )


class Qwen3NextForCausalLM(QwenHybridForCausalLM):
    """Qwen3-Next-80B-A3B and its relatives."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        routing = qwen_routing(config, renormalise=True)
        sparse = sparse_layers(config)
        shared = positive_integer(config.raw, "shared_expert_intermediate_size")

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return SharedExpertMLP(build, routing, layer, shared) if layer in sparse else LlamaMLP(build)

        super().__init__(build, QwenHybridVariant(mlp, _delta_parts))


def _delta_parts(heads: DeltaNetHeads) -> list[FusedPart]:
    """Both matrices are ordered by key head."""
    repeat = heads.all_value_heads // heads.all_key_heads
    width = 2 * heads.key_dim + 2 * repeat * heads.value_dim
    start, stop = heads.key.start, heads.key.stop
    return [
        FusedPart("in_proj_qkvz", heads.all_key_heads * width, slice(start * width, stop * width), heads.qkvz_by_head),
        FusedPart(
            "in_proj_ba",
            2 * heads.all_value_heads,
            slice(2 * repeat * start, 2 * repeat * stop),
            heads.ba_by_head,
        ),
    ]


def layer_kinds(config: ModelConfig) -> list[str]:
    """ "full_attention" or "linear_attention" for each layer: listed, or every `full_attention_interval`-th is full."""
    kinds = config.raw.get("layer_types")
    if kinds is None:
        interval = positive_integer({"full_attention_interval": 4} | dict(config.raw), "full_attention_interval")
        kinds = [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(config.num_layers)
        ]
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    if unknown or len(kinds) != config.num_layers:
        raise UnsupportedModelError(
            f"{config.architecture} with layer_types {sorted(set(map(str, kinds)))} for {len(kinds)} of "
            f"{config.num_layers} layers is not implemented; 'full_attention' and 'linear_attention' are"
        )
    return list(kinds)
