"""GPT-2 (Radford et al., 2019): learned positions, and weights stored [in, out]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.errors import UnsupportedModelError, ValidationError
from quire.kernels.kv import LayerKV
from quire.layers.activation import activation
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.linear import ColumnParallelLinear, FusedLinear, FusedPart, Heads, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.models.base import in_other_stage, stage_layers


class GPT2Attention(nn.Module):
    """Multi-head attention; the checkpoint's one matrix `c_attn` holds all of q, then k, then v."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        size = build.config.hidden_size
        heads = Heads.of_rank(build)
        parts = [
            FusedPart("c_attn", 3 * size, slice(first + heads.rows.start, first + heads.rows.stop))
            for first in (0, size, 2 * size)
        ]
        self.c_attn = FusedLinear(build, size, parts, bias=True, transposed=True)
        self.attention = Attention(build, heads, layer, cos_sin=None, scale=_scale(build, layer))
        self.c_proj = RowParallelLinear(build, "c_proj", size, size, bias=True, transposed=True)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        return self.c_proj(self.attention(self.c_attn(hidden), positions, kv, inputs))


class GPT2MLP(nn.Module):
    """One hidden layer."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        size, width = build.config.hidden_size, build.config.intermediate_size
        self.act = activation(build.config.raw.get("activation_function", "gelu_new"))
        self.c_fc = ColumnParallelLinear(build, "c_fc", size, width, bias=True, transposed=True)
        self.c_proj = RowParallelLinear(build, "c_proj", width, size, bias=True, transposed=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(hidden)))


class GPT2Block(nn.Module):
    """Attention, then MLP, each on a norm of the stream and added back to it."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.ln_1 = LayerNorm(build, "ln_1", size)
        self.attn = GPT2Attention(build, layer)
        self.ln_2 = LayerNorm(build, "ln_2", size)
        self.mlp = GPT2MLP(build)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), positions, kv, inputs)
        return hidden + self.mlp(self.ln_2(hidden))


class GPT2Model(nn.Module):
    """Embeddings, blocks and final norm: those on this stage."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        ranks = build.ranks
        self.ops = build.ops
        self.wte = VocabEmbedding(build, "wte") if ranks.is_first_stage else None
        self.wpe = PositionEmbedding(build, "wpe") if ranks.is_first_stage else None
        self.h = nn.ModuleDict({str(i): GPT2Block(build, i) for i in stage_layers(build)})
        self.ln_f = LayerNorm(build, "ln_f", build.config.hidden_size) if ranks.is_last_stage else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self.wte(tokens) + self.wpe(positions)  # type: ignore[misc]  # there on the first stage
        features = inputs.features
        for (number, block), cache in zip(self.h.items(), kv, strict=True):
            if features is not None:
                features.take(self.ops, int(number), hidden, None)
            hidden = block(hidden, positions, cache, inputs)
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, None)
        return hidden if self.ln_f is None else self.ln_f(hidden)


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with its head."""

    supports_last_tokens = False
    supports_features = True

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        config = build.config
        if config.raw.get("add_cross_attention"):
            raise UnsupportedModelError("GPT-2 with add_cross_attention = true is not implemented")
        if build.max_model_len > config.max_position:
            raise ValidationError(
                f"max_model_len is {build.max_model_len}, but the model has learned {config.max_position} positions",
                "max_model_len",
                build.max_model_len,
            )
        self.build = build
        self.transformer = GPT2Model(build)
        self.lm_head: LMHead | None = None
        if build.ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = "transformer.wte" if config.tie_embeddings else "lm_head"
            self.lm_head = LMHead(build, name, self.transformer.wte if config.tie_embeddings else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.transformer(tokens, positions, kv, inputs, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and the causal masks that old checkpoints carry."""
        ranks = self.build.ranks
        # The original checkpoints were saved without the head's wrapper, so without this prefix.
        name = name.removeprefix("transformer.")
        return (
            name.endswith((".attn.bias", ".attn.masked_bias"))
            or (name == "lm_head.weight" and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name in ("wte.weight", "wpe.weight") and not ranks.is_first_stage)
            or (name.startswith("ln_f.") and not ranks.is_last_stage)
            or in_other_stage(name, "h", self.build)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.transformer.h), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)


def _scale(build: BuildContext, layer: int) -> float:
    raw = build.config.raw
    scale = build.config.head_dim**-0.5 if raw.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if raw.get("scale_attn_by_inverse_layer_idx", False) else scale
