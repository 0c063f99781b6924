"""Fields of a config.json for families whose GGUF files say more of themselves than Llama's relatives do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError
from quire.loading.gguf_header import GGUFHeader

_GATINGS = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of the functions that score experts."""


def refuse_key(header: GGUFHeader, key: str) -> None:
    """Refuse a file that asks for what there is no implementation of."""
    if header.metadata.get(key):
        raise UnsupportedModelError(f"{header.path}: a GGUF file with {key} is not supported")


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


def recurrent_layers(header: GGUFHeader, layers: int) -> list[str] | None:
    """Which layers are delta nets, if the file marks them; None: it has only their interval."""
    marks = header.numbers(f"{header.architecture}.attention.recurrent_layers")
    if marks is None:
        return None
    if len(marks) < layers:
        raise CheckpointError(f"{header.path}: attention.recurrent_layers has {len(marks)} of {layers} layers")
    return ["linear_attention" if mark else "full_attention" for mark in marks[:layers]]
