"""Gemma 3 (arXiv 2503.19786), the text part: norms of queries and keys, five layers of six with a window and a rope of
their own."""

from __future__ import annotations

import torch

from quire.layers.build_context import BuildContext
from quire.layers.norm import ZeroCenteredRMSNorm
from quire.models.gemma2 import Gemma2Attention, Gemma2ForCausalLM
from quire.models.llama import LlamaVariant

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Gemma3Attention(Gemma2Attention):
    """Attention with an RMS norm on each query and key head."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        q_norm, k_norm = (ZeroCenteredRMSNorm(build, name, self.heads.dim) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = q_norm, k_norm
        self.attention.norms = (q_norm.weight, k_norm.weight, q_norm.eps)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The 270M and 1B models, and the text part of the others."""

    attention = Gemma3Attention

    def ignores(self, name: str) -> bool:
        """As in Llama; and what images are read with."""
        return name.startswith(_OTHER_PARTS) or super().ignores(name)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The 4B to 27B models: the tokens of an image see each other both ways. The encoder is in `vision/`."""

    bidirectional_spans = True
