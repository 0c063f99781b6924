"""Qwen2-VL and Qwen2.5-VL (arXiv 2409.12191, 2502.13923), the text part: Qwen2 with positions of three rows."""

from __future__ import annotations

from quire.models.qwen2 import Qwen2ForCausalLM


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """The text part; the encoder is in `vision/`."""

    def ignores(self, name: str) -> bool:
        """As in Llama; and the vision tower, which is read apart."""
        return name.startswith(("model.visual.", "visual.")) or super().ignores(name)
