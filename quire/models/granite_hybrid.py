"""Granite 4: Mamba 2 and a few attention layers, each with an MLP for all tokens and, in some models, a mixture.

Granite's four factors are as in Granite 3 (`granite.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.linear import GateUpLinear, Heads, RowParallelLinear
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import Mamba2Mixer, Mamba2Settings, time_step_limit
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.granite import EXPERT_NAMINGS, with_factors
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaVariant


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


class MambaHybridLayer(nn.Module):
    """Mamba 2 or attention, then MLP, each on the norm of the residual stream and added back to it."""

    def __init__(
        self,
        build: BuildContext,
        variant: LlamaVariant,
        layer: int,
        cos_sin: torch.Tensor | None,
        mamba: Mamba2Settings | None,
        second_norm: str,
    ) -> None:
        """`mamba`: None: the layer has attention. `second_norm`: name of the MLP's norm."""
        super().__init__()
        size = build.config.hidden_size
        self.input_layernorm = RMSNorm(build, "input_layernorm", size, variant.norm_eps)
        # The checkpoint has one name for each kind.
        self.mamba = None if mamba is None else Mamba2Mixer(build, mamba, layer)
        self.self_attn = LlamaAttention(build, variant, layer, cos_sin) if mamba is None else None
        self.second_norm = RMSNorm(build, second_norm, size, variant.norm_eps)
        self.is_last = layer == build.config.num_layers - 1

    def mix(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """(output of Mamba or attention, the stream, the tokens' slots)."""
        last, slots = inputs.last if self.is_last else None, inputs.slots
        if self.mamba is not None:
            projected, residual = self.mamba.in_proj.norm_linear(self.input_layernorm, hidden, residual)
            mixed, out_proj = self.mamba(projected, kv, inputs), self.mamba.out_proj
            mixed = mixed if last is None else mixed[last.tokens]
        else:
            assert self.self_attn is not None
            qkv, residual = self.self_attn.qkv_proj.norm_linear(self.input_layernorm, hidden, residual)
            mixed, out_proj = self.self_attn(qkv, positions, kv, inputs, last), self.self_attn.o_proj
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            residual, slots = residual[last.tokens], slots[last.tokens]
        return out_proj.linear_add(residual, mixed), residual, slots


class GraniteHybridLayer(MambaHybridLayer):
    """With an MLP for all tokens, and a mixture if the model has one."""

    def __init__(
        self,
        build: BuildContext,
        variant: LlamaVariant,
        layer: int,
        cos_sin: torch.Tensor | None,
        mamba: Mamba2Settings | None,
    ) -> None:
        super().__init__(build, variant, layer, cos_sin, mamba, "post_attention_layernorm")
        raw = build.config.raw
        self.shared_mlp = SharedMLP(build, positive_integer(raw, "shared_intermediate_size"))
        self.experts: SparseMLP | None = None
        if raw.get("num_local_experts", 8):
            routing = Routing.from_config(build.config, "intermediate_size", renormalise=True)
            self.experts = SparseMLP(build, routing, layer, EXPERT_NAMINGS)

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
        if self.experts is None:
            return self.shared_mlp(self.second_norm, hidden, residual)
        normed, residual = self.second_norm(hidden, residual)
        return self.experts.mix(normed, slots) + self.shared_mlp.forward_normed(normed), residual


class BambaLayer(MambaHybridLayer):
    """With a plain gated MLP."""

    def __init__(
        self,
        build: BuildContext,
        variant: LlamaVariant,
        layer: int,
        cos_sin: torch.Tensor | None,
        mamba: Mamba2Settings | None,
    ) -> None:
        super().__init__(build, variant, layer, cos_sin, mamba, "pre_ff_layernorm")
        self.feed_forward = LlamaMLP(build, variant.mlp_bias)

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
        return self.feed_forward(self.second_norm, hidden, residual, slots)


class MambaHybridForCausalLM(LlamaForCausalLM):
    """What Granite 4 and Bamba share."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, kinds: list[str], settings: Mamba2Settings) -> None:
        super().__init__(build, variant)
        self.kinds, self.settings = kinds, settings

    @property
    def caches(self) -> list[LayerCache]:
        """What each layer of the whole model keeps, on this rank."""
        heads = Heads.of_rank(self.build)
        attention = AttentionCache(len(heads.kv), heads.dim, self.build.kv_format)
        states = self.settings.cache(self.build)
        return [attention if kind == "full_attention" else states for kind in self.kinds]

    def ignores(self, name: str) -> bool:
        """As in Llama, with Bamba's name of the final norm."""
        is_norm = name == "model.final_layernorm.weight"
        return super().ignores(name) or (is_norm and not self.build.ranks.is_last_stage)


class GraniteMoeHybridForCausalLM(MambaHybridForCausalLM):
    """Granite 4."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        kinds = layer_kinds(config, config.raw.get("layer_types") or ["mamba"] * config.num_layers)
        settings = mamba_settings(config)
        bias = bool(config.raw.get("attention_bias", False))
        positions = config.raw.get("position_embedding_type")
        if positions not in (None, "nope", "rope"):
            raise UnsupportedModelError(f"Granite 4 with position_embedding_type {positions!r} is not implemented")

        def layer(build: BuildContext, variant: LlamaVariant, number: int, cos_sin: torch.Tensor | None) -> nn.Module:
            mamba = settings if kinds[number] == "linear_attention" else None
            return GraniteHybridLayer(build, variant, number, cos_sin, mamba)

        unrotated = () if positions == "rope" else range(config.num_layers)
        variant = LlamaVariant(bias, bias, layer=layer, unrotated=unrotated)
        super().__init__(build, with_factors(variant, config), kinds, settings)


class BambaForCausalLM(MambaHybridForCausalLM):
    """Bamba."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        attention = config.raw.get("attn_layer_indices") or ()
        kinds = ["full_attention" if layer in attention else "linear_attention" for layer in range(config.num_layers)]
        settings = mamba_settings(config)
        bias, mlp_bias = (bool(config.raw.get(name, False)) for name in ("attention_bias", "mlp_bias"))

        def layer(build: BuildContext, variant: LlamaVariant, number: int, cos_sin: torch.Tensor | None) -> nn.Module:
            mamba = settings if kinds[number] == "linear_attention" else None
            return BambaLayer(build, variant, number, cos_sin, mamba)

        def norm(build: BuildContext, name: str, size: int) -> RMSNorm:
            return RMSNorm(build, "final_layernorm", size)

        super().__init__(build, LlamaVariant(bias, bias, mlp_bias, layer=layer, norm=norm), kinds, settings)


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


def layer_kinds(config: ModelConfig, listed: list[Any]) -> list[str]:
    """ "linear_attention" or "full_attention" for each layer."""
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [names.get(kind, kind) for kind in listed]
    if len(kinds) != config.num_layers or set(kinds) - set(names.values()):
        raise UnsupportedModelError(
            f"{config.architecture} with layer_types {sorted(set(map(str, listed)))} for {len(listed)} of "
            f"{config.num_layers} layers is not implemented; 'mamba' and 'attention' are"
        )
    return kinds
