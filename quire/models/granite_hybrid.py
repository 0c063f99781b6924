"""Granite 4: Mamba 2 and a few attention layers, each with an MLP for all tokens and, in some models, a mixture.

Granite's four factors are as in Granite 3 (`granite.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.linear import GateUpLinear, RowParallelLinear
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import Mamba2Mixer, Mamba2Settings, time_step_limit
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.base import refuse_other_values
from quire.models.granite import EXPERT_NAMINGS, IMPLEMENTED, with_factors
from quire.models.hybrid_layers import FULL, RECURRENT, HybridForCausalLM, HybridLayer, layer_factory, layer_kinds
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class SharedMLP(nn.Module):
    """An MLP whose gate and up are one matrix in the checkpoint."""

    def __init__(self, build: BuildContext, width: int) -> None:
        super().__init__()
        self.input_linear = GateUpLinear(build, False, "input_linear", width)
        self.output_linear = RowParallelLinear(build, "output_linear", width, build.config.hidden_size, bias=False)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        gated, residual = self.input_linear.norm_linear(norm, x, residual)
        return self.output_linear.linear_add(residual, gated), residual

    def forward_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP's output for an input that is already normed."""
        return self.output_linear(self.input_linear(normed))


class GraniteHybridLayer(HybridLayer):
    """With an MLP for all tokens, and a mixture if the model has one."""

    norm_names = ("input_layernorm", "post_attention_layernorm")

    def make_mlp(self, build: BuildContext, variant: LlamaVariant, layer: int) -> Any:
        raw = build.config.raw
        self.shared_mlp = SharedMLP(build, positive_integer(raw, "shared_intermediate_size"))
        if not raw.get("num_local_experts", 8):
            return None
        routing = Routing.from_config(build.config, "intermediate_size", renormalise=True)
        return SparseMLP(build, routing, layer, EXPERT_NAMINGS)

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        hidden, residual, slots = self.mix(hidden, residual, positions, kv, inputs)
        if self.feed_forward is None:
            return self.shared_mlp(self.second_norm, hidden, residual)
        normed, residual = self.second_norm(hidden, residual)
        return self.feed_forward.mix(normed, slots) + self.shared_mlp.forward_normed(normed), residual


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    """Granite 4."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        listed = config.raw.get("layer_types") or ["mamba"] * config.num_layers
        kinds = layer_kinds(config, listed, {"mamba": RECURRENT, "attention": FULL})
        settings = mamba_settings(config)
        bias = bool(config.raw.get("attention_bias", False))
        positions = config.raw.get("position_embedding_type")
        if positions not in (None, "nope", "rope"):
            raise UnsupportedModelError(f"Granite 4 with position_embedding_type {positions!r} is not implemented")
        unrotated = () if positions == "rope" else range(config.num_layers)
        layer = layer_factory(GraniteHybridLayer, kinds, partial(Mamba2Mixer, settings=settings))
        variant = LlamaVariant(bias, bias, layer=layer, unrotated=unrotated)
        super().__init__(build, with_factors(variant, config), kinds, settings.cache(build))


class GraniteMoeSharedForCausalLM(LlamaForCausalLM):
    """Granite mixtures with an MLP for all tokens beside the experts, and attention in every layer."""

    def __init__(self, build: BuildContext) -> None:
        refuse_other_values(build.config, IMPLEMENTED)
        bias = bool(build.config.raw.get("attention_bias", False))

        def layer(build: BuildContext, variant: LlamaVariant, number: int, cos_sin: torch.Tensor | None) -> nn.Module:
            return GraniteHybridLayer(build, variant, number, cos_sin, None)

        super().__init__(build, with_factors(LlamaVariant(bias, bias, layer=layer), build.config))


class BambaForCausalLM(HybridForCausalLM):
    """Bamba."""

    final_norm = "final_layernorm"

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        attention = config.raw.get("attn_layer_indices") or ()
        kinds = [FULL if layer in attention else RECURRENT for layer in range(config.num_layers)]
        settings = mamba_settings(config)
        bias, mlp_bias = (bool(config.raw.get(name, False)) for name in ("attention_bias", "mlp_bias"))
        layer = layer_factory(HybridLayer, kinds, partial(Mamba2Mixer, settings=settings))
        variant = LlamaVariant(bias, bias, mlp_bias, layer=layer, norm=self.make_final_norm)
        super().__init__(build, variant, kinds, settings.cache(build))


def mamba_settings(config: ModelConfig) -> Mamba2Settings:
    """From fields named `mamba_…`."""
    raw = config.raw
    heads = positive_integer(raw, "mamba_n_heads")
    inner = positive_integer({"mamba_expand": 2} | dict(raw), "mamba_expand") * config.hidden_size
    dim = raw.get("mamba_d_head", "auto")
    return Mamba2Settings(
        heads=heads,
        groups=positive_integer(raw, "mamba_n_groups"),
        head_dim=inner // heads if dim == "auto" else int(dim),
        state_dim=positive_integer(raw, "mamba_d_state"),
        taps=positive_integer(raw, "mamba_d_conv"),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
        dt_limit=time_step_limit(raw),
        norm_groups=1,
    )
