"""LLaVA and other models that join an encoder to a relative of Llama: the text part, whichever relative it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quire.errors import UnsupportedModelError
from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


def _llama(build: BuildContext) -> LlamaVariant:
    bias = bool(build.config.raw.get("attention_bias", False))
    return LlamaVariant(bias, bias, mlp_bias=bool(build.config.raw.get("mlp_bias", False)))


def _qwen3(build: BuildContext) -> LlamaVariant:
    bias = bool(build.config.raw.get("attention_bias", False))
    return LlamaVariant(qkv_bias=bias, output_bias=bias, qk_norm=True)


_RELATIVES: dict[str, Callable[[BuildContext], LlamaVariant]] = {
    "llama": _llama,
    "mistral": lambda build: LlamaVariant(),
    "qwen2": lambda build: LlamaVariant(qkv_bias=True),
    "qwen3": _qwen3,
}


class LlavaForConditionalGeneration(LlamaForCausalLM):
    """The text part, by the `model_type` of `text_config`; the encoder is in `vision/`."""

    other_parts: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.", "image_newline")

    def __init__(self, build: BuildContext) -> None:
        kind = str(build.config.raw.get("model_type"))
        if kind not in _RELATIVES:
            raise UnsupportedModelError(
                f"{build.config.architecture} with a text model of type {kind!r} is not implemented; known: "
                f"{', '.join(_RELATIVES)}"
            )
        super().__init__(build, _RELATIVES[kind](build))

    def ignores(self, name: str) -> bool:
        """As in Llama; and what images are read with."""
        return name.removeprefix("model.").startswith(self.other_parts) or super().ignores(name)


class Idefics3ForConditionalGeneration(LlavaForConditionalGeneration):
    """Idefics3 (arXiv 2408.12637) and SmolVLM, which name their parts otherwise."""

    other_parts = ("vision_model.", "connector.")
