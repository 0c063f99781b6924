"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from quire.layers.build_context import BuildContext
from quire.models.llama import LlamaForCausalLM, LlamaVariant


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2; some configs give the upper layers a sliding window."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, LlamaVariant(qkv_bias=True))
