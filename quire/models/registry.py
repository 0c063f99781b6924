"""Architectures by the name config.json gives them. Each file is imported when its model is."""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.models.base import CausalLM
from quire.registry import resolve

_KNOWN = {
    "GPT2LMHeadModel": "quire.models.gpt2.GPT2LMHeadModel",
    "GPTNeoXForCausalLM": "quire.models.gpt_neox.GPTNeoXForCausalLM",
    "LlamaForCausalLM": "quire.models.llama.LlamaForCausalLM",
    "MistralForCausalLM": "quire.models.mistral.MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.mixtral.MixtralForCausalLM",
    "Qwen2ForCausalLM": "quire.models.qwen2.Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.qwen2_moe.Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.models.qwen3.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.qwen3_moe.Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "quire.models.qwen3_next.Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "quire.models.qwen3_5.Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "quire.models.qwen3_5.Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "quire.models.qwen3_5.Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "quire.models.qwen3_5.Qwen3_5MoeForConditionalGeneration",
}


def register(architecture: str, path: str) -> None:
    """Serve `architecture` (a name in config.json's `architectures`) with the class at the dotted `path`."""
    _KNOWN[architecture] = path


def supported() -> list[str]:
    """The architectures that can be served."""
    return sorted(_KNOWN)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`."""
    if architecture not in _KNOWN:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not implemented; supported: {', '.join(supported())}; "
            "quire.models.registry.register() adds one"
        )
    return resolve("architecture", architecture, _KNOWN)
