"""A random target of four layers with the tiny tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import TINY_VOCAB, tiny_tokenizer


def write_target(folder: Path, layers: int) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder."""
    return write_target(tmp_path_factory.mktemp("target"), 4)
