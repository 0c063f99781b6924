"""Falcon (arXiv 2311.16867): attention and MLP side by side; q, k and v in one matrix, by groups of heads.

Old ones (Falcon RW) have ALiBi positions in place of rotary ones, and attention and MLP one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention, alibi_slopes
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import FusedLinear, FusedPart, Heads, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope import rope_table
from quire.loading.model_config import ModelConfig
from quire.models.base import in_other_stage, refuse_other_values, stage_layers
from quire.models.plain_layers import PlainMLP


@dataclass(frozen=True)
class FalconVariant:
    """What differs between models of this form."""

    bias: bool
    activation: str
    is_parallel: bool
    """Attention and MLP side by side; if not, one after the other."""
    has_two_norms: bool = False
    """Side by side, and each on a norm of its own."""
    has_alibi: bool = False
    embedding_norm: str = ""
    """Name of a norm after the embedding; empty: there is none."""

    @classmethod
    def of(cls, config: ModelConfig) -> FalconVariant:
        """Read from the model's config."""
        raw = config.raw
        is_new = bool(raw.get("new_decoder_architecture", False))
        return cls(
            bias=bool(raw.get("bias", False)),
            activation=raw.get("activation") or "gelu",
            is_parallel=is_new or bool(raw.get("parallel_attn", True)),
            has_two_norms=is_new and raw.get("num_ln_in_parallel_attn") in (None, 2),
            has_alibi=bool(raw.get("alibi", False)),
        )

    def slopes(self, build: BuildContext, heads: Heads) -> torch.Tensor | None:
        """Of ALiBi, if the model has it. Falcon's bias is added before the scores are scaled, and in 16 bits."""
        if not self.has_alibi:
            return None
        return alibi_slopes(build, heads).bfloat16().float() * heads.dim**-0.5


class FalconAttention(nn.Module):
    """Grouped-query attention; the checkpoint has the query heads of each group, then its k head, then its v head."""

    def __init__(self, build: BuildContext, variant: FalconVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        size, bias = build.config.hidden_size, variant.bias
        heads = Heads.of_rank(build)
        self.query_key_value = FusedLinear(build, size, _qkv_parts(build, heads), bias)
        self.query_key_value.normed = False
        self.attention = Attention(build, heads, layer, cos_sin, slopes=variant.slopes(build, heads))
        self.dense = RowParallelLinear(build, "dense", size, size, bias)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        return self.dense(self.attention(self.query_key_value(hidden), positions, kv, inputs))


def _qkv_parts(build: BuildContext, heads: Heads) -> list[FusedPart]:
    config, dim = build.config, heads.dim
    group = config.num_heads // config.num_kv_heads
    rows = config.num_kv_heads * (group + 2) * dim

    def part(start: int, stop: int) -> FusedPart:
        return FusedPart("query_key_value", rows, slice(start * dim, stop * dim))

    if len(heads.kv) == 1:  # the rank's heads are in one group: its queries (or some of them), its k, its v
        first = heads.kv.start * (group + 2)
        queries = first + heads.query.start - heads.kv.start * group
        return [
            part(queries, queries + len(heads.query)),
            part(first + group, first + group + 1),
            part(first + group + 1, first + group + 2),
        ]

    def regroup(part: torch.Tensor) -> torch.Tensor:
        """All q heads, then all k heads, then all v heads; of a weight or of a bias."""
        groups = part.unflatten(0, (-1, group + 2, dim))
        return torch.cat([groups[:, of].flatten(0, 2) for of in (slice(0, group), slice(-2, -1), slice(-1, None))])

    keep = slice(heads.kv.start * (group + 2) * dim, heads.kv.stop * (group + 2) * dim)
    return [FusedPart("query_key_value", rows, keep, regroup)]


class FalconLayer(nn.Module):
    """Attention and MLP side by side, on the same norm or each on its own; or one after the other."""

    def __init__(self, build: BuildContext, variant: FalconVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        size, has_two = build.config.hidden_size, variant.has_two_norms
        self.is_parallel = variant.is_parallel
        names = ("ln_attn", "ln_mlp") if has_two else ("input_layernorm", "post_attention_layernorm")
        self.norm = LayerNorm(build, names[0], size)
        self.mlp_norm = LayerNorm(build, names[1], size) if has_two or not self.is_parallel else None
        self.self_attention = FalconAttention(build, variant, layer, cos_sin)
        names = ("dense_h_to_4h", "dense_4h_to_h")
        self.mlp = PlainMLP(build, names, variant.activation, variant.bias)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        normed = self.norm(hidden)
        attended = hidden + self.self_attention(normed, positions, kv, inputs)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(hidden if self.is_parallel else attended)
        return attended + self.mlp.forward_normed(normed)


class FalconModel(nn.Module):
    """Embedding, layers and final norm: those on this stage."""

    def __init__(self, build: BuildContext, variant: FalconVariant) -> None:
        super().__init__()
        size, ranks = build.config.hidden_size, build.ranks
        cos_sin = None if variant.has_alibi else rope_table(build)
        self.word_embeddings = VocabEmbedding(build, "word_embeddings") if ranks.is_first_stage else None
        self.embedding_norm: LayerNorm | None = None
        if variant.embedding_norm and ranks.is_first_stage:
            self.embedding_norm = LayerNorm(build, variant.embedding_norm, size)
        self.h = nn.ModuleDict({str(i): FalconLayer(build, variant, i, cos_sin) for i in stage_layers(build)})
        self.ln_f = LayerNorm(build, "ln_f", size) if ranks.is_last_stage else None


class FalconForCausalLM(nn.Module):
    """Falcon RW, 7B, 40B, 180B and Falcon 2."""

    supports_last_tokens = False
    supports_features = True

    def __init__(self, build: BuildContext, variant: FalconVariant | None = None) -> None:
        super().__init__()
        refuse_other_values(build.config, {"apply_residual_connection_post_layernorm": False})
        tied = build.config.tie_embeddings
        self.build = build
        self.transformer = FalconModel(build, variant or FalconVariant.of(build.config))
        self.lm_head: LMHead | None = None
        if build.ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = "transformer.word_embeddings" if tied else "lm_head"
            self.lm_head = LMHead(build, name, self.transformer.word_embeddings if tied else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        model = self.transformer
        if hidden is None:
            hidden = model.word_embeddings(tokens)  # type: ignore[misc]  # there on the first stage
            if model.embedding_norm is not None:
                hidden = model.embedding_norm(hidden)
        features = inputs.features
        for (number, layer), cache in zip(model.h.items(), kv, strict=True):
            if features is not None:
                features.take(self.build.ops, int(number), hidden, None)
            hidden = layer(hidden, positions, cache, inputs)
        if features is not None:
            features.take(self.build.ops, int(number) + 1, hidden, None)
        return hidden if model.ln_f is None else model.ln_f(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and frequencies that old checkpoints carry."""
        ranks = self.build.ranks
        name = name.removeprefix("transformer.")  # Bloom's checkpoints were saved without the head's wrapper
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name.startswith("word_embeddings") and not ranks.is_first_stage)
            or (name.startswith("ln_f.") and not ranks.is_last_stage)
            or in_other_stage(name, "h", self.build)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.transformer.h), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)
