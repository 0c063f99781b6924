"""LFM2 (arXiv 2511.23404): gated short convolutions and a few attention layers; also as a mixture.

Attention is Qwen 3's, with other names. A mixture's first layers are dense.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from quire.kernels.routing import RouteRule
from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import ExpertNaming
from quire.layers.linear import GateUpLinear, RowParallelLinear
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.short_conv import ShortConvMixer, short_conv_cache
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.hybrid_layers import FULL, RECURRENT, HybridForCausalLM, HybridLayer, layer_factory, layer_kinds
from quire.models.llama import LlamaAttention, LlamaMLP, LlamaVariant

_GATE_UP = "feed_forward.experts.gate_up_proj"
_EXPERT_NAMINGS = (
    ExpertNaming(
        "feed_forward.gate.weight",
        "feed_forward.experts.{}.w1.weight",
        "feed_forward.experts.{}.w3.weight",
        "feed_forward.experts.{}.w2.weight",
    ),
    ExpertNaming("feed_forward.gate.weight", _GATE_UP, _GATE_UP, "feed_forward.experts.down_proj"),
)


class Lfm2Attention(LlamaAttention):
    """Grouped-query attention with norms of queries and keys."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        self.q_norm.name, self.k_norm.name = "q_layernorm", "k_layernorm"
        config = build.config
        self.o_proj = RowParallelLinear(
            build, "out_proj", config.num_heads * config.head_dim, config.hidden_size, bias=False
        )


class Lfm2MLP(LlamaMLP):
    """w2(silu(w1(x)) * w3(x))."""

    def __init__(self, build: BuildContext, width: int) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = GateUpLinear(build, False, ("w1", "w3"), width)
        self.down_proj = RowParallelLinear(build, "w2", width, build.config.hidden_size, bias=False)


class Lfm2Layer(HybridLayer):
    """A short convolution or attention, then an MLP."""

    mixer_name = "conv"
    norm_names = ("operator_norm", "ffn_norm")
    attention = Lfm2Attention


class Lfm2ForCausalLM(HybridForCausalLM):
    """The dense models."""

    final_norm = "embedding_norm"

    def __init__(self, build: BuildContext) -> None:
        config, raw = build.config, build.config.raw
        every = range(config.num_layers)
        attention = raw.get("full_attn_idxs")
        listed = raw.get("layer_types") or [FULL if attention is None or i in attention else "conv" for i in every]
        kinds = layer_kinds(config, listed, {"conv": RECURRENT})
        taps = positive_integer({"conv_L_cache": 3} | dict(raw), "conv_L_cache")
        mixer = partial(ShortConvMixer, taps=taps, bias=bool(raw.get("conv_bias", False)))
        variant = LlamaVariant(
            qk_norm=True,
            mlp=self.make_mlp,
            layer=layer_factory(Lfm2Layer, kinds, mixer),
            norm=self.make_final_norm,
        )
        super().__init__(build, variant, kinds, short_conv_cache(build, taps))

    @staticmethod
    def make_mlp(build: BuildContext, layer: int) -> nn.Module:
        """The MLP of a layer."""
        return Lfm2MLP(build, mlp_width(build.config))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """The mixtures."""

    @staticmethod
    def make_mlp(build: BuildContext, layer: int) -> nn.Module:
        """The MLP of a layer, or its mixture."""
        config, raw = build.config, build.config.raw
        if layer < raw.get("num_dense_layers", 2):
            return Lfm2MLP(build, config.intermediate_size)
        routing = Routing.from_config(config, "moe_intermediate_size", bool(raw.get("norm_topk_prob", True)))
        rule = RouteRule(sigmoid=True, scale=float(raw.get("routed_scaling_factor", 1.0)))
        bias = "feed_forward.expert_bias" if raw.get("use_expert_bias", True) else ""
        return SparseMLP(build, replace(routing, rule=rule, bias=bias), layer, _EXPERT_NAMINGS)


def mlp_width(config: ModelConfig) -> int:
    """Two thirds of the config's size, times a factor, rounded up; unless it says that its size is meant."""
    raw = config.raw
    width = int(raw.get("block_ff_dim", config.intermediate_size))
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    if (factor := raw.get("block_ffn_dim_multiplier", 1.0)) is None:
        return width
    multiple = int(raw.get("block_multiple_of", 256))
    return -(-int(factor * width) // multiple) * multiple
