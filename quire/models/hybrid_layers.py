"""Layers of which some have a recurrent mixer in place of attention, each with an MLP; and models of such layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache, StateCache
from quire.layers.linear import Heads
from quire.layers.norm import RMSNorm
from quire.loading.model_config import ModelConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaVariant

FULL, RECURRENT = "full_attention", "linear_attention"

MakeMixer = Callable[[BuildContext, int], Any]
"""Makes the mixer of a layer, with its `in_proj` and `out_proj`; called as `Mamba2Mixer` is."""


class HybridLayer(nn.Module):
    """A recurrent mixer or attention, then an MLP, each on the norm of the residual stream and added back to it."""

    mixer_name = "mamba"
    """Of the mixer in checkpoints, which have one name for each kind."""
    norm_names = ("input_layernorm", "pre_ff_layernorm")
    attention: type[LlamaAttention] = LlamaAttention

    def __init__(
        self,
        build: BuildContext,
        variant: LlamaVariant,
        layer: int,
        cos_sin: torch.Tensor | None,
        mixer: MakeMixer | None,
    ) -> None:
        """`mixer`: None: the layer has attention."""
        super().__init__()
        size = build.config.hidden_size
        first, second = self.norm_names
        self.input_layernorm = RMSNorm(build, first, size, variant.norm_eps)
        self.self_attn = self.attention(build, variant, layer, cos_sin) if mixer is None else None
        self.is_recurrent = mixer is not None
        if mixer is not None:
            self.add_module(self.mixer_name, mixer(build, layer))
        self.second_norm = RMSNorm(build, second, size, variant.norm_eps)
        self.feed_forward = self.make_mlp(build, variant, layer)
        self.is_last = layer == build.config.num_layers - 1

    def make_mlp(self, build: BuildContext, variant: LlamaVariant, layer: int) -> Any:
        """What follows the mixer; called as `LlamaMLP` is."""
        return variant.make_mlp(build, layer)

    def mix(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """(output of the mixer or of attention, the stream, the tokens' slots)."""
        last, slots = inputs.last if self.is_last else None, inputs.slots
        if self.is_recurrent:
            mixer = getattr(self, self.mixer_name)
            projected, residual = mixer.in_proj.norm_linear(self.input_layernorm, hidden, residual)
            mixed, out_proj = mixer(projected, kv, inputs), mixer.out_proj
            mixed = mixed if last is None else mixed[last.tokens]
        else:
            assert self.self_attn is not None
            qkv, residual = self.self_attn.qkv_proj.norm_linear(self.input_layernorm, hidden, residual)
            mixed, out_proj = self.self_attn(qkv, positions, kv, inputs, last), self.self_attn.o_proj
        if last is not None:  # only the last tokens' hidden states are read: the other tokens end here
            residual, slots = residual[last.tokens], slots[last.tokens]
        return out_proj.linear_add(residual, mixed), residual, slots

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


class HybridForCausalLM(LlamaForCausalLM):
    """Layers with attention, and others with one kind of recurrent mixer."""

    final_norm = "norm"
    """Name of the final norm in checkpoints."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, kinds: list[str], states: StateCache) -> None:
        """`kinds`: FULL or RECURRENT for each layer; `states`: what a row keeps in a recurrent layer."""
        super().__init__(build, variant)
        self.kinds, self.states = kinds, states

    @classmethod
    def make_final_norm(cls, build: BuildContext, name: str, size: int) -> RMSNorm:
        """A `LlamaVariant.norm`, with this family's name."""
        return RMSNorm(build, cls.final_norm, size)

    @property
    def caches(self) -> list[LayerCache]:
        """What each layer of the whole model keeps, on this rank."""
        heads = Heads.of_rank(self.build)
        attention = AttentionCache(len(heads.kv), heads.dim, self.build.kv_format)
        return [attention if kind == FULL else self.states for kind in self.kinds]

    def ignores(self, name: str) -> bool:
        """As in Llama, with this family's name of the final norm."""
        is_norm = name == f"model.{self.final_norm}.weight"
        return super().ignores(name) or (is_norm and not self.build.ranks.is_last_stage)


def layer_factory(layer: type[HybridLayer], kinds: Sequence[str], mixer: MakeMixer) -> Callable[..., nn.Module]:
    """Makes the layers of a model: a `LlamaVariant.layer`."""

    def make(build: BuildContext, variant: LlamaVariant, number: int, cos_sin: torch.Tensor | None) -> nn.Module:
        return layer(build, variant, number, cos_sin, mixer if kinds[number] == RECURRENT else None)

    return make


def layer_kinds(config: ModelConfig, listed: Sequence[Any], names: Mapping[str, str]) -> list[str]:
    """FULL or RECURRENT for each layer; `names`: what this family calls them, besides these."""
    known = {FULL: FULL, RECURRENT: RECURRENT, **names}
    if len(listed) != config.num_layers or set(listed) - set(known):
        raise UnsupportedModelError(
            f"{config.architecture} with layer_types {sorted(set(map(str, listed)))} for {len(listed)} of "
            f"{config.num_layers} layers is not implemented; {' and '.join(map(repr, names))} are"
        )
    return [known[kind] for kind in listed]
