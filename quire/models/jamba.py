"""Jamba (arXiv 2403.19887): Mamba 1 and a few attention layers without positions; every other layer has a mixture."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import ExpertNaming
from quire.layers.mamba import MambaMixer, MambaSettings
from quire.layers.moe import Routing, SparseMLP
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.base import refuse_other_values
from quire.models.hybrid_layers import FULL, RECURRENT, HybridForCausalLM, HybridLayer, layer_factory
from quire.models.llama import LlamaMLP, LlamaVariant

_GATE_UP = "feed_forward.experts.gate_up_proj"
_EXPERT_NAMINGS = (
    ExpertNaming(
        "feed_forward.router.weight",
        "feed_forward.experts.{}.gate_proj.weight",
        "feed_forward.experts.{}.up_proj.weight",
        "feed_forward.experts.{}.down_proj.weight",
    ),
    ExpertNaming("feed_forward.router.weight", _GATE_UP, _GATE_UP, "feed_forward.experts.down_proj"),
)


class JambaForCausalLM(HybridForCausalLM):
    """Jamba 1.5, 1.6, 1.7 and Jamba Reasoning."""

    final_norm = "final_layernorm"

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        refuse_other_values(config, {"sliding_window": 0, "mamba_inner_layernorms": True})
        kinds = [FULL if _is_in_period(config, "attn", i, 8, 4) else RECURRENT for i in range(config.num_layers)]
        settings = mamba_settings(config)
        variant = LlamaVariant(
            mlp=self.make_mlp,
            layer=layer_factory(HybridLayer, kinds, partial(MambaMixer, settings=settings)),
            norm=self.make_final_norm,
            unrotated=range(config.num_layers),
        )
        super().__init__(build, variant, kinds, settings.cache(build))

    @staticmethod
    def make_mlp(build: BuildContext, layer: int) -> nn.Module:
        """The MLP of a layer, or its mixture."""
        config = build.config
        if config.raw.get("num_experts", 16) == 1 or not _is_in_period(config, "expert", layer, 2, 1):
            return LlamaMLP(build)
        routing = Routing.from_config(config, "intermediate_size", renormalise=False)
        return SparseMLP(build, routing, layer, _EXPERT_NAMINGS)


def mamba_settings(config: ModelConfig) -> MambaSettings:
    """From fields named `mamba_…`."""
    raw = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto"} | dict(config.raw)
    is_auto = raw["mamba_dt_rank"] == "auto"
    return MambaSettings(
        channels=positive_integer(raw, "mamba_expand") * config.hidden_size,
        state_dim=positive_integer(raw, "mamba_d_state"),
        taps=positive_integer(raw, "mamba_d_conv"),
        rank=math.ceil(config.hidden_size / 16) if is_auto else positive_integer(raw, "mamba_dt_rank"),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
    )


def _is_in_period(config: ModelConfig, kind: str, layer: int, period: int, offset: int) -> bool:
    """Whether a layer is of this kind; `period` and `offset`: unless the config says otherwise."""
    raw = config.raw
    period, offset = raw.get(f"{kind}_layer_period", period), raw.get(f"{kind}_layer_offset", offset)
    return bool(layer % period == offset)
