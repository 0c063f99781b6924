"""Gemma 4, the text part: heads that differ by layer, keys that are values too, layers that read another layer's cache,
embeddings of every layer, and experts beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.gates import GATES, ExpertVariant
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec, LastTokens
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache, SharedCache
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.expert_weights import DOWN, GATE_UP, ROUTER, ExpertNaming
from quire.layers.linear import FusedLinear, FusedPart, Heads, ReplicatedLinear, RowParallelLinear, kv_heads_of
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.rope import rope_table
from quire.loading.weights import AnyTarget, Target
from quire.models.base import in_other_stage, stage_layers
from quire.models.gemma2 import GemmaMLP, embedding_scale, gate_of

_OTHER_PARTS = ("vision_tower.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio.")
_NAMING = ExpertNaming(
    "router.proj.weight", *(f"experts.{{}}.{matrix}_proj.weight" for matrix in ("gate", "up", "down"))
)
_KINDS = ("full_attention", "sliding_attention")
_DIFFERS = {"head_dim", "num_key_value_heads"}
"""What a layer may have of its own in `per_layer_config`."""


class Shape:
    """What a layer's attention looks like."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        raw, ranks = build.config.raw, build.ranks
        kinds, layers = raw["layer_types"], build.config.num_layers
        if kinds[layer] not in _KINDS:
            raise UnsupportedModelError(f"Gemma 4 with layer_types {kinds[layer]!r} is not implemented")
        self.is_full = kinds[layer] == "full_attention"
        own = (raw.get("per_layer_config") or {}).get(str(layer)) or {}
        if unknown := own.keys() - _DIFFERS:
            raise UnsupportedModelError(
                f"Gemma 4 with {', '.join(sorted(unknown))} in per_layer_config is not implemented"
            )
        kv_heads = build.config.num_kv_heads
        if self.is_full and raw.get("attention_k_eq_v"):
            kv_heads = raw.get("num_global_key_value_heads") or kv_heads
        dim = raw.get("global_head_dim", 512) if self.is_full and not raw.get("per_layer_config") else raw["head_dim"]
        self.kv_heads: int = own.get("num_key_value_heads", kv_heads)
        self.dim: int = own.get("head_dim", dim)
        self.values_are_keys = bool(raw.get("attention_k_eq_v")) and self.is_full
        query = ranks.slice(build.config.num_heads, "attention heads")
        self.heads = Heads(range(query.start, query.stop), kv_heads_of(self.kv_heads, ranks), self.dim)
        first = layers - int(raw.get("num_kv_shared_layers") or 0)
        self.shared: int | None = None
        """The layer whose cache this one reads; None: its own."""
        if layer >= first:
            self.shared = max((other for other in range(first) if kinds[other] == kinds[layer]), default=None)
            if self.shared is None:
                raise UnsupportedModelError(
                    f"Gemma 4 with num_kv_shared_layers {layers - first} of {layers} is not implemented: layer {layer} "
                    f"has no layer of {kinds[layer]!r} before these to read from"
                )


class Gemma4Attention(nn.Module):
    """Attention with norms of queries, keys and values; without keys and values of its own where it shares a cache."""

    def __init__(self, build: BuildContext, layer: int, shape: Shape, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config, heads = build.config, shape.heads
        self.ops, self.shape, self.eps = build.ops, shape, config.norm_eps
        bias = bool(config.raw.get("attention_bias", False))
        rows, kv_rows = config.num_heads * heads.dim, shape.kv_heads * heads.dim
        parts = [FusedPart("q_proj", rows, heads.rows)]
        self.q_norm = RMSNorm(build, "q_norm", heads.dim)
        k_gain = self.ones = torch.ones(heads.dim, dtype=build.dtype, device=build.device)
        if shape.shared is None:
            value = "k_proj" if shape.values_are_keys else "v_proj"
            parts += [FusedPart("k_proj", kv_rows, heads.kv_rows), FusedPart(value, kv_rows, heads.kv_rows)]
            self.k_norm = RMSNorm(build, "k_norm", heads.dim)
            k_gain = self.k_norm.weight
        self.qkv_proj = FusedLinear(build, config.hidden_size, parts, bias)
        norms = (self.q_norm.weight, k_gain, self.eps)
        # Tokens of an image see each other both ways in layers with a window alone.
        self.attention = Attention(build, heads, layer, cos_sin, norms, scale=1.0, sees_spans=not shape.is_full)
        self.attention.num_all_kv_heads = shape.kv_heads
        self.o_proj = RowParallelLinear(build, "o_proj", rows, config.hidden_size, bias)

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, before `o_proj`."""
        heads = self.shape.heads
        width = len(heads.kv) * heads.dim
        if self.shape.shared is not None:  # keys and values that are not read: their place is the null block
            qkv = torch.cat((qkv, qkv.new_zeros(len(qkv), 2 * width)), dim=-1)
        else:
            values = qkv[:, -width:].reshape(-1, heads.dim)
            qkv[:, -width:] = self.ops.rms_norm(values, self.ones, self.eps).view(-1, width)
        return self.attention(qkv, positions, kv, inputs, last)


class Gemma4Experts(SparseMLP):
    """Experts whose router norms the stream itself, and whose weights have a factor for each expert."""

    def __init__(self, build: BuildContext, routing: Routing, layer: int) -> None:
        super().__init__(build, routing, layer, (_NAMING,))
        self.variant = ExpertVariant(gate_of(build))
        self.eps = build.config.norm_eps
        self.gain = build.parameter(build.config.hidden_size)
        self.expert_scale = build.parameter(routing.num_experts)

    def mixed(self, stream: torch.Tensor, normed: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The experts' weighted sum for `normed`, routed by the stream."""
        logits = self.ops.linear(self.ops.rms_norm(stream, self.gain, self.eps), self.router)
        weights, experts = self.ops.route(logits, self.routing.top_k, True, self.counts, self.padding(slots))
        weights = weights * self.expert_scale[experts.clamp(min=0).long()].float()
        return self.summed(normed, weights, experts)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The experts, whose names have no `mlp`, and the router's tensors."""
        root = self.router.shape[1] ** -0.5
        named = {ROUTER: _NAMING.router, GATE_UP: "experts.gate_up_proj", DOWN: "experts.down_proj"}
        return {
            **{named.get(name, name): found for name, found in super().targets().items()},
            "router.scale": [Target(self.gain, tuple(self.gain.shape), (), lambda gain: gain.float() * root)],
            "router.per_expert_scale": [Target(self.expert_scale, tuple(self.expert_scale.shape))],
        }


class LayerScalar(nn.Module):
    """One number."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = build.parameter(1)

    def targets(self) -> dict[str, list[Target]]:
        """The number."""
        return {self.name: [Target(self.weight, (1,))]}


class Gemma4Layer(nn.Module):
    """Attention, MLP (and experts), embedding of the layer: each normed before and after, and added to the stream."""

    def __init__(self, build: BuildContext, layer: int, shape: Shape, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config, raw = build.config, build.config.raw
        size, each = config.hidden_size, int(raw.get("hidden_size_per_layer_input") or 0)
        self.ops = build.ops
        self.self_attn = Gemma4Attention(build, layer, shape, cos_sin)
        is_wide = raw.get("use_double_wide_mlp") and shape.shared is not None
        self.mlp = GemmaMLP(build, layer, config.intermediate_size * 2 if is_wide else None)
        self.input_layernorm = RMSNorm(build, "input_layernorm", size)
        self.post_attention_layernorm = RMSNorm(build, "post_attention_layernorm", size)
        self.pre_feedforward_layernorm = RMSNorm(build, "pre_feedforward_layernorm", size)
        self.post_feedforward_layernorm = RMSNorm(build, "post_feedforward_layernorm", size)
        self.layer_scalar = LayerScalar(build, "layer_scalar")
        self.experts: Gemma4Experts | None = None
        if raw.get("enable_moe_block"):
            routing = Routing.from_config(config, "moe_intermediate_size", renormalise=True)
            self.experts = Gemma4Experts(build, routing, layer)
            self.pre_feedforward_layernorm_2 = RMSNorm(build, "pre_feedforward_layernorm_2", size)
            self.post_feedforward_layernorm_1 = RMSNorm(build, "post_feedforward_layernorm_1", size)
            self.post_feedforward_layernorm_2 = RMSNorm(build, "post_feedforward_layernorm_2", size)
        self.has_inputs = each > 0
        if self.has_inputs:
            self.act = GATES[gate_of(build)]
            self.per_layer_input_gate = ReplicatedLinear(build, "per_layer_input_gate", size, each)
            self.per_layer_projection = ReplicatedLinear(build, "per_layer_projection", each, size)
            self.post_per_layer_input_norm = RMSNorm(build, "post_per_layer_input_norm", size)
        self.is_last = layer == config.num_layers - 1

    def forward(
        self,
        stream: torch.Tensor,
        own: torch.Tensor | None,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """The stream after this layer; the one before it may be overwritten. `own`: the layer's embeddings."""
        attention, slots = self.self_attn, inputs.slots
        qkv, stream = attention.qkv_proj.norm_linear(self.input_layernorm, stream, None)
        last = inputs.last if self.is_last else None
        attended = attention(qkv, positions, kv, inputs, last)
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            stream, slots = stream[last.tokens], slots[last.tokens]
            own = None if own is None else own[last.tokens]
        hidden = self.post_attention_layernorm.normed(attention.o_proj(attended))
        gated, stream = self.mlp.gate_up_proj.norm_linear(self.pre_feedforward_layernorm, hidden, stream)
        hidden = self.mlp.down_proj(gated)
        if self.experts is not None:
            mixed = self.experts.mixed(stream, self.pre_feedforward_layernorm_2.normed(stream), slots)
            mixed = self.post_feedforward_layernorm_2.normed(mixed)
            hidden = self.post_feedforward_layernorm_1.normed(hidden) + mixed
        stream = stream + self.post_feedforward_layernorm.normed(hidden)
        if own is not None:
            gated = self.act(self.per_layer_input_gate(stream).float(), own.float()).to(stream.dtype)
            stream = stream + self.post_per_layer_input_norm.normed(self.per_layer_projection(gated))
        return stream * self.layer_scalar.weight


class LayerEmbeddings(nn.Module):
    """Vectors of every token for every layer: from a table, and from the token's embedding."""

    def __init__(self, build: BuildContext, each: int) -> None:
        super().__init__()
        config = build.config
        self.ops, self.each, self.dtype = build.ops, each, build.dtype
        self.table = build.parameter(int(config.raw["vocab_size_per_layer_input"]), config.num_layers * each)
        self.scale = torch.tensor(each**0.5).to(build.dtype).item()
        self.root = config.hidden_size**-0.5

    def forward(self, tokens: torch.Tensor, projected: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[T, layers, each]. `projected`: of the tokens' embeddings."""
        rows = (projected * self.root).view(-1, self.each)
        found = self.ops.embedding(tokens, self.table) * self.scale
        return ((norm.normed(rows).view_as(found) + found) * 2.0**-0.5).unflatten(-1, (-1, self.each))

    def targets(self) -> dict[str, list[Target]]:
        """The table, whole."""
        return {"embed_tokens_per_layer.weight": [Target(self.table, tuple(self.table.shape))]}


class Gemma4Model(nn.Module):
    """Embeddings, layers and final norm: those on this stage."""

    media_tokens: torch.Tensor

    def __init__(self, build: BuildContext, shapes: Sequence[Shape]) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        size, each = config.hidden_size, int(config.raw.get("hidden_size_per_layer_input") or 0)
        self.ops = build.ops
        self.scale = embedding_scale(build)
        self.padding = int(config.raw.get("pad_token_id") or 0)
        named = [config.raw.get(f"{kind}_token_id") for kind in ("image", "video", "audio")]
        media = [token for token in named if isinstance(token, int)]
        self.register_buffer("media_tokens", torch.tensor(media, device=build.device), persistent=False)
        self.embed_tokens = VocabEmbedding(build, "embed_tokens") if ranks.is_first_stage else None
        self.inputs: LayerEmbeddings | None = None
        if each:
            if ranks.pp_size > 1:
                raise UnsupportedModelError("Gemma 4 with embeddings of each layer cannot be split into stages")
            self.inputs = LayerEmbeddings(build, each)
            self.per_layer_model_projection = ReplicatedLinear(
                build, "per_layer_model_projection", size, config.num_layers * each
            )
            self.per_layer_projection_norm = RMSNorm(build, "per_layer_projection_norm", each)
        ropes = {(shape.is_full, shape.dim): shape for shape in shapes}
        tables = {key: rope_table(build, _rope(build, shape), shape.dim) for key, shape in ropes.items()}
        layers = {
            i: Gemma4Layer(build, i, shapes[i], tables[shapes[i].is_full, shapes[i].dim]) for i in stage_layers(build)
        }
        for i, layer in layers.items():  # an owner on another stage is refused where the caches are laid out
            owner = layers.get(-1 if (shared := shapes[i].shared) is None else shared)
            if owner is not None:
                layer.self_attn.attention.read_from(owner.self_attn.attention)
        self.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.norm = RMSNorm(build, "norm", size) if ranks.is_last_stage else None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden size]: what the first layer reads; on the first stage only."""
        return self.embed_tokens(tokens) * self.scale  # type: ignore[misc]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self.embed(tokens)
        elif self.inputs is not None:  # the table has nothing for images: they read what padding has
            tokens = torch.where(torch.isin(tokens, self.media_tokens), self.padding, tokens)
        own: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.inputs is not None:
            projected = self.per_layer_model_projection(hidden)
            own = self.inputs(tokens, projected, self.per_layer_projection_norm).unbind(1)
        features = inputs.features
        for (number, layer), cache, vectors in zip(self.layers.items(), kv, own, strict=True):
            if features is not None:
                features.take(self.ops, int(number), hidden, None)
            hidden = layer(hidden, vectors, positions, cache, inputs)
        assert hidden is not None
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, None)
        return hidden if self.norm is None else self.norm.normed(hidden)


class Gemma4ForCausalLM(nn.Module):
    """Gemma 4 in its sizes, and the text part of checkpoints that also take images and sound."""

    supports_last_tokens = True
    supports_features = True

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        gate_of(build)
        if config.raw.get("use_bidirectional_attention") == "all":
            raise UnsupportedModelError(
                f"{config.architecture} with use_bidirectional_attention 'all' is not implemented: attention is causal"
            )
        self.build = build
        self.shapes = [Shape(build, layer) for layer in range(config.num_layers)]
        self.model = Gemma4Model(build, self.shapes)
        self.logit_cap: float | None = config.raw.get("final_logit_softcapping")
        self.lm_head: LMHead | None = None
        if ranks.is_last_stage:
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
        logits = self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, of other inputs than text, a tied head's copy, and keys and values of layers that
        read another layer's cache."""
        ranks, layer = self.build.ranks, name.removeprefix("model.layers.").partition(".")[0]
        is_shared = layer.isdigit() and int(layer) < len(self.shapes) and self.shapes[int(layer)].shared is not None
        return (
            name.removeprefix("model.").startswith(_OTHER_PARTS)
            or (is_shared and any(part in name for part in (".k_proj.", ".v_proj.", ".k_norm.", ".v_norm.")))
            or (name.startswith("lm_head.") and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == "model.embed_tokens.weight" and not ranks.is_first_stage)
            or (name == "model.norm.weight" and not ranks.is_last_stage)
            or in_other_stage(name, "model.layers", self.build)
        )

    @property
    def caches(self) -> Sequence[LayerCache]:
        """What each layer of the whole model keeps, on this rank."""
        windows, format = self.build.config.windows, self.build.kv_format
        return [
            AttentionCache(len(shape.heads.kv), shape.dim, format, window)
            if shape.shared is None
            else SharedCache(shape.shared)
            for shape, window in zip(self.shapes, windows, strict=True)
        ]

    @property
    def kv_shape(self) -> KVSpec:
        """The largest cache of a layer."""
        largest = max(self.shapes, key=lambda shape: len(shape.heads.kv) * shape.dim)
        return KVSpec(len(self.model.layers), len(largest.heads.kv), largest.dim)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """As published, with a vision tower (`vision/gemma4.py`); sound is not taken."""

    @property
    def bidirectional_spans(self) -> bool:
        """Whether the tokens of an image see each other both ways: in the larger models."""
        return self.build.config.raw.get("use_bidirectional_attention") == "vision"


def _rope(build: BuildContext, shape: Shape) -> Any:
    return build.config.rope if shape.is_full or build.config.window_rope is None else build.config.window_rope
