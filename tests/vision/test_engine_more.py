"""The other families, and videos, through the engine, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from quire.vision.processor import Prepared, Video
from tests.vision import test_gemma4, test_pixtral, test_qwen, test_split
from tests.vision.engine_harness import Sighted
from tests.vision.harness import Family, picture, words

Inputs = dict[str, Any]
PICTURES = [picture(40, 30, 1), picture(17, 61, 3)]


def pixtral(sighted: Sighted, images: list[Any], prepared: Prepared) -> Inputs:
    return dict(PixtralImageProcessorPil.from_pretrained(sighted.folder)(images, return_tensors="pt"))


def idefics3(sighted: Sighted, images: list[Any], prepared: Prepared) -> Inputs:
    return dict(Idefics3ImageProcessorPil.from_pretrained(sighted.folder)([images], return_tensors="pt"))


def internvl(sighted: Sighted, images: list[Any], prepared: Prepared) -> Inputs:
    processor = GotOcr2ImageProcessorPil.from_pretrained(sighted.folder)
    return {"pixel_values": processor(images, crop_to_patches=True, return_tensors="pt")["pixel_values"]}


def gemma4(sighted: Sighted, images: list[Any], prepared: Prepared) -> Inputs:
    found = dict(Gemma4ImageProcessorPil.from_pretrained(sighted.folder)(images, return_tensors="pt"))
    found.pop("num_soft_tokens_per_image")
    return found | {"mm_token_type_ids": (torch.tensor([prepared.tokens]) == test_gemma4.IMAGE).int()}


def qwen(sighted: Sighted, images: list[Any], prepared: Prepared) -> Inputs:
    return test_qwen.reference_inputs(sighted, images, [], prepared)  # type: ignore[arg-type]


FAMILIES: dict[str, tuple[Family, Callable[..., Inputs]]] = {
    "pixtral": (test_pixtral.FAMILIES["pixtral"][0], pixtral),
    "mistral-small-3": (test_pixtral.FAMILIES["mistral-small-3"][0], pixtral),
    "idefics3": (test_split.FAMILIES["idefics3"][0], idefics3),
    "smolvlm": (test_split.FAMILIES["smolvlm"][0], idefics3),
    "internvl": (test_split.FAMILIES["internvl"][0], internvl),
    "gemma-4": (test_gemma4.FAMILIES["small"], gemma4),
    "gemma-4-both-ways": (test_gemma4.FAMILIES["both-ways"], gemma4),
    "qwen2-vl": (test_qwen.FAMILIES["qwen2-vl"], qwen),
    "qwen3-vl-moe": (test_qwen.FAMILIES["qwen3-vl-moe"], qwen),
}
IMAGE = 60


@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    family, inputs = FAMILIES[name]
    sighted = Sighted(family, tmp_path)
    prompts = []
    for images in (PICTURES[:1], PICTURES):
        tokens = words(6, len(images))
        for index in range(len(images)):
            tokens += [IMAGE, *words(3, index)]
        prepared = sighted.prepare(tokens, images)
        prompts.append((prepared, sighted.expected(prepared, 5, **inputs(sighted, images, prepared))))
    engine = sighted.engine(max_num_batched_tokens=88, max_num_seqs=4, max_model_len=400, encoder_cache_tokens=400)
    for prepared, expected in (*prompts, *prompts):  # the second time from cached blocks
        assert engine.answer(prepared, 5) == expected
    assert engine.stats.encoded == 2
    names = [engine.add(prepared, 5, salt="another tenant") for prepared, _ in prompts]
    engine.run()
    assert [engine.outputs[name, 0] for name in names] == [expected for _, expected in prompts]
    engine.close()


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen2-vl", "qwen3-vl", "qwen3.5"])
def test_videos(name: str, tmp_path: Any) -> None:
    sighted = Sighted(test_qwen.FAMILIES[name], tmp_path)
    video = Video([picture(24, 40, seed) for seed in range(5)], fps=2.0)
    still = picture(30, 20, 9)
    tokens = [*words(5, 1), test_qwen.VIDEO, *words(3, 2), test_qwen.IMAGE, *words(2, 3)]
    assert sighted.processor is not None
    prepared = sighted.processor.prepare(tokens, [still], [video])
    inputs = test_qwen.reference_inputs(sighted, [still], [video], prepared)  # type: ignore[arg-type]
    expected = sighted.expected(prepared, 6, **inputs)
    engine = sighted.engine(max_num_batched_tokens=48, max_model_len=400)
    assert engine.answer(prepared, 6) == expected
    assert engine.answer(prepared, 6) == expected
    engine.close()


def test_random_weights_for_measuring(tmp_path: Any) -> None:
    sighted = Sighted(test_qwen.FAMILIES["qwen3-vl"], tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    engine = sighted.engine(load_format="dummy")
    assert len(engine.answer(sighted.prepare([1, IMAGE, 2], PICTURES[:1]), 3)) == 3
    engine.close()


def test_the_encoder_is_read_when_the_first_image_comes(tmp_path: Any) -> None:
    sighted = Sighted(test_pixtral.FAMILIES["pixtral"][0], tmp_path)
    prepared = sighted.prepare([*words(4, 1), IMAGE, 5], PICTURES[:1])
    expected = sighted.expected(prepared, 4, **pixtral(sighted, PICTURES[:1], prepared))
    engine = sighted.engine(vision="lazy")
    encoder = engine.core._executor._worker.encoder  # type: ignore[attr-defined]
    text = SimpleNamespace(tokens=words(9, 2), items=[], spans=[], positions=None, position_delta=0)
    engine.answer(text, 3)  # type: ignore[arg-type]
    assert not encoder.is_loaded
    assert engine.answer(prepared, 4) == expected
    assert encoder.is_loaded
    engine.close()
