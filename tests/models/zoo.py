"""Tiny configurations, one for each way in which checkpoints can differ."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


def _llama_like(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return kind(**(shape | changes))


def _neox(**changes: Any) -> GPTNeoXConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
    }
    return GPTNeoXConfig(**(shape | changes))


def _gpt2(**changes: Any) -> GPT2Config:
    shape: dict[str, Any] = {"vocab_size": 97, "n_embd": 36, "n_layer": 3, "n_head": 3, "n_positions": 64}
    return GPT2Config(**(shape | changes))


def _mixture(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """Experts and MLPs of different widths, more experts than tokens of a short step."""
    shape: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    }
    return _llama_like(kind, **(shape | changes))


def _latent(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """Latent attention, every size different; the first layer without a mixture."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        },
    }  # fmt: skip
    return _llama_like(kind, **(shape | changes))


def _gemma4(**changes: Any) -> PretrainedConfig:
    layers = changes.get("num_hidden_layers", 4)
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 97,
        "sliding_window": 6,
        "final_logit_softcapping": 4.0,
        "layer_types": [
            "full_attention" if i % 3 == 2 or i == layers - 1 else "sliding_attention" for i in range(layers)
        ],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
        },
    }
    return _llama_like(Gemma4TextConfig, **(shape | changes))


def _scaled(**rope: Any) -> PretrainedConfig:
    return _llama_like(LlamaConfig, rope_parameters={"rope_theta": 500.0, **rope})


ZOO: dict[str, PretrainedConfig] = {
    "llama": _llama_like(LlamaConfig),
    "llama-tied": _llama_like(LlamaConfig, tie_word_embeddings=True),
    "llama-mha": _llama_like(LlamaConfig, num_key_value_heads=4),
    "llama-mqa": _llama_like(LlamaConfig, num_key_value_heads=1),
    "llama-9-heads-3-kv": _llama_like(LlamaConfig, hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
    "llama-wide-heads": _llama_like(LlamaConfig, head_dim=20),
    "llama-biases": _llama_like(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-linear": _scaled(rope_type="linear", factor=4.0),
    "llama-dynamic-short": _scaled(rope_type="dynamic", factor=4.0),
    "llama-yarn": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama-yarn-tuned": _scaled(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=8,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.7,
        truncate=False,
    ),
    "llama-yarn-attention-factor": _scaled(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3
    ),
    "llama-llama3": _scaled(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "mistral": _llama_like(MistralConfig, sliding_window=None),
    "mistral-window": _llama_like(MistralConfig, sliding_window=5),
    "qwen2": _llama_like(Qwen2Config, tie_word_embeddings=True),
    "qwen2-upper-windows": _llama_like(
        Qwen2Config, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": _llama_like(Qwen3Config, head_dim=16, tie_word_embeddings=True),
    "qwen3-biases": _llama_like(Qwen3Config, head_dim=12, attention_bias=True),
    "mixtral": _llama_like(MixtralConfig, num_local_experts=5),
    "mixtral-window": _llama_like(MixtralConfig, sliding_window=5, num_local_experts=3, num_experts_per_tok=3),
    "qwen2-moe": _mixture(Qwen2MoeConfig),
    "qwen2-moe-windows": _mixture(
        Qwen2MoeConfig, use_sliding_window=True, sliding_window=6, max_window_layers=1, qkv_bias=False
    ),
    "qwen3-moe": _mixture(Qwen3MoeConfig, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-dense-layers": _mixture(
        Qwen3MoeConfig, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3], head_dim=12
    ),
    "qwen3-moe-one-of-many": _mixture(Qwen3MoeConfig, num_experts=33, num_experts_per_tok=1, norm_topk_prob=True),
    "deepseek-v2": _latent(DeepseekV2Config, topk_method="group_limited_greedy", routed_scaling_factor=2.0),
    "deepseek-v2-lite": _latent(DeepseekV2Config, q_lora_rank=None, n_group=None, topk_group=None),
    "deepseek-v3": _latent(DeepseekV3Config, routed_scaling_factor=2.5, attention_bias=True),
    "gemma-2": _llama_like(
        Gemma2Config,
        num_hidden_layers=3,
        head_dim=12,
        sliding_window=5,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=3.0,
    ),
    "gemma-2-uncapped": _llama_like(
        Gemma2Config, head_dim=8, sliding_window=7, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma-3": _llama_like(
        Gemma3TextConfig,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        },
    ),
    "gemma-4": _gemma4(),
    "gemma-4-shared": _gemma4(
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        attention_k_eq_v=False,
    ),
    "gemma-4-mixture": _gemma4(
        attention_k_eq_v=False, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=20
    ),
    "gpt-oss": _llama_like(
        GptOssConfig,
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=6,
    ),
    "gpt-oss-plain-rope": _llama_like(
        GptOssConfig,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=3,
        sliding_window=1,
        intermediate_size=20,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "gpt-neox": _neox(),
    "gpt-neox-sequential": _neox(use_parallel_residual=False),
    "gpt-neox-tied-no-bias": _neox(tie_word_embeddings=True, attention_bias=False, hidden_act="gelu_new"),
    "gpt-neox-all-rotary": _neox(rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0}),
    "gpt-neox-odd-rotary": _neox(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.33}),
    "gpt2": _gpt2(),
    "gpt2-untied": _gpt2(tie_word_embeddings=False, n_inner=40, activation_function="relu"),
    "gpt2-scaled-by-layer": _gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2-unscaled": _gpt2(scale_attn_weights=False),
}
