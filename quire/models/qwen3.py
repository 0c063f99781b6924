"""Qwen3 (arXiv 2505.09388): Llama with an RMS norm on each query and key head before the rotation."""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The dense Qwen3 models."""

    def __init__(self, build: BuildContext) -> None:
        bias = bool(build.config.raw.get("attention_bias", False))
        super().__init__(build, LlamaVariant(qkv_bias=bias, output_bias=bias, qk_norm=True))
