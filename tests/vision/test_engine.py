"""Images through the engine: cache keys, chunks, the encoder's cache, preemption; against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.engine import ipc
from quire.engine.waiting import explain_waiting
from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.media import MediaItem, Span
from quire.messages.plan import decode_plan, encode
from quire.messages.sampling import SamplingParams
from quire.scheduler.pacing import Pacer
from quire.vision.processor import Prepared
from tests.vision.engine_harness import Engine, Sighted
from tests.vision.harness import picture, words
from tests.vision.test_qwen import END, FAMILIES, IMAGE, START


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    return Sighted(FAMILIES["qwen2.5-vl"], tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def engine(sighted: Sighted) -> Iterator[Engine]:
    engine = sighted.engine()
    yield engine
    engine.close()


def conversation(sighted: Sighted, images: list[Image.Image], seed: int = 0, before: int = 5) -> Prepared:
    tokens = words(before, seed)
    for index in range(len(images)):
        tokens += [START, IMAGE, END, *words(3, seed + index)]
    return sighted.prepare(tokens, images)


def theirs(sighted: Sighted, images: list[Image.Image], prepared: Prepared, count: int = 6) -> list[int]:
    slow = Qwen2VLImageProcessorPil.from_pretrained(sighted.folder)
    types = (torch.tensor([prepared.tokens]) == IMAGE).int()
    inputs: dict[str, Any] = dict(slow(images, return_tensors="pt"))
    return sighted.expected(prepared, count, mm_token_type_ids=types, **inputs)


PICTURES = [picture(40, 30, 1), picture(64, 64, 2), picture(17, 61, 3)]


@pytest.mark.parametrize("tokens", [512, 24])
def test_tokens_are_those_of_transformers(sighted: Sighted, tokens: int) -> None:
    engine = sighted.engine(max_num_batched_tokens=tokens)
    for count in (1, 3):
        prepared = conversation(sighted, PICTURES[:count], seed=count)
        assert engine.answer(prepared) == theirs(sighted, PICTURES[:count], prepared)
    engine.close()


def test_second_request_about_the_same_image_encodes_nothing(sighted: Sighted, engine: Engine) -> None:
    first, second = (conversation(sighted, PICTURES[1:2], seed) for seed in (3, 4))
    for prepared in (first, second):
        assert engine.answer(prepared) == theirs(sighted, PICTURES[1:2], prepared)
    assert (engine.stats.encoded, engine.stats.hits) == (1, 1)
    before = engine.stats.spliced_tokens
    name = engine.add(first, 6)
    engine.run()
    assert engine.outputs[name, 0] == theirs(sighted, PICTURES[1:2], first)
    assert engine.cached[name] == (len(first.tokens) - 1) // 16 * 16
    assert engine.stats.spliced_tokens - before == first.spans[-1].stop - engine.cached[name]  # the block's rest
    assert engine.stats.encoded == 1


def test_images_that_differ_in_one_pixel_share_nothing(sighted: Sighted, engine: Engine) -> None:
    pixels = np.array(PICTURES[1])
    pixels[13, 7, 1] ^= 1
    other = Image.fromarray(pixels)
    one, two = conversation(sighted, [PICTURES[1]], 5), conversation(sighted, [other], 5)
    assert one.tokens == two.tokens
    assert engine.answer(one) == theirs(sighted, [PICTURES[1]], one)
    name = engine.add(two, 6)
    engine.run()
    assert engine.outputs[name, 0] == theirs(sighted, [other], two)
    assert engine.cached[name] == 0  # the image begins in the first block
    assert engine.stats.encoded == 2
    name = engine.add(two, 6)
    engine.run()
    assert engine.cached[name] > 0  # equal ones share


def test_tenants_share_neither_blocks_nor_encoded_images(sighted: Sighted, engine: Engine) -> None:
    prepared = conversation(sighted, PICTURES[:1], 16, before=40)
    for encoded, salt in enumerate(("", "a", "b"), 1):
        name = engine.add(prepared, 4, salt=salt)
        engine.run()
        assert engine.cached[name] == 0
        assert (engine.stats.encoded, engine.stats.hits) == (encoded, 0)
        assert engine.outputs[name, 0] == theirs(sighted, PICTURES[:1], prepared, 4)


def test_encoded_images_are_bounded_and_the_oldest_leave(sighted: Sighted) -> None:
    engine = sighted.engine(encoder_cache_tokens=100, enable_prefix_caching=False)
    images = [picture(64, 64, seed) for seed in range(10, 13)]  # 64 rows each: one fits
    rows = sighted.prepare([IMAGE], [images[0]]).items[0].rows
    assert rows == 64
    for image in (images[0], images[1], images[0], images[0]):
        prepared = conversation(sighted, [image], 7)
        assert engine.answer(prepared, 2) == theirs(sighted, [image], prepared, 2)
        assert engine.scheduler.requests.encoding.used_rows == 64
    assert (engine.stats.encoded, engine.stats.hits) == (3, 1)
    both = conversation(sighted, images[:2], 8)  # more than the cache holds at once
    assert engine.answer(both, 2) == theirs(sighted, images[:2], both, 2)
    large = sighted.prepare([IMAGE], [picture(112, 84, 3)])
    assert large.items[0].rows > 100
    with pytest.raises(CacheTooSmallError, match=f"of {large.items[0].rows} tokens does not fit .* of 100"):
        engine.add(large, 2)
    engine.close()


def test_several_sequences_and_requests_at_once(sighted: Sighted, engine: Engine) -> None:
    prepared = [conversation(sighted, PICTURES[:count], count) for count in (1, 2, 3)]
    params = SamplingParams(n=3, top_k=1, max_tokens=6, ignore_eos=True)
    names = [engine.add(each, 6, params=params) for each in prepared]
    engine.run()
    for count, name in enumerate(names, 1):
        wanted = theirs(sighted, PICTURES[:count], prepared[count - 1])
        assert [engine.outputs[name, index] for index in range(3)] == [wanted] * 3
    assert engine.stats.encoded == 3


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preempted_requests_go_on(sighted: Sighted, swap: float) -> None:
    engine = sighted.engine(num_gpu_blocks_override=14, encoder_cache_tokens=80, swap_space=swap)
    if swap:
        engine.swap_always()
    prepared = [conversation(sighted, PICTURES[i : i + 1], i) for i in range(3)]
    names = [engine.add(each, 30) for each in prepared]
    engine.run()
    for index, name in enumerate(names):
        assert engine.outputs[name, 0] == theirs(sighted, PICTURES[index : index + 1], prepared[index], 30)
    assert engine.scheduler.stats.preemptions > 0
    assert not swap or engine.scheduler.stats.swaps > 0
    engine.close()


class _Broken:
    """An encoder that cannot read images of some digests."""

    def __init__(self, encoder: Any, bad: set[bytes]) -> None:
        self.encoder, self.bad, self.width = encoder, bad, encoder.width

    def encode(self, items: list[MediaItem]) -> Any:
        if any(item.digest in self.bad for item in items):
            raise ValueError("the grid is not one")
        return self.encoder.encode(items)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_image_that_cannot_be_encoded_ends_its_request_alone(sighted: Sighted, depth: int) -> None:
    engine = sighted.engine(pipeline_depth=depth, max_num_batched_tokens=40)
    prepared = [conversation(sighted, PICTURES[i : i + 1], i, before=20) for i in range(3)]
    items = engine.core._executor._worker.items
    items._encoder = _Broken(items._encoder, {prepared[1].items[0].digest})
    names = [engine.add(each, 6) for each in prepared]
    engine.run()
    for index in (0, 2):
        assert engine.outputs[names[index], 0] == theirs(sighted, PICTURES[index : index + 1], prepared[index])
    end = engine.ends[names[1], 0]
    assert (end.reason, end.message) == ("error", "the image could not be encoded: the grid is not one")
    assert (names[1], 0) not in engine.outputs
    items._encoder = items._encoder.encoder
    name = engine.add(prepared[1], 6)  # nothing wrong was left in a cache
    engine.run()
    assert engine.outputs[name, 0] == theirs(sighted, PICTURES[1:2], prepared[1])
    engine.close()


def without_pixels(prepared: Prepared) -> Prepared:
    items = [MediaItem(item.digest, item.kind, item.rows) for item in prepared.items]
    return Prepared(prepared.tokens, items, prepared.spans, prepared.positions, prepared.position_delta)


def test_pixels_need_not_be_sent_twice(sighted: Sighted, engine: Engine) -> None:
    prepared = conversation(sighted, PICTURES[:1], 9)
    wanted = engine.answer(prepared)
    assert engine.answer(without_pixels(prepared)) == wanted
    engine.scheduler.reset_prefix_cache()
    assert engine.answer(without_pixels(prepared)) == wanted  # from the encoder's cache
    unseen = without_pixels(conversation(sighted, PICTURES[2:], 9))
    name = engine.add(unseen, 6)
    engine.run()
    assert engine.ends[name, 0].reason == "error"
    assert "send it again" in engine.ends[name, 0].message


BAD: list[tuple[dict[str, Any], str]] = [
    ({"spans": [Span(200, 9, 0)]}, "outside the prompt"),
    ({"spans": [Span(3, 0, 0)]}, "span of 0 tokens"),
    ({"spans": [Span(3, 9, 1)]}, "reads item 1 of 1"),
    ({"spans": [Span(3, 9, 0, 70)]}, "reads rows 70 to 79"),
    ({"spans": [Span(3, 9, 0), Span(8, 9, 0)]}, "overlaps"),
    ({"items": [MediaItem(b"short", "image", 4)], "spans": []}, "digest of 5 bytes"),
    ({"items": [MediaItem(b"d" * 32, "audio", 4)], "spans": []}, "known: image, video, embeds"),
    ({"items": [MediaItem(b"d" * 32, "embeds", 4)], "spans": []}, "enable_prompt_embeds"),
    ({"positions": np.zeros((3, 4), np.int32)}, "three int32 for each token"),
    ({"positions": -1}, "positions go from -1"),
    ({"positions": 320}, "to 320, and this model has 320"),
    ({"position_delta": 300}, "this model has 320"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_nonsense_is_refused(sighted: Sighted, shared: Engine, changes: dict[str, Any], message: str) -> None:
    prepared = conversation(sighted, PICTURES[1:2], 9)
    fields = {name: getattr(prepared, name) for name in ("tokens", "items", "spans", "positions", "position_delta")}
    if isinstance(same := changes.get("positions"), int):
        changes = {"positions": np.full((3, len(prepared.tokens)), same, np.int32)}
    with pytest.raises(ValidationError, match=message):
        shared.add(Prepared(**fields | changes), 4)


@pytest.fixture(scope="module")
def shared(sighted: Sighted) -> Iterator[Engine]:
    engine = sighted.engine()
    yield engine
    engine.close()


STORMS = [(0, 0), (1, 30), pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(0, 12, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("depth", "allowed"), STORMS)
def test_storm_over_a_tiny_cache_leaves_nothing_behind(
    sighted: Sighted, depth: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allowed`: with streams, at most so many prompt tokens a step, and images are encoded over several; 0: any."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(Pacer, "allowance", lambda *arguments, **more: int(random.integers(1, allowed + 1)))
    engine = sighted.engine(
        num_gpu_blocks_override=13, encoder_cache_tokens=90, max_num_batched_tokens=40, pipeline_depth=depth,
        max_step_stretch=1.7 if allowed else None,
    )  # fmt: skip
    prompts = [conversation(sighted, [PICTURES[i] for i in random.permutation(3)[: i % 3 + 1]], i) for i in range(6)]
    wanted = [engine.answer(prompt, 20) for prompt in prompts]
    names: dict[str, int] = {}
    for _ in range(60):
        index = int(random.integers(6))
        names[engine.add(prompts[index], 20, salt=str(random.integers(3)))] = index
        for _ in range(int(random.integers(4))):
            engine.step()
        if random.random() < 0.2:
            engine.core.abort(random.choice(list(names)))
    engine.run()
    for name, index in names.items():
        found = engine.outputs.get((name, 0), [])
        assert found == wanted[index][: len(found)]
        assert engine.ends[name, 0].reason == "abort" or len(found) == 20
    assert engine.scheduler.stats.preemptions > 0
    engine.close()


def test_requests_that_wait_for_the_encoder_say_so(sighted: Sighted) -> None:
    engine = sighted.engine(encoder_cache_tokens=64, max_num_batched_tokens=40)
    for seed in (1, 2):  # each image is computed in two chunks: the first is held while the second waits
        engine.add(sighted.prepare([IMAGE, 5], [picture(64, 64, seed)]), 2, name=str(seed))
    reasons = {}
    while engine.core.has_work:
        engine.step()
        reasons |= {each.reason: each for each in explain_waiting(engine.scheduler)}
    assert reasons["encoder"].name == "2"
    assert reasons["encoder"].detail.startswith("64 of 64 tokens")
    engine.close()


def test_a_request_goes_on_after_its_engine_died(sighted: Sighted, engine: Engine) -> None:
    prepared = conversation(sighted, PICTURES[:2], 1)
    wanted = theirs(sighted, PICTURES[:2], prepared, 8)
    name = engine.add(prepared, 8, drawn=[wanted[:3]])
    engine.run()
    assert engine.outputs[name, 0] == wanted[3:]


def test_requests_and_plans_with_images_travel(sighted: Sighted, engine: Engine) -> None:
    """Through the bytes that other processes get."""
    prepared = conversation(sighted, PICTURES[:2], 2)
    engine.add(prepared, 2, name="x")
    (request,) = engine.scheduler.requests.sequences("x")
    sent = ipc.decode_down(ipc.encode(ipc.Add(request.source))[4:]).request  # type: ignore[union-attr]
    plan = engine.scheduler.schedule()
    assert plan is not None
    other = decode_plan(encode(plan))
    encoded = [[each.item for each in both.encode] for both in (plan, other)]
    for one, two in ((request.source.media, sent.media), encoded):
        for item, copy in zip(one, two, strict=True):
            assert (item.digest, item.kind, item.rows) == (copy.digest, copy.kind, copy.rows)
            assert item.arrays.keys() == copy.arrays.keys()
            for key in item.arrays:
                np.testing.assert_array_equal(item.arrays[key], copy.arrays[key])
                assert item.arrays[key].dtype == copy.arrays[key].dtype
    assert (other.splices, other.visible, sent.spans) == (plan.splices, plan.visible, request.source.spans)
    np.testing.assert_array_equal(other.positions, plan.positions)
    np.testing.assert_array_equal(sent.positions, prepared.positions)
    engine.core._launch(plan)
