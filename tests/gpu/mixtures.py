"""Tiny mixtures of experts with the tiny tokenizer, with heads as wide as the GPU kernels need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import TINY_VOCAB, tiny_tokenizer
from tests.gpu.target import DEVICE
from tests.models.harness import random_reference
from tests.models.zoo import ZOO

FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe"]


def write_mixture(folder: Path, name: str) -> Any:
    """A random checkpoint of that family; returned as a transformers model on the device."""
    changes = {"vocab_size": TINY_VOCAB, "max_position_embeddings": 256, "hidden_size": 64, "head_dim": 16}
    reference = random_reference(type(ZOO[name])(**(ZOO[name].to_dict() | changes)))
    reference.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return reference.to(DEVICE)
