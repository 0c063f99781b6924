"""Idefics3, SmolVLM and InternVL against transformers: tiles, tokens and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from quire.vision.idefics3 import patch_places
from tests.vision.harness import Family, assert_same, our_logits, pair, picture, their_logits, words

IMAGE, FAKE, GLOBAL, START, END = 60, 61, 62, 63, 64
SPECIALS = {"<image>": IMAGE, "<fake_token_around_image>": FAKE, "<global-img>": GLOBAL, "<img>": START, "</img>": END}
SPECIALS |= {f"<row_{row}_col_{column}>": 60 + 6 * row + column for row in range(1, 5) for column in range(1, 5)}
LINE, LINES = 57, 58
TEXT_SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24,
    "patch_size": 4,
}  # fmt: skip


def idefics3() -> Any:
    config = Idefics3Config(text_config=TEXT_SHAPE, vision_config=VISION, image_token_id=IMAGE, scale_factor=2)
    return Idefics3ForConditionalGeneration(config)


def smolvlm() -> Any:
    config = SmolVLMConfig(
        text_config=TEXT_SHAPE, vision_config=VISION, image_token_id=IMAGE, scale_factor=3, tie_word_embeddings=True
    )
    return SmolVLMForConditionalGeneration(config)


def internvl(text: str, **vision: Any) -> Any:
    config = InternVLConfig(
        text_config=TEXT_SHAPE | {"model_type": text, "head_dim": 8}, vision_config=VISION | vision,
        image_token_id=IMAGE, image_seq_length=9, tie_word_embeddings=False,
    )  # fmt: skip
    return InternVLForConditionalGeneration(config)


IDEFICS3 = {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 24}}
INTERNVL = {"size": {"height": 24, "width": 24}, "max_patches": 4}
FAMILIES: dict[str, tuple[Family, Any]] = {
    "idefics3": (Family(idefics3, SPECIALS, IDEFICS3), Idefics3ImageProcessorPil),
    "smolvlm": (Family(smolvlm, SPECIALS, IDEFICS3 | {"size": {"longest_edge": 48}}), Idefics3ImageProcessorPil),
    "internvl": (
        Family(lambda: internvl("qwen2", attention_bias=True), SPECIALS, INTERNVL),
        GotOcr2ImageProcessorPil,
    ),
    "internvl-3.5": (
        Family(lambda: internvl("qwen3", use_qk_norm=True, norm_type="rms_norm"), SPECIALS, INTERNVL),
        GotOcr2ImageProcessorPil,
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, processor = FAMILIES[request.param]
    made = pair(family, tmp_path_factory.mktemp("split"))
    return made, processor.from_pretrained(made.folder)


def reference_inputs(made: Any, processor: Any, images: list[Any]) -> dict[str, Any]:
    if "InternVL" in made.config.architecture:
        return {"pixel_values": processor(images, crop_to_patches=True, return_tensors="pt")["pixel_values"]}
    return dict(processor([images], return_tensors="pt"))


@pytest.mark.parametrize("sizes", [[(40, 30)], [(17, 61), (24, 24), (90, 50)]], ids=["one", "several"])
def test_logits_are_those_of_transformers(ours: Any, sizes: list[tuple[int, int]]) -> None:
    made, processor = ours
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [IMAGE, *words(3, index)]
    prepared = made.processor.prepare(tokens, images)
    assert [item.rows for item in prepared.items] == [made.processor.rows_of(*image.size) for image in images]
    theirs = their_logits(made, prepared, **reference_inputs(made, processor, images))
    assert_same(our_logits(made, prepared), theirs)
    assert_same(our_logits(made, prepared, chunk=37), theirs)


@pytest.mark.parametrize("size", [(70, 45), (20, 77), (24, 24), (33, 33)])
def test_tiles_are_those_of_transformers(ours: Any, size: tuple[int, int]) -> None:
    made, processor = ours
    image = picture(*size)
    (item,) = made.processor.prepare([IMAGE], [image]).items
    theirs = reference_inputs(made, processor, [image])["pixel_values"]
    tiles = made.encoder.tiles(item).permute(0, 3, 1, 2)
    torch.testing.assert_close(tiles, theirs.reshape(tiles.shape), atol=1e-5, rtol=0)


def test_what_stands_around_tiles(ours: Any) -> None:
    made, processor = ours
    image = picture(70, 40)
    tokens = made.processor.prepare([7, IMAGE, 8], [image]).tokens
    if "InternVL" in made.config.architecture:
        count = processor.get_number_of_image_patches(40, 70, {"crop_to_patches": True})
        assert tokens == [7, START, *[IMAGE] * (9 * count), END, 8]
        return
    encoded = processor([[image]], return_row_col_info=True)
    rows, columns = encoded["rows"][0][0], encoded["cols"][0][0]
    soft = [IMAGE] * made.processor.tile_rows
    lines = [
        [token for column in range(columns) for token in (FAKE, SPECIALS[f"<row_{row + 1}_col_{column + 1}>"], *soft)]
        for row in range(rows)
    ]
    expected = [token for line in lines for token in (*line, LINE)][:-1]
    assert tokens == [7, *expected, LINES, FAKE, GLOBAL, *soft, FAKE, 8]


@pytest.mark.parametrize("side", [26, 27, 32, 70])
def test_learned_positions_of_idefics3_are_those_of_transformers(side: int) -> None:
    class Config:
        hidden_size, image_size, patch_size, num_channels = 1, side, 1, 3

    embeddings = Idefics3VisionEmbeddings(Config())  # type: ignore[arg-type]
    embeddings.position_embedding.weight.data = torch.arange(side**2).float().unsqueeze(1)
    embeddings.patch_embedding.weight.data.zero_()
    embeddings.patch_embedding.bias.data.zero_()
    with torch.no_grad():
        found = embeddings(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
    torch.testing.assert_close(patch_places(side).float(), found.flatten(), atol=0, rtol=0)
