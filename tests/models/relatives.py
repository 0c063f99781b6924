"""Tiny configurations of relatives of Llama and other plain decoders, one for each way in which they differ."""

from __future__ import annotations

from typing import Any

from transformers import (
    BitNetConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]


def _like(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**(SHAPE | changes))


def _other(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """A family with other names for the MLP's width and the number of KV heads."""
    shape = {key: value for key, value in SHAPE.items() if key not in ("intermediate_size", "num_key_value_heads")}
    return kind(**(shape | changes))


def _granite(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    factors = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
        "rms_norm_eps": 1e-2,
    }
    return _like(kind, **(factors | changes))


def longrope(**changes: Any) -> Phi3Config:
    """Phi-3 with 4 rotary pairs, for 16 positions and for 64."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 5.0, 9.0],
        "original_max_position_embeddings": 16,
    }
    return _like(Phi3Config, original_max_position_embeddings=16, rope_parameters=rope | changes)


RELATIVES: dict[str, PretrainedConfig] = {
    "cohere": _like(CohereConfig, logit_scale=0.7),
    "cohere-qk-norm": _like(
        CohereConfig, logit_scale=0.7, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False
    ),
    "cohere2": _like(Cohere2Config, logit_scale=0.7, sliding_window=6, num_hidden_layers=4),
    "bitnet": _like(BitNetConfig, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "bloom": BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6),
    "falcon-rw": _other(FalconConfig, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "falcon-7b": _other(FalconConfig, num_kv_heads=None),
    "falcon-40b": _other(FalconConfig, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-11b": _other(FalconConfig, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-sequential": _other(FalconConfig, multi_query=False, parallel_attn=False, tie_word_embeddings=False),
    "glm": _like(GlmConfig, head_dim=16),
    "glm4": _like(Glm4Config, head_dim=16, attention_bias=False),
    "glm4-moe": _like(Glm4MoeConfig, **MIXTURE, attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.7),
    "glm4-moe-lite": _like(
        Glm4MoeLiteConfig,
        **MIXTURE,
        num_hidden_layers=3,
        num_key_value_heads=4,
        mlp_layer_types=["dense", "sparse", "dense"],
        kv_lora_rank=24,
        q_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "granite": _granite(GraniteConfig, tie_word_embeddings=True),
    "granite-moe": _granite(GraniteMoeConfig, num_local_experts=5, num_experts_per_tok=2),
    "minimax-m2": _like(
        MiniMaxM2Config,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "ministral": _like(MinistralConfig, sliding_window=5, layer_types=ALTERNATING, head_dim=12),
    "ministral3": _like(
        Ministral3Config,
        head_dim=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "olmo2": _like(Olmo2Config),
    "olmo3": _like(
        Olmo3Config,
        sliding_window=5,
        layer_types=ALTERNATING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "opt": _other(OPTConfig, ffn_dim=40),
    "opt-no-bias": _other(OPTConfig, ffn_dim=40, enable_bias=False, tie_word_embeddings=False),
    "phi3": _like(Phi3Config, sliding_window=6),
    "phi4-mini": _like(
        Phi3Config, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}
    ),
    "smollm3": _like(SmolLM3Config, no_rope_layers=[1, 0], tie_word_embeddings=True),
    "smollm3-windows": _like(
        SmolLM3Config, num_hidden_layers=4, use_sliding_window=True, sliding_window=5, attention_bias=True
    ),
    "stablelm": _like(StableLmConfig, use_qkv_bias=True),
    "stablelm-12b": _like(StableLmConfig, use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": _like(Starcoder2Config, sliding_window=6),
}
