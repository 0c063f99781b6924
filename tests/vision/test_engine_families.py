"""Families with other attention, caches and features than Qwen2.5-VL, through the engine, against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.errors import CacheTooSmallError
from quire.kvcache.prefix_cache import index_key
from quire.messages.media import key_spans
from quire.vision.processor import Prepared
from tests.vision import test_qwen, test_tiles
from tests.vision.engine_harness import Case
from tests.vision.harness import Family, picture, words

PICTURES = [picture(40, 30, 1), picture(64, 64, 2), picture(17, 61, 3)]


def gemma3() -> Any:
    text = test_tiles.TEXT_SHAPE | {
        "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 6,
    }  # fmt: skip
    vision = test_tiles.SIGLIP | {"vision_use_head": False}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=36, image_token_index=test_tiles.IMAGE,
        boi_token_index=test_tiles.BOI, eoi_token_index=test_tiles.EOI,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


AROUND = ([test_qwen.START], [test_qwen.END])
GEMMA = Family(
    gemma3,
    test_tiles.SPECIALS,
    {"size": {"height": 24, "width": 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
)
FAMILIES: dict[str, tuple[Any, ...]] = {
    "qwen2.5-vl": (test_qwen.FAMILIES["qwen2.5-vl"], test_qwen.IMAGE, Qwen2VLImageProcessorPil, AROUND),
    "qwen3-vl": (test_qwen.FAMILIES["qwen3-vl"], test_qwen.IMAGE, Qwen2VLImageProcessorPil, AROUND),
    "qwen3.5": (test_qwen.FAMILIES["qwen3.5"], test_qwen.IMAGE, Qwen2VLImageProcessorPil, AROUND),
    "llava": (test_tiles.FAMILIES["llava"][0], test_tiles.IMAGE, CLIPImageProcessorPil),
    "llava-next": (test_tiles.FAMILIES["llava-next"][0], test_tiles.IMAGE, LlavaNextImageProcessorPil),
    "gemma-3": (GEMMA, test_tiles.BOI, Gemma3ImageProcessorPil),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in made:
            family, *more = FAMILIES[name]
            made[name] = Case(family, tmp_path_factory.mktemp(name), *more)
        return made[name]

    return of


@pytest.mark.parametrize("name", list(FAMILIES)[1:])
def test_tokens_are_those_of_transformers(make: Callable[[str], Case], name: str) -> None:
    case = make(name)
    longest = case.sighted.config.max_position
    for tokens in (512, 56):
        engine = case.sighted.engine(
            max_num_batched_tokens=tokens, max_num_seqs=4, encoder_cache_tokens=400, max_model_len=min(640, longest)
        )
        prompts = [(PICTURES[:1], case.prompt(PICTURES[:1], 1)), (PICTURES, case.prompt(PICTURES, 2, before=19))]
        for (images, prepared), count in itertools.product(prompts, (6, 6)):  # the second time from cached blocks
            assert engine.answer(prepared, count) == case.theirs(images, prepared, count)
        names = [engine.add(prepared, 6) for _, prepared in prompts]
        engine.run()
        for name, (images, prepared) in zip(names, prompts, strict=True):
            assert engine.outputs[name, 0] == case.theirs(images, prepared)
        assert engine.stats.encoded == 3 or sum(item.rows for item in prompts[1][1].items) > 400
        engine.close()


@pytest.mark.parametrize("name", ["gemma-3", "qwen3.5"])
@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preempted_requests_go_on(make: Callable[[str], Case], name: str, swap: float) -> None:
    case = make(name)
    engine = case.sighted.engine(swap_space=swap, max_num_seqs=4, max_num_batched_tokens=64, encoder_cache_tokens=80)
    if swap:
        engine.swap_always()
    prepared = [case.prompt(PICTURES[i : i + 2], i) for i in range(2)]
    names = [engine.add(each, 12) for each in prepared]
    steps = 0
    while engine.core.has_work:
        engine.step()
        steps += 1
        if steps < 12:
            engine.preempt(names[steps % 2], swap=swap > 0)
    for index, each in enumerate(names):
        assert engine.outputs[each, 0] == case.theirs(PICTURES[index : index + 2], prepared[index], 12)
    assert engine.scheduler.stats.preemptions > 4
    engine.close()


def test_an_image_that_is_seen_both_ways_is_never_split(make: Callable[[str], Case]) -> None:
    case = make("gemma-3")
    engine = case.sighted.engine(max_num_batched_tokens=42, max_num_seqs=2)
    chunks: list[list[int]] = []
    write = engine.scheduler._writer.write

    def watch(builder: Any, decodes: Any) -> Any:
        chunks.append(list(builder.prompts.values()))
        return write(builder, decodes)

    engine.scheduler._writer.write = watch  # type: ignore[method-assign]
    prepared = case.prompt(PICTURES[:2], 3, before=30)
    (first, second) = prepared.spans
    assert engine.answer(prepared, 3) == case.theirs(PICTURES[:2], prepared, 3)
    ends = list(itertools.accumulate(sum(chunk) for chunk in chunks if chunk))
    assert not any(span.start < end < span.stop for end in ends for span in (first, second))
    shorter = case.prompt(PICTURES[:1], 3, before=30)  # its image begins within a block, and ends within another
    name = engine.add(shorter, 3)
    engine.run()
    assert engine.cached[name] and not first.start < engine.cached[name] < first.stop
    assert engine.outputs[name, 0] == case.theirs(PICTURES[:1], shorter, 3)
    engine.close()
    tight = case.sighted.engine(max_num_batched_tokens=36, max_num_seqs=4)
    with pytest.raises(CacheTooSmallError, match="36 tokens is computed in one step, which has at most 32"):
        tight.add(shorter, 3)
    tight.close()


def test_prefix_hits_end_before_an_image_that_is_seen_both_ways(make: Callable[[str], Case]) -> None:
    case = make("gemma-3")
    engine = case.sighted.engine(max_num_seqs=2)
    prepared = case.prompt(PICTURES[:1], 5, before=20)
    (span,) = prepared.spans
    engine.answer(prepared, 3)
    blocks = engine.scheduler.tables.prefix_cache
    keys = engine.keys.of(prepared.tokens, "", key_spans(prepared.items, prepared.spans))
    held = [block for number in range(3) for block in [blocks.get(index_key(keys[2], number))] if block is not None]
    assert held
    for block in held:  # a block within the image is gone
        engine.scheduler.tables.withdraw([block])
    name = engine.add(prepared, 3)
    engine.run()
    assert engine.cached[name] == 16 < span.start
    assert engine.outputs[name, 0] == case.theirs(PICTURES[:1], prepared, 3)
    engine.close()


def test_text_alone_is_unchanged(make: Callable[[str], Case]) -> None:
    case = make("gemma-3")
    engine = case.sighted.engine(vision="off")
    text = Prepared(words(40, 7))
    assert engine.answer(text) == case.sighted.expected(text, 6)
    engine.close()
