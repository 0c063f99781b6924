"""SmolLM3: Llama in which every fourth layer has no positions (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3; `no_rope_layers` has 0 where a layer is not rotated."""

    def __init__(self, build: BuildContext) -> None:
        config, raw = build.config, build.config.raw
        interval = raw.get("no_rope_layer_interval", 4)
        rotated = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in range(config.num_layers)]
        unrotated = {layer for layer in range(config.num_layers) if not rotated[layer]}
        bias = bool(raw.get("attention_bias", False))
        variant = LlamaVariant(bias, bias, bool(raw.get("mlp_bias", False)), unrotated=unrotated)
        super().__init__(build, variant)
