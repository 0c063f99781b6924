"""Gemma 4 against transformers: pixels and logits, with images that see themselves both ways and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.vision.harness import Family, Pair, assert_same, our_logits, pair, picture, their_logits, words

IMAGE, BOI, EOI = 60, 61, 62
SPECIALS = {"<|image|>": IMAGE, "<|image>": BOI, "<image|>": EOI}
PATCH, POOL = 4, 3
TEXT_SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 48, "vocab_size_per_layer_input": 97, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 12,
    "num_key_value_heads": 2, "patch_size": PATCH, "pooling_kernel_size": POOL, "position_embedding_size": 200,
}  # fmt: skip


def gemma4(text: dict[str, Any], **vision: Any) -> Any:
    config = Gemma4Config(
        text_config=TEXT_SHAPE | text, vision_config=VISION | vision, audio_config=None, image_token_id=IMAGE,
        boi_token_id=BOI, eoi_token_id=EOI, video_token_id=63, audio_token_id=64,
    )  # fmt: skip
    model = Gemma4ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        if name.endswith(("input_min", "output_min", "input_max", "output_max")):
            buffer.fill_(-1.5 if name.endswith("min") else 1.2)
    return model


PREPROCESSOR = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": 70}
FAMILIES = {
    "small": Family(lambda: gemma4({"hidden_size_per_layer_input": 6}), SPECIALS, PREPROCESSOR),
    "both-ways": Family(
        lambda: gemma4(
            {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
            standardize=True,
            use_clipped_linears=True,
        ),
        SPECIALS,
        PREPROCESSOR,
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(FAMILIES[request.param], tmp_path_factory.mktemp("gemma4"))


@pytest.mark.parametrize("sizes", [[(40, 30)], [(17, 61), (300, 200)]], ids=["one", "several"])
def test_logits_are_those_of_transformers(ours: Pair, sizes: list[tuple[int, int]]) -> None:
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [IMAGE, *words(3, index)]
    prepared = ours.processor.prepare(tokens, images)
    inputs = dict(Gemma4ImageProcessorPil.from_pretrained(ours.folder)(images, return_tensors="pt"))
    counts = torch.as_tensor(inputs.pop("num_soft_tokens_per_image")).tolist()
    assert [item.rows for item in prepared.items] == counts
    assert counts == [ours.processor.rows_of(*image.size) for image in images]
    kinds = (torch.tensor([prepared.tokens]) == IMAGE).int()
    theirs = their_logits(ours, prepared, mm_token_type_ids=kinds, **inputs)
    assert_same(our_logits(ours, prepared), theirs)
    if not ours.model.bidirectional_spans:
        assert_same(our_logits(ours, prepared, chunk=41), theirs)


def test_an_image_stands_between_its_start_and_end(ours: Pair) -> None:
    prepared = ours.processor.prepare([7, IMAGE, 8], [picture(40, 30)])
    rows = prepared.items[0].rows
    assert prepared.tokens == [7, BOI, *[IMAGE] * rows, EOI, 8]
    assert [(span.start, span.length) for span in prepared.spans] == [(2, rows)]
