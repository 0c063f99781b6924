"""Cohere's Command R, Command R+ and Aya (Cohere), Command R7B and Command A (Cohere 2).

Llama with attention and MLP side by side, layer norms without bias, neighbouring rotary pairs and scaled logits. In
Cohere 2 only the layers with a sliding window have positions.
"""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.layers.norm import LayerNorm
from quire.models.base import refuse_other_values
from quire.models.llama import LlamaForCausalLM, LlamaVariant
from quire.models.plain_layers import ParallelLayer
from quire.models.qk_norms import HeadNormAttention

# Fields of the published configs, which transformers does not know.
_IMPLEMENTED = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "layer_norm_bias": False,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "layer_switch": 4,
}


def _norm(build: BuildContext, name: str, size: int) -> LayerNorm:
    return LayerNorm(build, name, size, bias=False)


class CohereForCausalLM(LlamaForCausalLM):
    """Command R and R+; the latter norms each query and key head."""

    def __init__(self, build: BuildContext) -> None:
        config, raw = build.config, build.config.raw
        refuse_other_values(config, _IMPLEMENTED)
        bias = bool(raw.get("attention_bias", False))
        is_second = raw.get("model_type") == "cohere2"
        unrotated = [layer for layer, window in enumerate(config.windows) if is_second and window is None]
        super().__init__(
            build,
            LlamaVariant(
                bias,
                bias,
                interleaved_rotary=config.head_dim,
                unrotated=unrotated,
                logit_scale=float(raw["logit_scale"]),
                attention=HeadNormAttention if raw.get("use_qk_norm") else None,
                layer=ParallelLayer,
                norm=_norm,
            ),
        )
