"""Phi-3 (arXiv 2404.14219), Phi-3.5 mini, Phi-4 and Phi-4-mini: Llama whose checkpoints have q, k and v in one matrix,
and gate and up in another. Long versions have LongRoPE, some versions rotate a part of each head."""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 and Phi-4; all layers may have a sliding window."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, LlamaVariant(is_fused=True))
