"""A tiny random Qwen2.5-VL with a tokenizer that reads text, and a chat template that writes placeholders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import ENDS, tiny_tokenizer

VOCABULARY = 128
IMAGE, VIDEO, START, END = 116, 117, 118, 119
SPECIALS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PATCH = 28 // 7 * 2
"""Pixels of a side of what one token stands for: two patches of four."""
TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] != 'assistant' else 'assistant' }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that takes text only."""


def seeing_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) <= IMAGE
    for number in range(IMAGE - len(tokenizer)):
        tokenizer.add_tokens(f"<fill{number}>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", *SPECIALS]})
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [IMAGE, VIDEO, START, END]
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_seeing_model(folder: Path, **changes: Any) -> Path:
    """A checkpoint as in a Hub repository."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(20)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": False, "initializer_range": 0.35,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        **changes,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 24, "intermediate_size": 20, "num_heads": 2, "patch_size": 4, "window_size": 16,
        "out_hidden_size": 32, "fullatt_block_indexes": [1], "initializer_range": 0.35,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(folder)
    seeing_tokenizer().save_pretrained(folder)
    preprocessor = {
        "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 64 * PATCH * PATCH},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    return folder


__all__ = ["ENDS", "write_seeing_model"]
