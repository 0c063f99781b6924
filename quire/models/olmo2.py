"""OLMo 2 (arXiv 2501.00656) and 3: norms after attention and MLP, and on all query heads and all key heads at once.

In OLMo 3 three layers of four have a sliding window, and a rope of their own.
"""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.models.base import refuse_other_values
from quire.models.llama import LlamaForCausalLM, LlamaVariant
from quire.models.plain_layers import PostNormLayer
from quire.models.qk_norms import WideNormAttention


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2 and 3; the windows are in the config, layer by layer."""

    def __init__(self, build: BuildContext) -> None:
        refuse_other_values(build.config, {"clip_qkv": 0})
        bias = bool(build.config.raw.get("attention_bias", False))
        super().__init__(build, LlamaVariant(bias, bias, attention=WideNormAttention, layer=PostNormLayer))
