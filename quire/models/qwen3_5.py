"""Qwen3.5 and 3.6, dense and with mixtures: the text part. Layers as in Qwen3-Next (`qwen3_next.py`)."""

from __future__ import annotations

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.linear import FusedPart
from quire.layers.recurrent import DeltaNetHeads
from quire.loading.model_config import positive_integer
from quire.models.llama import LlamaMLP
from quire.models.qwen2_moe import SharedExpertMLP, qwen_routing
from quire.models.qwen3_next import QwenHybridForCausalLM, QwenHybridVariant


class Qwen3_5ForCausalLM(QwenHybridForCausalLM):  # noqa: N801
    """The dense models."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, QwenHybridVariant(lambda build, layer: LlamaMLP(build), _delta_parts))

    def ignores(self, name: str) -> bool:
        """As in Qwen3-Next; and the vision tower."""
        return name.startswith(("model.visual.", "visual.")) or super().ignores(name)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    """The models with mixtures; every layer has one."""

    def __init__(self, build: BuildContext) -> None:
        routing = qwen_routing(build.config, renormalise=True)
        shared = positive_integer(build.config.raw, "shared_expert_intermediate_size")

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return SharedExpertMLP(build, routing, layer, shared)

        QwenHybridForCausalLM.__init__(self, build, QwenHybridVariant(mlp, _delta_parts))


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """As published, with a vision tower, which is not loaded."""

    nested = True


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801
    """As published, with a vision tower, which is not loaded."""

    nested = True


def _delta_parts(heads: DeltaNetHeads) -> list[FusedPart]:
    total = 2 * heads.key_size + heads.value_size
    return [
        *(FusedPart("in_proj_qkv", total, keep) for keep in heads.qkv_rows()),
        FusedPart("in_proj_z", heads.value_size, heads.value_rows),
        FusedPart("in_proj_b", heads.all_value_heads, heads.value),
        FusedPart("in_proj_a", heads.all_value_heads, heads.value),
    ]
