"""Tiny random classifiers, written as Hub repositories, and what transformers answers for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conftest import TINY_VOCAB, tiny_tokenizer


def write_classifier(folder: Path, kind: str = "Qwen3", labels: Sequence[str] = ("bad", "so so", "good")) -> Any:
    """A classifier in a folder; returns transformers' model."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, initializer_range=0.35, id2label=dict(enumerate(labels)),
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def numbers(reference: Any, *prompts: Sequence[int]) -> torch.Tensor:
    """[prompts, classes]: transformers' numbers, one prompt at a time."""
    return torch.cat([reference(torch.tensor([list(prompt)])).logits for prompt in prompts])
