"""GPT-NeoX (arXiv 2204.06745), Pythia and relatives: parallel residual, rotary positions on part of each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.kernels.kv import LayerKV
from quire.layers.activation import activation
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import ColumnParallelLinear, FusedLinear, FusedPart, Heads, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope import rope_table
from quire.models.base import in_other_stage, stage_layers


class GPTNeoXAttention(nn.Module):
    """Multi-head attention; the checkpoint's q, k and v are interleaved by head: q0 k0 v0 q1 k1 v1 ..."""

    def __init__(self, build: BuildContext, layer: int, cos_sin: torch.Tensor) -> None:
        super().__init__()
        size = build.config.hidden_size
        heads = Heads.of_rank(build)
        bias = bool(build.config.raw.get("attention_bias", True))

        def regroup(part: torch.Tensor) -> torch.Tensor:
            """All q heads, then all k heads, then all v heads; of a weight or of a bias."""
            return part.unflatten(0, (-1, 3, heads.dim)).transpose(0, 1).flatten(0, 2)

        keep = slice(3 * heads.rows.start, 3 * heads.rows.stop)
        self.query_key_value = FusedLinear(build, size, [FusedPart("query_key_value", 3 * size, keep, regroup)], bias)
        self.attention = Attention(build, heads, layer, cos_sin)
        self.dense = RowParallelLinear(build, "dense", size, size, bias)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        return self.dense(self.attention(self.query_key_value(hidden), positions, kv, inputs))


class GPTNeoXMLP(nn.Module):
    """One hidden layer."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        size, width = build.config.hidden_size, build.config.intermediate_size
        self.act = activation(build.config.raw.get("hidden_act", "gelu"))
        self.dense_h_to_4h = ColumnParallelLinear(build, "dense_h_to_4h", size, width, bias=True)
        self.dense_4h_to_h = RowParallelLinear(build, "dense_4h_to_h", width, size, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(hidden)))


class GPTNeoXLayer(nn.Module):
    """Attention and MLP side by side on the same input, or one after the other."""

    def __init__(self, build: BuildContext, layer: int, cos_sin: torch.Tensor) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.parallel = bool(build.config.raw.get("use_parallel_residual", True))
        self.input_layernorm = LayerNorm(build, "input_layernorm", size)
        self.post_attention_layernorm = LayerNorm(build, "post_attention_layernorm", size)
        self.attention = GPTNeoXAttention(build, layer, cos_sin)
        self.mlp = GPTNeoXMLP(build)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> torch.Tensor:
        attended = hidden + self.attention(self.input_layernorm(hidden), positions, kv, inputs)
        return attended + self.mlp(self.post_attention_layernorm(hidden if self.parallel else attended))


class GPTNeoXModel(nn.Module):
    """Embedding, layers and final norm: those on this stage."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        size, ranks = build.config.hidden_size, build.ranks
        cos_sin = rope_table(build)
        self.ops = build.ops
        self.embed_in = VocabEmbedding(build, "embed_in") if ranks.is_first_stage else None
        self.layers = nn.ModuleDict({str(i): GPTNeoXLayer(build, i, cos_sin) for i in stage_layers(build)})
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
            hidden = self.embed_in(tokens)  # type: ignore[misc]  # there on the first stage
        features = inputs.features
        for (number, layer), cache in zip(self.layers.items(), kv, strict=True):
            if features is not None:
                features.take(self.ops, int(number), hidden, None)
            hidden = layer(hidden, positions, cache, inputs)
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, None)
        return hidden if self.final_layer_norm is None else self.final_layer_norm(hidden)


class GPTNeoXForCausalLM(nn.Module):
    """GPT-NeoX with its head."""

    supports_last_tokens = False
    supports_features = True

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        tied = build.config.tie_embeddings
        self.build = build
        self.gpt_neox = GPTNeoXModel(build)
        self.embed_out: LMHead | None = None
        if build.ranks.is_last_stage:
            # A tied head on another stage than the embedding reads its own copy of it.
            name = "gpt_neox.embed_in" if tied else "embed_out"
            self.embed_out = LMHead(build, name, self.gpt_neox.embed_in if tied else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.gpt_neox(tokens, positions, kv, inputs, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.embed_out(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and the masks and frequencies that old checkpoints carry."""
        ranks = self.build.ranks
        return (
            name.endswith((".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"))
            or (name == "embed_out.weight" and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == "gpt_neox.embed_in.weight" and not ranks.is_first_stage)
            or (name.startswith("gpt_neox.final_layer_norm.") and not ranks.is_last_stage)
            or in_other_stage(name, "gpt_neox.layers", self.build)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs."""
        return KVSpec(len(self.gpt_neox.layers), len(Heads.of_rank(self.build).kv), self.build.config.head_dim)
