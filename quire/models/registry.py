"""Architectures by the name config.json gives them. Each file is imported when its model is."""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.loading.class_head import CLASSIFIES
from quire.models.base import CausalLM
from quire.models.classifier import classifier_class
from quire.registry import resolve

_KNOWN = {
    "BambaForCausalLM": "quire.models.granite_hybrid.BambaForCausalLM",
    "BitNetForCausalLM": "quire.models.bitnet.BitNetForCausalLM",
    "BloomForCausalLM": "quire.models.bloom.BloomForCausalLM",
    "Cohere2ForCausalLM": "quire.models.cohere.CohereForCausalLM",
    "CohereForCausalLM": "quire.models.cohere.CohereForCausalLM",
    "DeepseekV2ForCausalLM": "quire.models.deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "quire.models.deepseek.DeepseekV3ForCausalLM",
    "FalconForCausalLM": "quire.models.falcon.FalconForCausalLM",
    "Glm4ForCausalLM": "quire.models.glm.Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "quire.models.glm.Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "quire.models.glm.Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "quire.models.glm.GlmForCausalLM",
    "GPT2LMHeadModel": "quire.models.gpt2.GPT2LMHeadModel",
    "GPTNeoXForCausalLM": "quire.models.gpt_neox.GPTNeoXForCausalLM",
    "Gemma2ForCausalLM": "quire.models.gemma2.Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.models.gemma3.Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "quire.models.gemma3.Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM": "quire.models.gemma4.Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "quire.models.gemma4.Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM": "quire.models.gemma4.Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "quire.models.gemma4.Gemma4ForCausalLM",
    "GptOssForCausalLM": "quire.models.gpt_oss.GptOssForCausalLM",
    "GraniteForCausalLM": "quire.models.granite.GraniteForCausalLM",
    "GraniteMoeForCausalLM": "quire.models.granite.GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "quire.models.granite_hybrid.GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM": "quire.models.granite_hybrid.GraniteMoeSharedForCausalLM",
    "Idefics3ForConditionalGeneration": "quire.models.llava.Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration": "quire.models.llava.LlavaForConditionalGeneration",
    "JambaForCausalLM": "quire.models.jamba.JambaForCausalLM",
    "Lfm2ForCausalLM": "quire.models.lfm2.Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "quire.models.lfm2.Lfm2MoeForCausalLM",
    "LlamaForCausalLM": "quire.models.llama.LlamaForCausalLM",
    "LlavaForConditionalGeneration": "quire.models.llava.LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration": "quire.models.llava.LlavaForConditionalGeneration",
    "Mamba2ForCausalLM": "quire.models.mamba2.Mamba2ForCausalLM",
    "MiniMaxM2ForCausalLM": "quire.models.minimax_m2.MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "quire.models.ministral.Ministral3ForCausalLM",
    "MinistralForCausalLM": "quire.models.ministral.MinistralForCausalLM",
    "Mistral3ForConditionalGeneration": "quire.models.ministral.Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "quire.models.mistral.MistralForCausalLM",
    "MixtralForCausalLM": "quire.models.mixtral.MixtralForCausalLM",
    "NemotronHForCausalLM": "quire.models.nemotron_h.NemotronHForCausalLM",
    "Olmo2ForCausalLM": "quire.models.olmo2.Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "quire.models.olmo2.Olmo2ForCausalLM",
    "OPTForCausalLM": "quire.models.opt.OPTForCausalLM",
    "Phi3ForCausalLM": "quire.models.phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "quire.models.qwen2.Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.models.qwen2_moe.Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": "quire.models.qwen2_vl.Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": "quire.models.qwen2_vl.Qwen2VLForConditionalGeneration",
    "Qwen3_5ForCausalLM": "quire.models.qwen3_5.Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "quire.models.qwen3_5.Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "quire.models.qwen3_5.Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "quire.models.qwen3_5.Qwen3_5MoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration": "quire.models.qwen3_vl.Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "quire.models.qwen3_vl.Qwen3VLMoeForConditionalGeneration",
    "Qwen3ForCausalLM": "quire.models.qwen3.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.models.qwen3_moe.Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "quire.models.qwen3_next.Qwen3NextForCausalLM",
    "SmolLM3ForCausalLM": "quire.models.smollm3.SmolLM3ForCausalLM",
    "SmolVLMForConditionalGeneration": "quire.models.llava.Idefics3ForConditionalGeneration",
    "StableLmForCausalLM": "quire.models.stablelm.StableLmForCausalLM",
    "Starcoder2ForCausalLM": "quire.models.starcoder2.Starcoder2ForCausalLM",
}


def register(architecture: str, path: str) -> None:
    """Serve `architecture` (a name in config.json's `architectures`) with the class at the dotted `path`."""
    _KNOWN[architecture] = path


def supported() -> list[str]:
    """The architectures that can be served."""
    return sorted(_KNOWN)


_OTHER_BODIES = {f"GPT2{CLASSIFIES}": "GPT2LMHeadModel"}


def body_of(architecture: str) -> str | None:
    """The language model whose body a classifier has; None: it is no classifier, or of none that is implemented."""
    if not architecture.endswith(CLASSIFIES):
        return None
    body = _OTHER_BODIES.get(architecture, f"{architecture.removesuffix(CLASSIFIES)}ForCausalLM")
    return body if body in _KNOWN else None


_THROUGH_TRANSFORMERS = "quire.models.transformers_backend.model.TransformersForCausalLM"


def implementation(architecture: str, impl: str = "auto") -> str:
    """Whose code computes `architecture` under the setting `model_impl`: "quire" or "transformers"."""
    if impl == "auto":
        return "quire" if architecture in _KNOWN or architecture.endswith(CLASSIFIES) else "transformers"
    return "transformers" if impl == "transformers" else "quire"


def model_class(architecture: str, impl: str = "quire") -> type[CausalLM]:
    """The class that implements `architecture` under the setting `model_impl`."""
    if implementation(architecture, impl) == "quire":
        if (body := body_of(architecture)) is not None:
            return classifier_class(resolve("architecture", body, _KNOWN))
        if architecture.endswith(CLASSIFIES):
            raise UnsupportedModelError(
                f"{architecture} is not implemented: classifiers are decoders with a head for classes, such as "
                f"Llama{CLASSIFIES} and Qwen3{CLASSIFIES}, and not encoders"
            )
        if architecture not in _KNOWN:
            raise _unknown(architecture, "; model_impl 'transformers' may run it")
        return resolve("architecture", architecture, _KNOWN)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

    if not any(architecture in ((each,) if isinstance(each, str) else each) for each in FAMILIES.values()):
        raise _unknown(architecture, ", and transformers has no causal language model of this name")
    return resolve("model implementation", "transformers", {"transformers": _THROUGH_TRANSFORMERS})


def _unknown(architecture: str, more: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"architecture {architecture!r} is not implemented; supported: {', '.join(supported())}; "
        f"quire.models.registry.register() adds one{more}"
    )
