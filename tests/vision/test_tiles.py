"""LLaVA, LLaVA-NeXT and Gemma 3 against transformers: pixels, counts of tokens, and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from quire.vision.processor import Prepared
from tests.vision.harness import Family, Pair, assert_same, our_logits, pair, picture, their_logits, words

IMAGE, BOI, EOI = 60, 61, 62
TEXT_SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24,
    "patch_size": 4,
}  # fmt: skip
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}


def llava(vision: dict[str, Any], text: str = "llama", **fields: Any) -> Any:
    config = LlavaConfig(
        vision_config=vision, text_config=TEXT_SHAPE | {"model_type": text}, image_token_index=IMAGE, **fields
    )
    return LlavaForConditionalGeneration(config)


PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]


def llava_next() -> Any:
    text = TEXT_SHAPE | {"model_type": "mistral", "sliding_window": None}
    config = LlavaNextConfig(
        vision_config=CLIP, text_config=text, image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS
    )
    return LlavaNextForConditionalGeneration(config)


def gemma3() -> Any:
    text = TEXT_SHAPE | {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 6}
    vision = SIGLIP | {"vision_use_head": False}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=9, image_token_index=IMAGE, boi_token_index=BOI,
        eoi_token_index=EOI,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


SQUARE = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SPECIALS = {"<image>": IMAGE, "<start_of_image>": BOI, "<end_of_image>": EOI}
FAMILIES: dict[str, tuple[Family, Any]] = {
    "llava": (Family(lambda: llava(CLIP), SPECIALS, SQUARE), CLIPImageProcessorPil),
    "llava-in-memory": (Family(lambda: llava(CLIP), SPECIALS, SQUARE, as_in_memory=True), CLIPImageProcessorPil),
    "llava-padded": (
        Family(
            lambda: llava(SIGLIP, "qwen2", vision_feature_select_strategy="full", vision_feature_layer=[-2, 1]),
            SPECIALS,
            SQUARE | {"do_pad": True},
        ),
        LlavaImageProcessorPil,
    ),
    "llava-next": (
        Family(llava_next, SPECIALS, SQUARE | {"image_grid_pinpoints": PINPOINTS}),
        LlavaNextImageProcessorPil,
    ),
    "gemma-3-in-memory": (
        Family(gemma3, SPECIALS, {"size": {"height": 24, "width": 24}, **HALF}, as_in_memory=True),
        Gemma3ImageProcessorPil,
    ),
    "gemma-3": (
        Family(
            gemma3, SPECIALS, {"size": {"height": 24, "width": 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        ),
        Gemma3ImageProcessorPil,
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, processor = FAMILIES[request.param]
    made = pair(family, tmp_path_factory.mktemp("tiles"))
    return made, processor.from_pretrained(made.folder)


def reference_inputs(made: Pair, processor: Any, images: list[Any], prepared: Prepared) -> dict[str, Any]:
    found = dict(processor(images, return_tensors="pt"))
    found.pop("num_crops", None)
    if made.config.architecture.startswith("Gemma3"):
        tokens = torch.tensor([prepared.tokens])
        found["token_type_ids"] = (tokens == IMAGE).int()
    return found


PROMPTS = {
    "one": [(40, 30)],
    "several": [(40, 30), (17, 61), (64, 64), (24, 24), (90, 20)],
}


@pytest.mark.parametrize("prompt", list(PROMPTS))
def test_logits_are_those_of_transformers(ours: Any, prompt: str) -> None:
    made, processor = ours
    images = [picture(*size, seed=index) for index, size in enumerate(PROMPTS[prompt])]
    placeholder = BOI if made.config.architecture.startswith("Gemma3") else IMAGE
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [placeholder, *words(3, index)]
    prepared = made.processor.prepare(tokens, images)
    assert [item.rows for item in prepared.items] == [made.processor.rows_of(*image.size) for image in images]
    theirs = their_logits(made, prepared, **reference_inputs(made, processor, images, prepared))
    assert_same(our_logits(made, prepared), theirs)
    if not getattr(made.model, "bidirectional_spans", False):
        assert_same(our_logits(made, prepared, chunk=13), theirs)


def test_pixels_are_those_of_transformers(ours: Any) -> None:
    made, processor = ours
    image = picture(70, 45)
    placeholder = BOI if made.config.architecture.startswith("Gemma3") else IMAGE
    (item,) = made.processor.prepare([placeholder], [image]).items
    theirs = torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"])
    tiles = made.encoder.tiles(item).permute(0, 3, 1, 2)
    torch.testing.assert_close(tiles, theirs.reshape(tiles.shape), atol=1e-5, rtol=0)
