"""Processors and encoders by architecture. Each file is imported when its model is; dotted paths may be registered."""

from __future__ import annotations

from typing import Any

from quire.registry import resolve


class ByArchitecture:
    """Dotted paths by the name that config.json gives the architecture."""

    def __init__(self, kind: str, known: dict[str, str]) -> None:
        self.kind, self.known = kind, known

    def register(self, architecture: str, path: str) -> None:
        """Use the class at the dotted `path` for this architecture."""
        self.known[architecture] = path

    def find(self, architecture: str) -> Any | None:
        """The class; None if there is none for this architecture."""
        return resolve(self.kind, architecture, self.known) if architecture in self.known else None


_PIXTRAL = "quire.vision.pixtral_processor"
_SPLIT = "quire.vision.split_processors"
_TILES = "quire.vision.tile_processors"
_TOWERS = "quire.vision.towers"
_QWEN = "quire.vision.qwen_processor"

PROCESSORS = ByArchitecture(
    "image processor",
    {
        "Gemma3ForConditionalGeneration": f"{_TILES}.Gemma3Processor",
        "Gemma4ForConditionalGeneration": "quire.vision.gemma4_processor.Gemma4Processor",
        "Idefics3ForConditionalGeneration": f"{_SPLIT}.Idefics3Processor",
        "InternVLForConditionalGeneration": f"{_SPLIT}.InternVLProcessor",
        "LlavaForConditionalGeneration": f"{_PIXTRAL}.llava_processor",
        "LlavaNextForConditionalGeneration": f"{_TILES}.LlavaNextProcessor",
        "Mistral3ForConditionalGeneration": f"{_PIXTRAL}.PixtralProcessor",
        "SmolVLMForConditionalGeneration": f"{_SPLIT}.Idefics3Processor",
        "Qwen2_5_VLForConditionalGeneration": f"{_QWEN}.Qwen2_5VLProcessor",
        "Qwen2VLForConditionalGeneration": f"{_QWEN}.QwenProcessor",
        "Qwen3VLForConditionalGeneration": f"{_QWEN}.Qwen3VLProcessor",
        "Qwen3VLMoeForConditionalGeneration": f"{_QWEN}.Qwen3VLProcessor",
        "Qwen3_5ForConditionalGeneration": f"{_QWEN}.Qwen3VLProcessor",
        "Qwen3_5MoeForConditionalGeneration": f"{_QWEN}.Qwen3VLProcessor",
    },
)
"""Classes called with (ModelConfig, ProcessorFiles, tokenizer), see `processor.py`."""

ENCODERS = ByArchitecture(
    "vision encoder",
    {
        "Gemma3ForConditionalGeneration": f"{_TOWERS}.Gemma3Encoder",
        "Gemma4ForConditionalGeneration": "quire.vision.gemma4.Gemma4Encoder",
        "Idefics3ForConditionalGeneration": "quire.vision.idefics3.Idefics3Encoder",
        "InternVLForConditionalGeneration": "quire.vision.internvl.InternVLEncoder",
        "LlavaForConditionalGeneration": "quire.vision.pixtral.llava_encoder",
        "LlavaNextForConditionalGeneration": f"{_TOWERS}.LlavaNextEncoder",
        "Mistral3ForConditionalGeneration": "quire.vision.pixtral.PixtralEncoder",
        "SmolVLMForConditionalGeneration": "quire.vision.idefics3.Idefics3Encoder",
        "Qwen2_5_VLForConditionalGeneration": "quire.vision.qwen2_5_vl.Qwen2_5VLEncoder",
        "Qwen2VLForConditionalGeneration": "quire.vision.qwen2_vl.Qwen2VLEncoder",
        "Qwen3VLForConditionalGeneration": "quire.vision.qwen3_vl.Qwen3VLEncoder",
        "Qwen3VLMoeForConditionalGeneration": "quire.vision.qwen3_vl.Qwen3VLEncoder",
        "Qwen3_5ForConditionalGeneration": "quire.vision.qwen3_vl.Qwen3_5Encoder",
        "Qwen3_5MoeForConditionalGeneration": "quire.vision.qwen3_vl.Qwen3_5Encoder",
    },
)
"""Classes called with a `BuildContext`, see `base.py`."""
