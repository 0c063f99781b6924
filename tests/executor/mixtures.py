"""Tiny mixtures of experts with the tiny tokenizer, as a Hub repository would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.conftest import TINY_VOCAB, tiny_tokenizer
from tests.models.harness import random_reference

SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5),
    "qwen2-moe": Qwen2MoeConfig(
        **SHAPE, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40, decoder_sparse_step=1
    ),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, num_experts=7, moe_intermediate_size=24, head_dim=16),
}


def write_mixture(folder: Path, name: str) -> Path:
    """A random checkpoint of that family."""
    random_reference(CONFIGS[name]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
