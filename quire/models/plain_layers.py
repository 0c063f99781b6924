"""Layers of relatives of Llama whose norms stand elsewhere, or are not RMS norms: nothing is fused with them.

They add to the residual stream themselves, and so return no residual.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.kv import LayerKV
from quire.layers.activation import activation
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.linear import ColumnParallelLinear, FusedLinear, RowParallelLinear
from quire.models.llama import LlamaAttention, LlamaVariant


class _PlainLayer(nn.Module):
    """What these layers share: attention and MLP of an input that is normed or not."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        self.self_attn = (variant.attention or LlamaAttention)(build, variant, layer, cos_sin)
        self.mlp = variant.make_mlp(build, layer)
        self.is_last = layer == build.config.num_layers - 1
        for module in self.modules():
            if isinstance(module, FusedLinear):
                module.normed = False

    def attend(
        self, x: torch.Tensor, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """(attention's output, the tokens it is of): all, or in the last layer those that are needed after it."""
        attention, last = self.self_attn, inputs.last if self.is_last else None
        attended = attention.o_proj(attention(attention.qkv_proj(x), positions, kv, inputs, last))
        return attended, slice(None) if last is None else last.tokens


class PreNormLayer(_PlainLayer):
    """Attention, then MLP, each on a norm of the stream."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.input_layernorm = variant.make_norm(build, "input_layernorm")
        self.post_attention_layernorm = variant.make_norm(build, "post_attention_layernorm")

    def forward(
        self, hidden: torch.Tensor, residual: None, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, None]:
        attended, kept = self.attend(self.input_layernorm.normed(hidden), positions, kv, inputs)
        hidden = hidden[kept] + attended
        return hidden + self.mlp.forward_normed(self.post_attention_layernorm.normed(hidden)), None


class ParallelLayer(_PlainLayer):
    """Attention and MLP side by side on the same norm of the stream."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.input_layernorm = variant.make_norm(build, "input_layernorm")

    def forward(
        self, hidden: torch.Tensor, residual: None, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, None]:
        normed = self.input_layernorm.normed(hidden)
        attended, kept = self.attend(normed, positions, kv, inputs)
        return hidden[kept] + attended + self.mlp.forward_normed(normed[kept]), None


class PostNormLayer(_PlainLayer):
    """Attention, then MLP, each on the stream itself; their outputs are normed before they are added to it."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.post_attention_layernorm = variant.make_norm(build, "post_attention_layernorm")
        self.post_feedforward_layernorm = variant.make_norm(build, "post_feedforward_layernorm")

    def forward(
        self, hidden: torch.Tensor, residual: None, positions: torch.Tensor, kv: LayerKV, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, None]:
        attended, kept = self.attend(hidden, positions, kv, inputs)
        hidden = hidden[kept] + self.post_attention_layernorm.normed(attended)
        return hidden + self.post_feedforward_layernorm.normed(self.mlp.forward_normed(hidden)), None


class PlainMLP(nn.Module):
    """One hidden layer, without a gate."""

    def __init__(
        self, build: BuildContext, names: tuple[str, str], act: str, bias: bool, width: int | None = None
    ) -> None:
        """`width`: None: that of the config."""
        super().__init__()
        size, width = build.config.hidden_size, width or build.config.intermediate_size
        self.act = activation(act)
        self.up = ColumnParallelLinear(build, names[0], size, width, bias)
        self.down = RowParallelLinear(build, names[1], width, size, bias)

    def forward_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP's output for an input that is already normed."""
        return self.down(self.act(self.up(normed)))
