"""Mistral (arXiv 2310.06825): Llama without biases, whose layers may have a sliding window."""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral 7B and its sizes; the windows are in the config, layer by layer."""

    def __init__(self, build: BuildContext) -> None:
        if build.config.rope.get("llama_4_scaling_beta") is not None:
            raise UnsupportedModelError(f"{build.config.architecture} with llama_4_scaling_beta is not implemented")
        super().__init__(build, LlamaVariant())
