"""What processors refuse, how items are identified, and what their files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.errors import CheckpointError, ValidationError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import Video, processor_for
from quire.vision.registry import ENCODERS, PROCESSORS
from tests.vision.harness import picture, tokenizer_of

IMAGE, VIDEO, START, END = 60, 61, 62, 63
SPECIALS = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
SETTINGS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 64 * 40}}


def config(architecture: str = "Qwen2_5_VLForConditionalGeneration", **fields: Any) -> ModelConfig:
    vision = {"patch_size": 4, "spatial_merge_size": 2, "tokens_per_second": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    return ModelConfig.from_dict({"architectures": [architecture], "vision_config": vision, **TEXT, **tokens, **fields})


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def processor(architecture: str = "Qwen2_5_VLForConditionalGeneration", **settings: Any) -> Any:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
        return processor_for(config(architecture), tmp_path, tokenizer_of(SPECIALS))

    return processor


def test_every_architecture_with_a_processor_has_an_encoder_and_a_text_part() -> None:
    from quire.models.registry import supported

    assert set(PROCESSORS.known) == set(ENCODERS.known)
    assert set(PROCESSORS.known) <= set(supported())
    assert all(PROCESSORS.find(name) is not None and ENCODERS.find(name) is not None for name in PROCESSORS.known)


def test_models_without_a_vision_config_see_nothing() -> None:
    assert processor_for(config("LlamaForCausalLM"), None, None) is None
    assert processor_for(config(vision_config=None), None, None) is None


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        ([1, 2], 1, "0 placeholders '<|image_pad|>' and the request 1 image"),
        ([1, IMAGE], 0, "1 placeholder '<|image_pad|>' and the request 0 images"),
        ([IMAGE, 3, IMAGE], 1, "2 placeholders"),
        ([1, VIDEO], 0, "1 placeholder '<|video_pad|>' and the request 0 videos"),
    ],
)
def test_placeholders_and_pictures_must_match(make: Make, tokens: list[int], images: int, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make().prepare(tokens, [picture(20, 20)] * images)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"do_pan_and_scan": True}, "it takes: min_pixels, max_pixels, size"),
        ({"min_pixels": 0}, "min_pixels must be a positive integer"),
        ({"max_pixels": 10, "min_pixels": 20}, "min_pixels <= max_pixels"),
        ({"max_pixels": 1 << 40}, "67,108,864"),
        ({"size": 3}, "size must be an object"),
    ],
)
def test_settings_of_a_request_are_checked(make: Make, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make().prepare([IMAGE], [picture(20, 20)], kwargs=kwargs)
    assert message in str(caught.value)


def test_settings_of_a_request_change_the_size_and_the_identity(make: Make) -> None:
    processor, image = make(), picture(60, 40)
    (plain,) = processor.prepare([IMAGE], [image]).items
    (small,) = processor.prepare([IMAGE], [image], kwargs={"max_pixels": 64 * 6}).items
    assert small.rows <= 6 < plain.rows
    assert small.digest != plain.digest


def test_too_long_an_image_is_refused(make: Make) -> None:
    with pytest.raises(ValidationError, match="200 times"):
        make().prepare([IMAGE], [picture(402, 2)])
    with pytest.raises(ValidationError, match="200 times"):
        make().rows_of(402, 2)


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (Video([]), "no frames"),
        (Video([picture(8, 8), picture(8, 9)]), "different sizes"),
        (Video([picture(8, 8)], fps=0), "fps = 0"),
        (Video([picture(8, 8)] * 2, seconds=[1.0]), "2 frames and 1 times"),
    ],
)
def test_videos_are_checked(make: Make, video: Video, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make().prepare([VIDEO], [], [video])


def test_a_video_whose_positions_run_ahead_of_its_tokens_is_refused(make: Make) -> None:
    frames = [picture(16, 8)] * 8
    with pytest.raises(ValidationError, match="more frames a second"):
        make(size={"shortest_edge": 64, "longest_edge": 128}).prepare([VIDEO], [], [Video(frames, fps=0.1)])


def test_videos_at_another_speed_share_no_cached_keys(make: Make) -> None:
    frames = [picture(30, 20, seed) for seed in range(4)]
    slow, fast = (make().prepare([VIDEO], [], [Video(frames, fps=fps)]) for fps in (1.0, 2.0))
    assert slow.tokens == fast.tokens
    assert (slow.positions != fast.positions).any()
    assert slow.items[0].digest != fast.items[0].digest


def test_identity_is_of_pixels_and_settings(make: Make) -> None:
    processor, image = make(), picture(30, 20)
    digest = processor.prepare([IMAGE], [image]).items[0].digest
    assert len(digest) == 32
    assert processor.prepare([1, IMAGE], [image.copy()]).items[0].digest == digest
    changed = np.asarray(image).copy()
    changed[7, 11, 2] ^= 1
    assert processor.prepare([IMAGE], [Image.fromarray(changed)]).items[0].digest != digest
    assert make(image_mean=[0.1, 0.2, 0.3]).prepare([IMAGE], [image]).items[0].digest != digest
    turned = Image.fromarray(np.asarray(image).reshape(30, 20, 3))  # the same bytes in another shape
    assert processor.prepare([IMAGE], [turned]).items[0].digest != digest


def test_transparent_images_stand_on_white(make: Make) -> None:
    clear = Image.new("RGBA", (16, 16), (10, 20, 30, 0))
    white = Image.new("RGB", (16, 16), (255, 255, 255))
    processor = make()
    found, expected = (processor.prepare([IMAGE], [image]).items[0] for image in (clear, white))
    assert found.digest == expected.digest
    for mode in ("L", "P", "1", "CMYK"):
        assert processor.prepare([IMAGE], [picture(20, 12).convert(mode)]).items[0].arrays["pixels"].shape[-1] == 3


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(SPECIALS)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SETTINGS}))
    assert processor_for(config(), tmp_path, tokenizer).rows_of(20, 40) == 10  # type: ignore[union-attr]
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": 3}))
    with pytest.raises(CheckpointError, match="image_processor = 3"):
        processor_for(config(), tmp_path, tokenizer)


def test_gemma_3_writes_line_ends_around_images_as_text() -> None:
    specials = {"<start_of_image>": IMAGE, "<end_of_image>": VIDEO, "<image_soft_token>": START}
    fields: dict[str, Any] = {"boi_token_index": IMAGE, "eoi_token_index": VIDEO, "image_token_index": START}
    fields |= {"image_token_id": None, "mm_tokens_per_image": 4}
    vision = {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
    made = config("Gemma3ForConditionalGeneration", vision_config=vision, **fields)
    processor = processor_for(made, None, tokenizer_of(specials))
    assert processor is not None
    written = processor.prompt_text("a <start_of_image> b")
    assert written == "a \n\n<start_of_image><image_soft_token><end_of_image>\n\n b"
    bare = processor.prepare([1, IMAGE, 2], [picture(20, 20)])
    marked = processor.prepare([1, 58, IMAGE, START, VIDEO, 58, 2], [picture(20, 20)])
    assert bare.tokens == marked.tokens == [1, 58, IMAGE, START, START, START, START, VIDEO, 58, 2]


def test_an_image_that_comes_again_is_not_resized_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    processor: Any = make(**SETTINGS)
    resized: list[Any] = []
    original = type(processor).image
    monkeypatch.setattr(
        type(processor), "image", lambda self, image, kwargs: resized.append(image) or original(self, image, kwargs)
    )
    one, changed = picture(40, 30, 1), picture(40, 30, 1)
    changed.putpixel((39, 29), (1, 2, 3))
    plain = processor.prepare([60, 1, 60], [one, one])
    assert len(resized) == 2  # off
    size = plain.items[0].nbytes
    processor.pictures.capacity = 3 * size
    for images in ([one, one], [one, changed], [changed, one]):
        found = processor.prepare([60, 1, 60], images)
        fresh = [original(processor, image, {}).item for image in images]
        assert [item.digest for item in found.items] == [item.digest for item in fresh]
        for item, other in zip(found.items, fresh, strict=True):
            assert (item.arrays["pixels"] == other.arrays["pixels"]).all()
    assert len(resized) == 2 + 2
    processor.prepare([60], [one], kwargs={"max_pixels": 8 * 8 * 4})  # other settings, another result
    assert len(resized) == 5
    for seed in range(5, 12):
        processor.prepare([60], [picture(40, 30, seed)])
        assert 0 < processor.pictures.used <= 3 * size
    processor.pictures.capacity = size - 1
    processor.prepare([60], [picture(40, 30, 30)])
    assert processor.pictures.used <= 3 * size
