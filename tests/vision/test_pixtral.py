"""Pixtral and Mistral Small 3 against transformers: pixels, lines of tokens, and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.vision.harness import Family, Pair, assert_same, our_logits, pair, picture, their_logits, words

IMAGE, BREAK, END = 60, 61, 62
SPECIALS = {"[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END}
TEXT_SHAPE: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
    "sliding_window": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 64,
}  # fmt: skip


def mistral3() -> Any:
    config = Mistral3Config(
        text_config=TEXT_SHAPE, vision_config=VISION, image_token_index=IMAGE, spatial_merge_size=2,
        vision_feature_layer=-1,
    )  # fmt: skip
    return Mistral3ForConditionalGeneration(config)


def pixtral() -> Any:
    config = LlavaConfig(
        text_config=TEXT_SHAPE, vision_config=VISION, image_token_index=IMAGE, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


FAMILIES = {
    "mistral-small-3-in-memory": (
        Family(mistral3, SPECIALS, {"size": {"longest_edge": 60}, "patch_size": 8}, as_in_memory=True),
        8,
    ),
    "mistral-small-3": (Family(mistral3, SPECIALS, {"size": {"longest_edge": 60}, "patch_size": 8}), 8),
    "pixtral": (Family(pixtral, SPECIALS, {"size": {"longest_edge": 40}, "patch_size": 4}), 4),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, int]:
    family, cell = FAMILIES[request.param]
    return pair(family, tmp_path_factory.mktemp("pixtral")), cell


@pytest.mark.parametrize("sizes", [[(40, 30)], [(30, 21), (17, 71), (64, 64)]], ids=["one", "several"])
def test_logits_are_those_of_transformers(ours: tuple[Pair, int], sizes: list[tuple[int, int]]) -> None:
    made, _ = ours
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [IMAGE, *words(3, index)]
    prepared = made.processor.prepare(tokens, images)
    inputs = PixtralImageProcessorPil.from_pretrained(made.folder)(images, return_tensors="pt")
    theirs = their_logits(made, prepared, **inputs)
    assert_same(our_logits(made, prepared), theirs)
    assert_same(our_logits(made, prepared, chunk=13), theirs)


def test_an_image_is_read_line_by_line(ours: tuple[Pair, int]) -> None:
    made, cell = ours
    image = picture(39, 21)
    prepared = made.processor.prepare([7, IMAGE, 8], [image])
    (size,) = PixtralImageProcessorPil.from_pretrained(made.folder)(image, return_tensors="pt")["image_sizes"]
    rows, columns = int(size[0]) // cell, int(size[1]) // cell
    lines = ([IMAGE] * columns + [BREAK]) * rows
    assert prepared.tokens == [7, *lines[:-1], END, 8]
    assert [(span.start, span.length, span.offset) for span in prepared.spans] == [
        (1 + row * (columns + 1), columns, row * columns) for row in range(rows)
    ]
    assert made.processor.rows_of(*image.size) == rows * columns


def test_pixels_are_those_of_transformers(ours: tuple[Pair, int]) -> None:
    made, _ = ours
    image = picture(70, 45)
    (item,) = made.processor.prepare([IMAGE], [image]).items
    theirs = PixtralImageProcessorPil.from_pretrained(made.folder)(image, return_tensors="pt")["pixel_values"]
    mean, deviation = torch.from_numpy(item.arrays["norm"])
    pixels = (torch.from_numpy(item.arrays["pixels"]).float() - mean) / deviation
    torch.testing.assert_close(pixels.permute(0, 3, 1, 2), theirs, atol=1e-5, rtol=0)
