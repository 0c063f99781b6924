"""The metadata of a GGUF header, converted to the fields of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quire.errors import CheckpointError, UnsupportedModelError
from quire.loading.gguf_families import (
    deepseek,
    gemma4,
    granite_hybrid,
    grouped_mixture,
    kv_heads_of,
    layer_types,
    minimax,
    mistral3,
    nemotron_h,
    recurrent_layers,
    refuse_key,
)
from quire.loading.gguf_header import GGUFHeader
from quire.loading.gguf_names import NAMES, ValueHeads

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "qwen3next": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
_MIXTURES = frozenset(
    {"llama", "qwen2moe", "qwen3moe", "granitemoe", "lfm2moe", "gpt-oss", "qwen35moe", "deepseek2", "glm4moe"}
    | {"granitehybrid", "qwen3next", "gemma4", "nemotron_h_moe", "minimax-m2"}
)
_LAYER_NORMS = frozenset({"gpt2", "gptneox", "command-r", "cohere2", "starcoder2", "stablelm", "falcon"})
_PARTLY_ROTATED = frozenset({"phi3", "stablelm", "qwen35", "qwen35moe", "qwen3next", "glm4", "glm4moe", "minimax-m2"})
# general.file_type of files that are not quantized.
_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The dictionary that a config.json of this model would have."""
    family = header.architecture
    if family not in _CLASSES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {family!r} is not supported; supported: {', '.join(sorted(NAMES))}"
        )
    if header.integer("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{header.path} is one part of a model split over several GGUF files; join them with `gguf-split --merge`"
        )
    if header.integer(f"{family}.expert_count", 0) and family not in _MIXTURES:
        raise UnsupportedModelError(f"{header.path}: a GGUF file of {family!r} with experts is not supported")
    model_type, architecture = _CLASSES[family]
    raw: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": _vocabulary(header, family),
        "hidden_size": header.positive(f"{family}.embedding_length"),
        "num_hidden_layers": num_layers(header),
        "num_attention_heads": header.positive(f"{family}.attention.head_count"),
        "intermediate_size": _width(header, family),
        "max_position_embeddings": header.positive(f"{family}.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(header),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
    }
    if (dtype := _DTYPES.get(header.integer("general.file_type", -1))) is not None:
        raw["dtype"] = dtype
    if family in _LAYER_NORMS:
        raw["layer_norm_eps"] = header.number(f"{family}.attention.layer_norm_epsilon", 1e-5)
    if family == "gpt2":
        raw["layer_norm_epsilon"] = raw.pop("layer_norm_eps")
        raw["activation_function"] = "gelu_new"
    elif family == "gptneox":
        raw |= _neox(header, raw)
    elif family in ("nemotron_h", "nemotron_h_moe"):
        raw |= nemotron_h(header, raw["num_hidden_layers"])
    elif family == "gemma4":
        raw |= gemma4(header, raw["num_hidden_layers"])
    elif family == "deepseek2":
        raw |= deepseek(header, _rope(header, family, 0, raw["max_position_embeddings"]))
    else:
        raw |= _llama_like(header, family, raw)
        raw |= _relative(header, family, raw)
    return raw


def num_layers(header: GGUFHeader) -> int:
    """Layers of the model, without those for multi-token prediction that a file may have behind them."""
    family = header.architecture
    return header.positive(f"{family}.block_count") - header.integer(f"{family}.nextn_predict_layers", 0)


def delta_net_heads(header: GGUFHeader) -> ValueHeads | None:
    """The heads of the model's delta nets, if it has some."""
    family = header.architecture
    if family not in ("qwen35", "qwen35moe", "qwen3next"):
        return None
    keys, values, key_dim, width = (
        header.positive(f"{family}.ssm.{name}")
        for name in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    return ValueHeads(keys, values, key_dim, width // values)


def _width(header: GGUFHeader, family: str) -> int:
    """Features of the MLP; those of an expert, if all layers are mixtures."""
    key = f"{family}.feed_forward_length"
    if isinstance(header.metadata.get(key), np.ndarray):  # of each layer: those that have none say 0
        return next((int(width) for width in header.numbers(key) if width), 1)  # type: ignore[union-attr]
    if header.integer(f"{family}.expert_count", 0) and not header.integer(key, 0):
        return header.positive(f"{family}.expert_feed_forward_length")
    return header.positive(key)


def _vocabulary(header: GGUFHeader, family: str) -> int:
    # The size of the embedding is the model's: some files pad it beyond the tokenizer's vocabulary.
    if (embedding := header.tensors.get("token_embd.weight")) is not None:
        return embedding.shape[0]
    return header.positive(f"{family}.vocab_size")


def _end_tokens(header: GGUFHeader) -> int | list[int] | None:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [header.integer(f"tokenizer.ggml.{key}") for key in keys]
    ends = list(dict.fromkeys(end for end in found if end is not None))
    return ends[0] if len(ends) == 1 else (ends or None)


def _llama_like(header: GGUFHeader, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    kv_heads = max(kv_heads_of(header, heads), default=0)
    head_dim = header.integer(f"{family}.attention.key_length") or hidden // heads
    rotary = header.integer(f"{family}.rope.dimension_count", head_dim)
    value_dim = header.integer(f"{family}.attention.value_length", head_dim)
    if (rotary != head_dim and family not in _PARTLY_ROTATED) or value_dim != head_dim:
        raise UnsupportedModelError(
            f"{header.path}: heads of {head_dim} with {rotary} rotary and {value_dim} value dimensions "
            "are not supported"
        )
    found: dict[str, Any] = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "rope_parameters": _rope(header, family, head_dim, raw["max_position_embeddings"]),
    }
    if rotary != head_dim or family in ("glm4", "glm4moe"):  # a GLM whose config does not say rotates half
        found["partial_rotary_factor"] = rotary / head_dim
    if family in _LAYER_NORMS:
        del found["rms_norm_eps"]
    if (window := header.integer(f"{family}.attention.sliding_window", 0)) and family == "llama":
        # llama.cpp stores Mistral as LLaMA; only the window tells them apart.
        found |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    if family in _MIXTURES and header.integer(f"{family}.expert_count", 0):
        found |= _mixture(header, family)
    return found


def _mixture(header: GGUFHeader, family: str) -> dict[str, Any]:
    if family == "glm4moe":
        return grouped_mixture(header, "sigmoid")
    if family == "minimax-m2":
        return minimax(header)
    found: dict[str, Any] = {
        "num_experts": header.positive(f"{family}.expert_count"),
        "num_experts_per_tok": header.positive(f"{family}.expert_used_count"),
    }
    if family == "llama":  # llama.cpp stores Mixtral as LLaMA; only the experts tell them apart
        return found | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    if family == "gpt-oss":
        width = header.integer("gpt-oss.expert_feed_forward_length", 0)
        return {
            "num_local_experts": found["num_experts"],
            "num_experts_per_tok": found["num_experts_per_tok"],
            "intermediate_size": width or header.positive("gpt-oss.feed_forward_length"),
        }
    if family == "granitehybrid":
        return found | {"num_local_experts": found["num_experts"]}
    if family == "granitemoe":
        if "blk.0.ffn_gate_shexp.weight" not in header.tensors:
            return found
        kind = {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
        return found | kind | {"shared_intermediate_size": _shared_width(header)}
    found["moe_intermediate_size"] = header.positive(f"{family}.expert_feed_forward_length")
    found["norm_topk_prob"] = family == "qwen3moe"  # not in the file: llama.cpp has it per family
    if family == "lfm2moe":
        found |= {"norm_topk_prob": True, "num_dense_layers": header.integer("lfm2moe.leading_dense_block_count", 0)}
        found["routed_scaling_factor"] = float(header.number("lfm2moe.expert_weights_scale", 1.0))
        found["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    if family in ("qwen35moe", "qwen3next"):
        found |= {"norm_topk_prob": True, "shared_expert_intermediate_size": _shared_width(header)}
    if family == "qwen2moe":
        found["shared_expert_intermediate_size"] = _shared_width(header)
        found["qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
    return found


def _relative(header: GGUFHeader, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of relatives of Llama."""
    if family in ("granite", "granitemoe", "granitehybrid"):
        names = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
        embedding, residual, attention, logits = (header.number(f"{family}.{name}", 0.0) for name in names)
        return {
            "embedding_multiplier": embedding or 1.0,
            "residual_multiplier": residual or 1.0,
            "attention_multiplier": attention or raw["head_dim"] ** -0.5,
            "logits_scaling": logits or 1.0,
            **(granite_hybrid(header, kv_heads_of(header, 0)) if family == "granitehybrid" else {}),
        }
    if family in ("lfm2", "lfm2moe"):
        counts = kv_heads_of(header, 0)
        if len(counts) != raw["num_hidden_layers"]:
            raise CheckpointError(f"{header.path}: {family}.attention.head_count_kv must have an entry a layer")
        return {
            "norm_eps": raw["rms_norm_eps"],
            "layer_types": ["full_attention" if count else "conv" for count in counts],
            "conv_L_cache": header.positive(f"{family}.shortconv.l_cache"),
            "conv_bias": "blk.0.shortconv.conv.bias" in header.tensors,
            "block_auto_adjust_ff_dim": False,
        }
    if (heads := delta_net_heads(header)) is not None:
        return {
            "linear_num_key_heads": heads.keys,
            "linear_num_value_heads": heads.values,
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
            "linear_conv_kernel_dim": header.positive(f"{family}.ssm.conv_kernel"),
            "full_attention_interval": header.integer(f"{family}.full_attention_interval", 4),
            "layer_types": recurrent_layers(header, raw["num_hidden_layers"]),
        }
    if family == "mistral3":
        return mistral3(header, raw["rope_parameters"])
    if family == "glm4":
        refuse_key(header, "glm4.rope.dimension_sections")  # GLM-4V: Q and K are in another order
        return {}
    if family == "glm4moe":
        return {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}
    window = header.integer(f"{family}.attention.sliding_window", 0) or None
    if family == "gpt-oss":
        rope = raw["rope_parameters"]
        if rope.get("rope_type") == "yarn":
            rope = rope | {"truncate": False}  # not in the file: every released model is so
        return {
            "sliding_window": window,
            "layer_types": layer_types(header, family, raw["num_hidden_layers"], 2),
            "rope_parameters": rope,
        }
    if family in ("command-r", "cohere2"):
        scale = header.number(f"{family}.logit_scale", 0.0) or 0.0625
        has_norms = "blk.0.attn_q_norm.weight" in header.tensors
        return {"logit_scale": scale, "sliding_window": window, "use_qk_norm": has_norms}
    if family == "olmo2" and window is not None:
        return _olmo3(header, window, raw)
    if family in ("gemma2", "gemma3"):
        return _gemma(header, family, window, raw)
    if family == "phi3":
        return {"sliding_window": window}
    if family == "starcoder2":
        return {"use_bias": "blk.0.attn_q.bias" in header.tensors, "hidden_act": "gelu_pytorch_tanh"}
    if family == "stablelm":
        _refuse_tensor(header, "blk.0.attn_q_norm.weight")
        is_parallel = header.flag("stablelm.use_parallel_residual", "blk.0.ffn_norm.weight" not in header.tensors)
        return {"use_qkv_bias": "blk.0.attn_q.bias" in header.tensors, "use_parallel_residual": is_parallel}
    if family == "falcon":
        _refuse_tensor(header, "blk.0.attn_norm_2.weight")
        groups = raw["num_key_value_heads"]
        return {
            "num_kv_heads": groups,
            "new_decoder_architecture": groups > 1,
            "num_ln_in_parallel_attn": 1,
            "bias": "blk.0.attn_qkv.bias" in header.tensors,
        }
    return {}


def _refuse_tensor(header: GGUFHeader, name: str) -> None:
    if name in header.tensors:
        raise UnsupportedModelError(
            f"{header.path}: a GGUF file of {header.architecture!r} with {name} is not supported"
        )


def _olmo3(header: GGUFHeader, window: int, raw: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp stores OLMo 3 as OLMo 2; only the windows tell them apart. Layers with one have no rope scaling."""
    rope = raw["rope_parameters"]
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": layer_types(header, "olmo2", raw["num_hidden_layers"], 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": plain},
    }


def _gemma(header: GGUFHeader, family: str, window: int | None, raw: dict[str, Any]) -> dict[str, Any]:
    """Gemma 2 and 3. llama.cpp knows which layers have a window, and the scale of attention, by the family and the
    number of layers: only the 27B models' scale is not that of the head size."""
    layers, is_second = raw["num_hidden_layers"], family == "gemma2"
    is_27b = layers == (46 if is_second else 62)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if is_27b else raw["head_dim"],
        "sliding_window": window or (4096 if is_second else None),
        "layer_types": layer_types(header, family, layers, 2 if is_second else 6),
        "attn_logit_softcapping": header.number(f"{family}.attn_logit_softcapping", 50.0 if is_second else None),
        "final_logit_softcapping": header.number(f"{family}.final_logit_softcapping", 30.0 if is_second else None),
    }
    if not is_second:
        base = float(header.number("gemma3.rope.freq_base_swa", 10000.0))
        plain = {"rope_type": "default", "rope_theta": base}
        found["rope_parameters"] = {"full_attention": raw["rope_parameters"], "sliding_attention": plain}
    return found


def _shared_width(header: GGUFHeader) -> int:
    if (width := header.integer(f"{header.architecture}.expert_shared_feed_forward_length", 0)) > 0:
        return width
    if (gate := header.tensors.get("blk.0.ffn_gate_shexp.weight")) is not None:
        return gate.shape[0]
    raise CheckpointError(f"{header.path}: the GGUF header does not give the width of the shared expert")


def _neox(header: GGUFHeader, raw: dict[str, Any]) -> dict[str, Any]:
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    rotary = header.integer("gptneox.rope.dimension_count", head_dim)
    return {
        "rotary_pct": rotary / head_dim,
        "rotary_emb_base": header.number("gptneox.rope.freq_base", 10000.0),
        "use_parallel_residual": header.flag("gptneox.use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
        "hidden_act": "gelu",
    }


def _rope(header: GGUFHeader, family: str, head_dim: int, context: int) -> dict[str, Any]:
    theta = float(header.number(f"{family}.rope.freq_base", 10000.0))
    kind = header.text(f"{family}.rope.scaling.type", "none")
    factor = header.number(f"{family}.rope.scaling.factor", header.number(f"{family}.rope.scale_linear", 1.0))
    original = header.integer(f"{family}.rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in header.tensors:
        return _longrope(header, family, theta, original)
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(header, theta, head_dim)
    if kind == "linear" or (kind == "none" and factor not in (0, 1)):
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    if kind == "yarn":
        betas = {name: header.number(f"{family}.rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": float(factor),
            "original_max_position_embeddings": original,
            **{name: value for name, value in betas.items() if value is not None},
        }
    if kind != "none":
        raise UnsupportedModelError(
            f"{header.path}: rope scaling {kind!r} is not supported (none, linear, yarn, llama3 are)"
        )
    return {"rope_type": "default", "rope_theta": theta}


def _longrope(header: GGUFHeader, family: str, theta: float, original: int) -> dict[str, Any]:
    """The divisors are tensors."""
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "original_max_position_embeddings": original,
    }
    for length in ("short", "long"):
        info = header.tensors.get(f"rope_factors_{length}.weight")
        if info is None or info.kind != 0 or len(info.shape) != 1:
            raise UnsupportedModelError(f"{header.path}: rope_factors_{length}.weight is missing or not in float32")
        found[f"{length}_factor"] = np.frombuffer(header.buffer, "<f4", info.shape[0], info.start).tolist()
    if (factor := header.number(f"{family}.rope.scaling.attn_factor", 0.0)) > 0:
        found["attention_factor"] = float(factor)
    return found


def _llama3_rope(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling is stored as a table of divisors. All released models share three of its four parameters;
    the fourth is the largest divisor. The table is recomputed to verify that."""
    low, high, original = 1.0, 4.0, 8192
    info = header.tensors["rope_freqs.weight"]
    if info.kind != 0 or info.shape != (head_dim // 2,):
        raise UnsupportedModelError(f"{header.path}: rope_freqs.weight has shape {info.shape}, encoding {info.kind}")
    table = np.frombuffer(header.buffer, "<f4", head_dim // 2, info.start)
    factor = float(table.max())
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if not np.allclose(table, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{header.path}: rope_freqs.weight has a rope scaling other than Llama 3's")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
