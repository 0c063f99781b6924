"""The Qwen-VL families against transformers: pixels, positions and logits."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from quire.vision.processor import Prepared, Video
from tests.vision.harness import Family, Pair, assert_same, our_logits, pair, picture, their_logits, words

IMAGE, VIDEO, START, END = 60, 61, 62, 63
SPECIALS = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIZES = {"size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 60}}


def qwen2_5() -> Any:
    text = TEXT_SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision = {
        "depth": 3, "hidden_size": 24, "intermediate_size": 20, "num_heads": 2, "patch_size": 4, "window_size": 16,
        "out_hidden_size": 32, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen2() -> Any:
    text = TEXT_SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS))


QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN3_VISION: dict[str, Any] = {
    "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 25,
}  # fmt: skip


def qwen3() -> Any:
    text = TEXT_SHAPE | {"head_dim": 8, "rope_parameters": QWEN3_ROPE}
    vision = QWEN3_VISION | {"deepstack_visual_indexes": [0, 2]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS))


def qwen3_moe() -> Any:
    text = TEXT_SHAPE | {"head_dim": 8, "rope_parameters": QWEN3_ROPE}
    text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
    vision = QWEN3_VISION | {"deepstack_visual_indexes": [1]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **TOKENS))


def qwen3_5() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = TEXT_SHAPE | {
        "head_dim": 16, "rope_parameters": rope, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=QWEN3_VISION, **TOKENS)
    return Qwen3_5ForConditionalGeneration(config)


PREPROCESSOR = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, **SIZES}


def published(name: str) -> str:
    """The names in the files of Qwen2-VL and 2.5-VL."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of Qwen2-VL and 2.5-VL: fields of the text model beside the others, rope as `rope_scaling`."""
    text = dict(fields.pop("text_config"))
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    kept = {name: value for name, value in text.items() if name not in ("model_type", "layer_types")}
    return {**kept, **fields, "rope_scaling": scaling, "rope_theta": rope["rope_theta"], "use_sliding_window": False}


def transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Experts as in the files of Qwen3-VL's mixtures."""
    return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


FAMILIES = {
    "qwen2.5-vl-published": Family(qwen2_5, SPECIALS, PREPROCESSOR, rename=published, config=flat),
    "qwen3-vl-moe-published": Family(qwen3_moe, SPECIALS, PREPROCESSOR, change=transposed),
    "qwen2.5-vl": Family(qwen2_5, SPECIALS, PREPROCESSOR),
    "qwen2-vl": Family(qwen2, SPECIALS, PREPROCESSOR),
    "qwen3-vl": Family(qwen3, SPECIALS, PREPROCESSOR),
    "qwen3-vl-moe": Family(qwen3_moe, SPECIALS, PREPROCESSOR),
    "qwen3.5": Family(qwen3_5, SPECIALS, PREPROCESSOR),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(FAMILIES[request.param], tmp_path_factory.mktemp("qwen"))


def reference_inputs(ours: Pair, images: list[Any], videos: list[Video], prepared: Prepared) -> dict[str, Any]:
    """transformers' own pixels; of videos by the rule that its (torchvision) processor documents."""
    tokens = torch.tensor([prepared.tokens])
    found: dict[str, Any] = {"mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()}
    slow = Qwen2VLImageProcessorPil.from_pretrained(ours.folder)
    if images:
        found |= slow(images, return_tensors="pt")
    if videos:
        cut = [pair_frames(reference_frames(ours, slow, video), len(video.frames)) for video in videos]
        found["pixel_values_videos"] = torch.cat([patches for patches, _ in cut])
        found["video_grid_thw"] = torch.tensor([grid for _, grid in cut])
        if "second_per_grid_ts" in ours.reference.model.get_rope_index.__code__.co_varnames:
            found["second_per_grid_ts"] = torch.tensor([2 / video.fps for video in videos])
    return found


def qwen3_smart_resize() -> Any:
    """transformers' own rule for videos, from a file that cannot be imported without torchvision."""
    spec = importlib.util.find_spec("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(tree, spec.origin, "exec"), names)
    return names["smart_resize"]


def reference_frames(ours: Pair, slow: Any, video: Video) -> Any:
    """The frames of a video in the size that transformers chooses, as if each were an image."""
    width, height = video.frames[0].size
    limits = {"factor": 8, "min_pixels": slow.size["shortest_edge"], "max_pixels": slow.size["longest_edge"]}
    if "qwen3" in ours.reference.config.model_type:
        rows, columns = qwen3_smart_resize()(len(video.frames), height, width, 2, **limits)
    else:
        rows, columns = smart_resize(height, width, **limits)
    frames = [frame.resize((columns, rows), Image.Resampling.BICUBIC) for frame in video.frames]
    return slow(frames, do_resize=False, return_tensors="pt")


def pair_frames(processed: Any, count: int) -> tuple[torch.Tensor, list[int]]:
    """Patches of single frames, each of which has its frame twice, as patches of pairs of frames."""
    rows, columns = processed["image_grid_thw"][0, 1:].tolist()
    single = processed["pixel_values"].view(count, rows * columns, 3, 2, -1)[:, :, :, 0]
    single = torch.cat((single, single[-1:])) if count % 2 else single
    paired = single.unflatten(0, (-1, 2)).permute(0, 2, 3, 1, 4)
    return paired.reshape(len(paired) * rows * columns, -1), [len(paired), rows, columns]


PROMPTS = {
    "one": ([(40, 30)], []),
    "several": ([(40, 30), (17, 61), (64, 64)], []),
    "video": ([], [(5, 24, 40)]),
    "both": ([(33, 20)], [(4, 24, 16), (3, 20, 30)]),
}


@pytest.mark.parametrize("prompt", list(PROMPTS))
def test_logits_are_those_of_transformers(ours: Pair, prompt: str) -> None:
    sizes, clips = PROMPTS[prompt]
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    videos = [
        Video([picture(w, h, seed=50 + 10 * index + n) for n in range(count)], fps=2.0)
        for index, (count, w, h) in enumerate(clips)
    ]
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [START, IMAGE, END, *words(3, index)]
    for index in range(len(videos)):
        tokens += [START, VIDEO, END, *words(4, 10 + index)]
    prepared = ours.processor.prepare(tokens, images, videos)
    theirs = their_logits(ours, prepared, **reference_inputs(ours, images, videos, prepared))
    assert_same(our_logits(ours, prepared), theirs)
    assert_same(our_logits(ours, prepared, chunk=11), theirs)


def test_pixels_are_those_of_transformers(ours: Pair) -> None:
    image = picture(70, 45)
    prepared = ours.processor.prepare([IMAGE], [image])
    theirs = Qwen2VLImageProcessorPil.from_pretrained(ours.folder)(image, return_tensors="pt")
    packed = ours.encoder.pack(prepared.items)
    torch.testing.assert_close(packed.patches, theirs["pixel_values"], atol=1e-5, rtol=0)
    assert [list(grid) for grid in packed.grids] == theirs["image_grid_thw"].tolist()
    assert prepared.items[0].rows == ours.processor.rows_of(*image.size) == len(prepared.tokens)


def test_positions_are_those_of_transformers(ours: Pair) -> None:
    images = [picture(40, 30), picture(24, 60)]
    prepared = ours.processor.prepare([*words(4, 0), IMAGE, *words(2, 1), IMAGE, 7], images)
    inputs = reference_inputs(ours, images, [], prepared)
    wanted, delta = ours.reference.model.get_rope_index(
        torch.tensor([prepared.tokens]), inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    np.testing.assert_array_equal(prepared.positions, wanted[:, 0].numpy())
    assert prepared.position_delta == delta.item()


def test_images_of_several_requests_in_one_call_are_the_same_as_alone(ours: Pair) -> None:
    prepared = [ours.processor.prepare([IMAGE], [picture(*size)]) for size in ((40, 30), (64, 20), (16, 16), (40, 30))]
    items = [each.items[0] for each in prepared]
    for together, item in zip(ours.encoder.encode(items), items, strict=True):
        torch.testing.assert_close(together, ours.encoder.encode([item])[0], atol=1e-4, rtol=1e-4)
