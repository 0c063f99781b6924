"""OPT (arXiv 2205.01068): learned positions, layer norms, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.errors import ValidationError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.linear import Heads, QKVLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.models.base import in_other_stage, refuse_other_values, stage_layers
from quire.models.plain_layers import PlainMLP

# The two rows before that of position 0 are left from a padding scheme.
_FIRST_POSITION = 2


class OPTAttention(nn.Module):
    """Multi-head attention."""

    def __init__(self, build: BuildContext, layer: int, bias: bool) -> None:
        super().__init__()
        size = build.config.hidden_size
        heads = Heads.of_rank(build)
        self.qkv_proj = QKVLinear(build, heads, bias)
        self.qkv_proj.normed = False
        self.attention = Attention(build, heads, layer, cos_sin=None)
        self.out_proj = RowParallelLinear(build, "out_proj", size, size, bias)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        return self.out_proj(self.attention(self.qkv_proj(hidden), positions, kv, inputs))


class OPTLayer(PlainMLP):
    """Attention, then MLP, each on a norm of the stream. The MLP's matrices have no module of their own in OPT."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        raw, size = build.config.raw, build.config.hidden_size
        bias = bool(raw.get("enable_bias", True))
        super().__init__(build, ("fc1", "fc2"), raw.get("activation_function", "relu"), bias)
        self.self_attn_layer_norm = LayerNorm(build, "self_attn_layer_norm", size)
        self.self_attn = OPTAttention(build, layer, bias)
        self.final_layer_norm = LayerNorm(build, "final_layer_norm", size)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), positions, kv, inputs)
        return hidden + self.forward_normed(self.final_layer_norm(hidden))


class OPTDecoder(nn.Module):
    """Embeddings, layers and final norm: those on this stage."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        size, ranks = build.config.hidden_size, build.ranks
        self.ops = build.ops
        self.embed_tokens = VocabEmbedding(build, "embed_tokens") if ranks.is_first_stage else None
        self.embed_positions = None
        if ranks.is_first_stage:
            self.embed_positions = PositionEmbedding(build, "embed_positions", _FIRST_POSITION)
        self.layers = nn.ModuleDict({str(i): OPTLayer(build, i) for i in stage_layers(build)})
        self.final_layer_norm = LayerNorm(build, "final_layer_norm", size) if ranks.is_last_stage else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self.embed_tokens(tokens) + self.embed_positions(positions)  # type: ignore[misc]  # first stage
        features = inputs.features
        for (number, layer), cache in zip(self.layers.items(), kv, strict=True):
            if features is not None:
                features.take(self.ops, int(number), hidden, None)
            hidden = layer(hidden, positions, cache, inputs)
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, None)
        return hidden if self.final_layer_norm is None else self.final_layer_norm(hidden)


class OPTModel(nn.Module):
    """Only the decoder, in a module of its own."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.decoder = OPTDecoder(build)


class OPTForCausalLM(nn.Module):
    """OPT of every size but 350M, whose norms come after, and whose embedding is narrower than its layers."""

    supports_last_tokens = False
    supports_features = True

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        config = build.config
        _check(build)
        self.build = build
        self.model = OPTModel(build)
        self.lm_head: LMHead | None = None
        if build.ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = "model.decoder.embed_tokens" if config.tie_embeddings else "lm_head"
            self.lm_head = LMHead(build, name, self.model.decoder.embed_tokens if config.tie_embeddings else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model.decoder(tokens, positions, kv, inputs, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, and a tied head's copy."""
        ranks = self.build.ranks
        # The original checkpoints were saved without the head's wrapper, so without this prefix.
        name = name.removeprefix("model.")
        return (
            (name == "lm_head.weight" and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name.startswith("decoder.embed_") and not ranks.is_first_stage)
            or (name.startswith("decoder.final_layer_norm.") and not ranks.is_last_stage)
            or in_other_stage(name, "decoder.layers", self.build)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.model.decoder.layers), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)


def _check(build: BuildContext) -> None:
    config = build.config
    refuse_other_values(
        config,
        {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": config.hidden_size,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        },
    )
    if build.max_model_len > config.max_position:
        raise ValidationError(
            f"max_model_len is {build.max_model_len}, but the model has learned {config.max_position} positions",
            "max_model_len",
            build.max_model_len,
        )
