"""Sizes that a config.json leaves out are those of transformers, and every tensor of an encoder has a place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quire.layers.build_context import collect_targets
from quire.loading.model_config import ModelConfig
from quire.vision.loading import make_shape
from quire.vision.registry import ENCODERS
from tests.vision.harness import build_context

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
OWN_TEXT = {"Gemma3": {}, "Gemma4": {"hidden_size_per_layer_input": 0, "layer_types": ["full_attention"]}}
TEXT_TYPES = {
    "Qwen3VLMoe": "qwen3_vl_moe_text", "Qwen3VL": "qwen3_vl_text", "Qwen2VL": "qwen2_vl_text",
    "Qwen2_5_VL": "qwen2_5_vl_text", "Qwen3_5Moe": "qwen3_5_moe_text", "Qwen3_5": "qwen3_5_text",
    "Gemma3": "gemma3_text", "Gemma4": "gemma4_text", "InternVL": "qwen2", "Mistral3": "mistral",
}  # fmt: skip
UNREAD = {
    "LlavaForConditionalGeneration": ("post_layernorm.", "encoder.layers.23."),
    "LlavaNextForConditionalGeneration": ("post_layernorm.", "encoder.layers.23."),
}
"""Tensors of a tower that no feature is read from: the layers after the one that is."""


@pytest.mark.parametrize("architecture", sorted(ENCODERS.known))
def test_sizes_that_are_left_out_are_those_of_transformers(architecture: str) -> None:
    family = architecture.removesuffix("ForConditionalGeneration")
    kind = TEXT_TYPES.get(family, "llama")
    text = TEXT | {"model_type": kind} | OWN_TEXT.get(family, {})
    if "Moe" in family:
        text |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config_class = getattr(transformers, architecture).config_class
    fields: dict[str, Any] = {"text_config": dict(text)}
    if family == "Gemma4":
        fields["vision_config"] = {"model_type": "gemma4_vision"}
    config = config_class(**fields)
    if "Qwen" in family:
        config.vision_config.out_hidden_size = config.vision_config.hidden_size if family == "Qwen2VL" else 32
        if family == "Qwen2VL":
            config.vision_config.hidden_size = 32
    with torch.device("meta"):
        theirs = getattr(transformers, architecture)(config).state_dict()
    given = config.vision_config
    # What transformers' class for the whole model sets for its tower, a published file names.
    named = {name: getattr(given, name) for name in ("image_size", "patch_size", "hidden_size") if hasattr(given, name)}
    if family in ("Llava", "LlavaNext", "Mistral3"):
        named |= {name: getattr(given, name) for name in SIZES}
    if "Qwen" in family:
        named = {}
    raw = {
        "architectures": [architecture], "text_config": text, "image_token_id": 1, "video_token_id": 2,
        "vision_config": {"model_type": given.model_type, **named},
    }  # fmt: skip
    ours = make_shape(build_context(ModelConfig.from_dict(raw)))
    assert ours is not None
    targets = collect_targets(ours)  # type: ignore[arg-type]
    shapes = {ours.canonical(name): tuple(tensor.shape) for name, tensor in theirs.items()}  # type: ignore[attr-defined]
    assert {name: shapes.get(name) for name in targets} == {name: each[0].shape for name, each in targets.items()}
    vision = ("visual", "vision_tower", "vision_model", "projector", "connector", "embed_vision", "image_newline")
    left = [own for name in theirs if (own := ours.canonical(name)) not in targets and any(p in name for p in vision)]  # type: ignore[attr-defined]
    assert [name for name in left if not any(part in name for part in (*UNREAD.get(architecture, ()), ".head."))] == []


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
