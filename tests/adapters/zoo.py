"""Tiny random bases, and adapters of every kind for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from tests.adapters.beside_peft import Base

PROMPTS = [[5, 17, 3, 40, 22, 9, 31], [60, 2, 2, 8, 71, 33, 18, 5, 90, 12, 44]]
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
INVOCATION = [9, 4]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama", {"target_modules": "all-linear", "lora_alpha": 6}),
    "wide": ("llama", {"rank": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}),
    "narrow": ("llama", {"rank": 1, "target_modules": ["k_proj", "gate_proj"]}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 6},
            "alpha_pattern": {"self_attn.v_proj": 3},
        },
    ),
    "dora": ("llama", {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], "use_dora": True}),
    "dora head": ("llama", {"target_modules": ["lm_head", "k_proj"], "use_dora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "saved": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 2, 40]}),
    "activated": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"},
    ),
    "tied tokens": ("tied", {"target_modules": ["o_proj"], "trainable_token_indices": [5, 2, 40, 71]}),
    "tied embedding": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "bias": ("tied", {"target_modules": ["q_proj", "o_proj", "gate_proj"], "lora_bias": True, "lora_alpha": 5}),
    "own biases": ("tied", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "dora with biases": ("tied", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "all of a mixture": ("mixtral", {"target_modules": "all-linear", "rank": 2}),
    "experts down": ("mixtral", {"target_modules": ["o_proj"], "target_parameters": EXPERTS[1:]}),
    "attention of a mixture": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "qwen experts": ("qwen3_moe", {"target_modules": ["k_proj"], "target_parameters": EXPERTS}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc", "mlp.c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}
BASES = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=97, n_embd=36, n_layer=2, n_head=3, n_positions=64, bos_token_id=0, eos_token_id=1
    ),
}


class Zoo:
    """The bases, each with its adapters; made when a test needs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bases: dict[str, Base] = {}

    def base(self, name: str) -> Base:
        if name not in self._bases:
            base = self._bases[name] = Base(self._folder / name, BASES[name]())
            for kind, (owner, settings) in KINDS.items():
                if owner == name:
                    base.adapter(kind, **settings)
        return self._bases[name]


def kinds_of(base: str) -> list[str]:
    """Names of the adapters for a base."""
    return [kind for kind, (owner, _) in KINDS.items() if owner == base]
