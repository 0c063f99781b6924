"""Fields of a config.json for families whose GGUF files say more of themselves than Llama's relatives do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import CheckpointError, UnsupportedModelError
from quire.loading.gguf_header import GGUFHeader

_GATINGS = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of the functions that score experts."""


def refuse_key(header: GGUFHeader, key: str) -> None:
    """Refuse a file that asks for what there is no implementation of."""
    if header.metadata.get(key):
        raise UnsupportedModelError(f"{header.path}: a GGUF file with {key} is not supported")


def kv_heads_of(header: GGUFHeader, heads: int) -> list[int]:
    """KV heads of each layer, or of all of them; 0: the layer has no attention."""
    key = f"{header.architecture}.attention.head_count_kv"
    if isinstance(header.metadata.get(key), np.ndarray):
        return [int(count) for count in header.numbers(key)]  # type: ignore[union-attr]
    return [header.integer(key, heads)]


def layer_types(header: GGUFHeader, family: str, layers: int, period: int) -> list[str]:
    """Which layers have a window: all but the last of each period, or those that the file marks."""
    given = header.metadata.get(f"{family}.attention.sliding_window_pattern", period)
    marks = [(layer + 1) % given != 0 for layer in range(layers)] if isinstance(given, int) and given > 0 else given
    if not isinstance(marks, (list, np.ndarray)) or len(marks) != layers:
        raise CheckpointError(f"{header.path}: a sliding_window_pattern of {given} is not one of {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in marks]


def deepseek(header: GGUFHeader, rope: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V2 or V3, or a model stored as one (Kimi K2, GLM-4.7-Flash): how experts are scored tells them apart."""
    family = header.architecture
    refuse_key(header, f"{family}.attention.temperature_scale")  # Mistral Large 3
    # Early files have the sizes of heads under the names that later ones use for those of the cache.
    suffix = "_mla" if f"{family}.attention.key_length_mla" in header.metadata else ""
    rotary = header.positive(f"{family}.rope.dimension_count")
    found: dict[str, Any] = {
        "num_key_value_heads": header.positive(f"{family}.attention.head_count"),
        "q_lora_rank": header.integer(f"{family}.attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.positive(f"{family}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": header.positive(f"{family}.attention.key_length{suffix}") - rotary,
        "v_head_dim": header.positive(f"{family}.attention.value_length{suffix}"),
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in header.tensors,
        "rope_interleave": True,
        "rope_parameters": _with_magnitude(header, rope),
    }
    if not header.integer(f"{family}.expert_count", 0):
        return found | {"n_routed_experts": None}
    # Files of V2 and of GLM-4.7-Flash need not name the function; only V3's mixtures have a bias for the choice.
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    scoring = _gating(header, "sigmoid" if has_bias else "softmax")
    found |= grouped_mixture(header, scoring)
    if scoring == "softmax":
        is_grouped = found["n_group"] != found["topk_group"]
        found |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        found["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    return found


def _with_magnitude(header: GGUFHeader, rope: dict[str, Any]) -> dict[str, Any]:
    """YaRN's rope with DeepSeek's magnitude. The file has a tenth of `mscale_all_dim`, and not `mscale`: in every
    released model they are equal."""
    factor = header.number(f"{header.architecture}.rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] != "yarn" or not factor:
        return rope
    magnitude = round(10 * float(factor), 6)  # the file has a float32
    return rope | {"mscale": magnitude, "mscale_all_dim": magnitude}


def _gating(header: GGUFHeader, default: str) -> str:
    number = header.integer(f"{header.architecture}.expert_gating_func", 0)
    if number and number not in _GATINGS:
        raise UnsupportedModelError(
            f"{header.path}: {header.architecture}.expert_gating_func {number} is not supported; "
            f"{', '.join(f'{key} ({name})' for key, name in _GATINGS.items())} are"
        )
    return _GATINGS.get(number, default)


def grouped_mixture(header: GGUFHeader, scoring: str) -> dict[str, Any]:
    """Mixtures of DeepSeek's form: leading layers without one, groups of experts, shared experts."""
    family = header.architecture
    if (named := _gating(header, scoring)) != scoring:
        raise UnsupportedModelError(f"{header.path}: a GGUF file of {family!r} with {named} gating is not supported")
    groups = header.integer(f"{family}.expert_group_count", 0) or 1
    return {
        "n_routed_experts": header.positive(f"{family}.expert_count"),
        "num_experts_per_tok": header.positive(f"{family}.expert_used_count"),
        "moe_intermediate_size": header.positive(f"{family}.expert_feed_forward_length"),
        "n_shared_experts": header.integer(f"{family}.expert_shared_count", 0),
        "first_k_dense_replace": header.integer(f"{family}.leading_dense_block_count", 0),
        "routed_scaling_factor": float(header.number(f"{family}.expert_weights_scale", 0.0)) or 1.0,
        "norm_topk_prob": header.flag(f"{family}.expert_weights_norm", False),
        "scoring_func": scoring,
        "n_group": groups,
        "topk_group": header.integer(f"{family}.expert_group_used_count", 0) or groups,
    }


def granite_hybrid(header: GGUFHeader, kv_heads: Sequence[int]) -> dict[str, Any]:
    """Granite 4. `kv_heads`: of each layer; 0: it has Mamba 2 in place of attention."""
    family = header.architecture
    layers, hidden = header.positive(f"{family}.block_count"), header.positive(f"{family}.embedding_length")
    if len(kv_heads) != layers:
        raise CheckpointError(f"{header.path}: {family}.attention.head_count_kv must have an entry a layer")
    names = ("time_step_rank", "group_count", "state_size", "conv_kernel", "inner_size")
    heads, groups, state, taps, inner = (header.positive(f"{family}.ssm.{name}") for name in names)
    gate = header.tensors.get("blk.0.ffn_gate_shexp.weight") or header.tensors.get("blk.0.ffn_gate.weight")
    if gate is None or inner % hidden or inner % heads:
        raise UnsupportedModelError(
            f"{header.path}: a GGUF file of {family!r} with {heads} Mamba heads, an inner size of {inner} and a hidden "
            f"size of {hidden} {'without a shared MLP ' if gate is None else ''}is not supported"
        )

    def has(name: str) -> bool:
        return any(tensor.endswith(name) for tensor in header.tensors)

    return {
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        # llama.cpp's switch for rope, for all its name.
        "position_embedding_type": "rope" if header.flag(f"{family}.rope.scaling.finetuned", True) else "nope",
        "attention_bias": has(".attn_q.bias"),
        "shared_intermediate_size": gate.shape[0],
        "num_local_experts": header.integer(f"{family}.expert_count", 0),
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": taps,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": has(".ssm_conv1d.bias"),
        "mamba_proj_bias": has(".ssm_in.bias"),
    }


def gemma4(header: GGUFHeader, layers: int) -> dict[str, Any]:
    """Gemma 4. Layers without a window have heads of their own; which of their keys are values too is seen from the
    tensors that the file lacks."""
    kinds = layer_types(header, "gemma4", layers, 6)
    dims = [header.positive(f"gemma4.attention.key_length{suffix}") for suffix in ("", "_swa")]
    shared = header.integer("gemma4.attention.shared_kv_layers", 0)
    counts = kv_heads_of(header, header.positive("gemma4.attention.head_count"))
    counts = counts * layers if len(counts) == 1 else counts
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    windowed = [counts[layer] for layer, kind in enumerate(kinds) if kind != "full_attention"] or counts
    if len(counts) != layers or not full or len(set(windowed)) > 1:
        raise UnsupportedModelError(f"{header.path}: a gemma4 file with head_count_kv {counts} is not supported")
    each = header.integer("gemma4.embedding_length_per_layer_input", 0)
    table = header.tensors.get("per_layer_token_embd.weight")
    experts = header.integer("gemma4.expert_count", 0)
    return {
        "num_key_value_heads": windowed[0],
        "head_dim": dims[1],
        "per_layer_config": {str(i): {"head_dim": dims[0], "num_key_value_heads": counts[i]} for i in full},
        "rms_norm_eps": header.number("gemma4.attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "layer_types": kinds,
        "sliding_window": header.positive("gemma4.attention.sliding_window"),
        "final_logit_softcapping": header.number("gemma4.final_logit_softcapping", 0.0) or None,
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in header.tensors for i in full if i < layers - shared),
        "use_double_wide_mlp": _is_double_wide(header, layers, shared),
        "hidden_size_per_layer_input": each,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else None,
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": header.positive("gemma4.expert_used_count") if experts else None,
        "moe_intermediate_size": header.positive("gemma4.expert_feed_forward_length") if experts else None,
        "rope_parameters": {
            "full_attention": _proportional(header, dims[0]),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(header.number("gemma4.rope.freq_base_swa", 10000.0)),
            },
        },
    }


def _is_double_wide(header: GGUFHeader, layers: int, shared: int) -> bool:
    """Whether the MLPs of layers that read another layer's cache are twice as wide as the others."""
    key = "gemma4.feed_forward_length"
    if not isinstance(header.metadata.get(key), np.ndarray):
        return False
    widths = [int(width) for width in header.numbers(key)]  # type: ignore[union-attr]
    own = layers - shared
    if len(widths) != layers or any(width != widths[0] * (1 + (i >= own)) for i, width in enumerate(widths)):
        if set(widths) == {widths[0]} and len(widths) == layers:
            return False
        raise UnsupportedModelError(f"{header.path}: a gemma4 file with feed_forward_length {widths} is not supported")
    return shared > 0


def _proportional(header: GGUFHeader, head_dim: int) -> dict[str, Any]:
    """The rotation of layers without a window. The file has a divisor for each frequency: 1, or so large that the pair
    is not rotated."""
    theta = float(header.number("gemma4.rope.freq_base", 1000000.0))
    info = header.tensors.get("rope_freqs.weight")
    if info is None or info.kind != 0 or info.shape != (head_dim // 2,):
        raise UnsupportedModelError(
            f"{header.path}: a gemma4 file needs rope_freqs.weight in float32, of {head_dim // 2} values"
        )
    table = np.frombuffer(header.buffer, "<f4", head_dim // 2, info.start)
    rotated = int((table == 1).sum())
    if not ((table[:rotated] == 1).all() and (table[rotated:] > 1e20).all()):
        raise UnsupportedModelError(f"{header.path}: rope_freqs.weight has a rope scaling other than Gemma 4's")
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 2 * rotated / head_dim}


def mistral3(header: GGUFHeader, rope: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3.1 and later, which are Mistral."""
    scale = header.number("mistral3.attention.temperature_scale", 0.0)
    if not scale:
        return {"sliding_window": None}
    magnitude = float(header.number("mistral3.rope.scaling.yarn_log_multiplier", 0.0)) or None
    found = rope | {"llama_4_scaling_beta": float(scale), "mscale": magnitude, "mscale_all_dim": magnitude}
    kind = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    return kind | {"sliding_window": None, "rope_parameters": found}


def minimax(header: GGUFHeader) -> dict[str, Any]:
    """MiniMax-M2."""
    if _gating(header, "sigmoid") != "sigmoid":
        raise UnsupportedModelError(f"{header.path}: a GGUF file of MiniMax-M2 with softmax gating is not supported")
    return {
        "num_local_experts": header.positive("minimax-m2.expert_count"),
        "num_experts_per_tok": header.positive("minimax-m2.expert_used_count"),
        "intermediate_size": header.positive("minimax-m2.expert_feed_forward_length"),
    }


def nemotron_h(header: GGUFHeader, layers: int) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3. The kind of a block is seen from which sizes are not 0."""
    family = header.architecture
    counts = kv_heads_of(header, 0)[:layers]
    widths = header.numbers(f"{family}.feed_forward_length")
    if len(counts) != layers or widths is None or len(widths) < layers:
        raise CheckpointError(
            f"{header.path}: {family}.attention.head_count_kv and feed_forward_length must have an entry a layer"
        )
    experts = header.integer(f"{family}.expert_count", 0)
    feed_forward = "moe" if experts else "mlp"
    names = ("time_step_rank", "group_count", "state_size", "conv_kernel", "inner_size")
    heads, groups, state, taps, inner = (header.positive(f"{family}.ssm.{name}") for name in names)
    if inner % heads:
        raise UnsupportedModelError(f"{header.path}: an inner size of {inner} for {heads} Mamba heads is not supported")

    def has(name: str) -> bool:
        return any(tensor.endswith(name) for tensor in header.tensors)

    found: dict[str, Any] = {
        "layers_block_type": [
            "attention" if kv else feed_forward if width else "mamba"
            for kv, width in zip(counts, widths[:layers].tolist(), strict=True)
        ],
        "num_key_value_heads": max(counts, default=0) or 1,
        "head_dim": header.positive(f"{family}.attention.key_length"),
        "layer_norm_epsilon": header.number(
            f"{family}.attention.layer_norm_rms_epsilon", header.number(f"{family}.attention.layer_norm_epsilon", 1e-5)
        ),
        "mlp_hidden_act": "relu2",
        "attention_bias": has(".attn_q.bias"),
        "mlp_bias": has(".ffn_up.bias"),
        "use_bias": has(".ssm_in.bias"),
        "use_conv_bias": has(".ssm_conv1d.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": taps,
    }
    if not experts:
        return found
    return (
        found
        | grouped_mixture(header, "sigmoid")
        | {
            "moe_shared_expert_intermediate_size": header.positive(f"{family}.expert_shared_feed_forward_length"),
            "moe_latent_size": header.integer(f"{family}.moe_latent_size", 0) or None,
        }
    )


def recurrent_layers(header: GGUFHeader, layers: int) -> list[str] | None:
    """Which layers are delta nets, if the file marks them; None: it has only their interval."""
    marks = header.numbers(f"{header.architecture}.attention.recurrent_layers")
    if marks is None:
        return None
    if len(marks) < layers:
        raise CheckpointError(f"{header.path}: attention.recurrent_layers has {len(marks)} of {layers} layers")
    return ["linear_attention" if mark else "full_attention" for mark in marks[:layers]]
