"""Gemma 2 (arXiv 2408.00118): norms before and after attention and MLP, soft caps, every other layer with a window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.linear import GateUpLinear, RowParallelLinear
from quire.layers.norm import ZeroCenteredRMSNorm
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaVariant

_GATES = {"gelu_pytorch_tanh": "gelu_tanh"}


class Gemma2Attention(LlamaAttention):
    """Attention whose scores are capped, with a scale of the config's."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.attention.spec = replace(self.attention.spec, soft_cap=build.config.raw.get("attn_logit_softcapping"))


class GemmaMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext, layer: int, width: int | None = None) -> None:
        """`width`: if not the model's intermediate_size."""
        super().__init__()
        config = build.config
        self.gate_up_proj = GateUpLinear(build, False, width=width, activation=gate_of(build))
        self.down_proj = RowParallelLinear(
            build, "down_proj", width or config.intermediate_size, config.hidden_size, False
        )


class GemmaLayer(nn.Module):
    """Attention, then MLP, each on the norm of the residual stream; their outputs are normed too before they are added.

    Additions are fused with the norms that follow them.
    """

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__()
        self.self_attn = (variant.attention or LlamaAttention)(build, variant, layer, cos_sin)
        self.mlp = variant.make_mlp(build, layer)
        norm = partial(ZeroCenteredRMSNorm, build, size=build.config.hidden_size)
        self.input_layernorm, self.post_attention_layernorm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.is_last = layer == build.config.num_layers - 1

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output to add to the residual stream, the stream)."""
        attention, mlp = self.self_attn, self.mlp
        qkv, residual = attention.qkv_proj.norm_linear(self.input_layernorm, hidden, residual)
        last = inputs.last if self.is_last else None
        attended = attention(qkv, positions, kv, inputs, last)
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            residual = residual[last.tokens]
        hidden = self.post_attention_layernorm.normed(attention.o_proj(attended))
        gated, residual = mlp.gate_up_proj.norm_linear(self.pre_feedforward_layernorm, hidden, residual)
        return self.post_feedforward_layernorm.normed(mlp.down_proj(gated)), residual


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2 in its sizes, and what later Gemmas share with it."""

    is_gated = False
    attention: type[LlamaAttention] = Gemma2Attention

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        gate_of(build)
        if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise UnsupportedModelError(
                f"{build.config.architecture} with use_bidirectional_attention is not implemented: attention is causal"
            )
        bias = bool(raw.get("attention_bias", False))
        super().__init__(
            build,
            LlamaVariant(
                bias,
                bias,
                attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
                embedding_scale=embedding_scale(build),
                attention=self.attention,
                mlp=GemmaMLP,
                layer=GemmaLayer,
                norm=ZeroCenteredRMSNorm,
            ),
        )
        self.logit_cap: float | None = raw.get("final_logit_softcapping")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        logits = super().logits(hidden)
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap


def gate_of(build: BuildContext) -> str:
    """The MLPs' activation. Old files have a `hidden_act` that was never used."""
    name = build.config.raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if name not in _GATES:
        raise UnsupportedModelError(
            f"{build.config.architecture} with hidden_activation {name!r} is not implemented; known: "
            f"{', '.join(_GATES)}"
        )
    return _GATES[name]


def embedding_scale(build: BuildContext) -> float:
    """The factor on embeddings: the root of their size, rounded to the activations' dtype as in training."""
    return torch.tensor(build.config.hidden_size**0.5).to(build.dtype).item()
