"""What vLLM's own tests of images ask for, re-enacted with a tiny model: tests/entrypoints/multimodal:
online/test_vision.py, openai/responses/test_image.py, offline/test_chat.py, offline/test_mm_cache_stats.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.media.files import data_url, encoded, noise
from tests.media.test_server import TOKENS, asked, image_part, text_part
from tests.server.conftest import MODEL, Live

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_completion_tokens": 8}
VISIBLE: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": list(range(4, 100))}
WHAT = text_part("What's in this image?")


def test_logprobs_usage_and_a_second_turn(seeing: Live) -> None:
    messages: list[Any] = asked(image_part(noise(40, 24, seed=11)), WHAT)
    text = seeing.post("/tokenize", {"messages": asked(WHAT)}).json()["count"]
    with seeing.openai() as client:
        made = client.chat.completions.create(
            messages=messages, logprobs=True, top_logprobs=5, extra_body=VISIBLE, **GREEDY
        )
        (choice,) = made.choices
        assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [5] * 8
        assert made.usage is not None and made.usage.prompt_tokens == text + TOKENS + 2
        assert made.usage.total_tokens == made.usage.prompt_tokens + 8
        messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "as json"}]
        again = client.chat.completions.create(messages=messages, extra_body=VISIBLE, **GREEDY)
        assert again.choices[0].message.content


def test_beams(seeing: Live) -> None:
    extra = {"use_beam_search": True, "ignore_eos": True}
    with seeing.openai() as client:
        fields: dict[str, Any] = {"messages": asked(image_part(noise(40, 24, seed=12)), WHAT), "n": 2}
        made = client.chat.completions.create(extra_body=extra, **fields, **GREEDY)
        first, second = (choice.message.content for choice in made.choices)
        assert first and second and first != second


def test_streams(seeing: Live) -> None:
    fields: dict[str, Any] = {"messages": asked(image_part(noise(40, 24, seed=13)), WHAT), "extra_body": VISIBLE}
    with seeing.openai() as client:
        whole = client.chat.completions.create(**fields, **GREEDY).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **fields, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason is not None]
    assert ends == [whole.finish_reason] == [chunks[-1].choices[0].finish_reason]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_too_many_images(seeing: Live, api: str) -> None:
    def ask(count: int) -> Any:
        images = [data_url(encoded(noise(16, 16, seed))) for seed in range(count)]
        if api == "chat":
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            return client.chat.completions.create(messages=asked(*parts, WHAT), **GREEDY)  # type: ignore[arg-type]
        items = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in images]
        content = [*items, {"type": "input_text", "text": "What's in this image?"}]
        return client.responses.create(
            model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=8,  # type: ignore[misc,list-item]
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    with seeing.openai() as client:
        assert ask(4).id
        with pytest.raises(openai.BadRequestError):
            ask(5)
        assert ask(1).id
        assert client.completions.create(model=MODEL, prompt=[5, 5, 5], max_tokens=2).choices[0].text is not None


def test_names_of_images(seeing: Live) -> None:
    """A `uuid` beside an image and unknown keys have no effect; a `uuid` alone names no image."""
    part = image_part(noise(40, 24, seed=14))
    part["image_url"]["incorrect_uuid_key"] = "a"
    with seeing.openai() as client:
        for more in ({"uuid": "a"}, {"also_incorrect_uuid_key": "a"}):
            made = client.chat.completions.create(messages=asked({**part, **more}, WHAT), **GREEDY)  # type: ignore[arg-type]
            assert made.choices
        for url in ({}, None):
            empty = {"type": "image_url", "image_url": url, "uuid": "not seen"}
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(messages=asked(empty, WHAT), **GREEDY)  # type: ignore[arg-type]


def test_the_cache_of_images_is_counted(make_llm: Callable[..., LLM], seeing_model: Path) -> None:
    llm = make_llm(seeing_model, limit_mm_per_prompt={"image": 2}, disable_log_stats=False)
    first, second = (image_part(noise(40, 24, seed)) for seed in (15, 16))
    params = SamplingParams(max_tokens=2)

    def seen() -> tuple[float, float]:
        values = {metric.name: metric.value for metric in llm.get_metrics()}
        return values["vllm:mm_cache_queries"], values["vllm:mm_cache_hits"]

    assert len(llm.chat(asked(first, second, WHAT), params, use_tqdm=False)) == 1
    assert seen() == (2, 0)
    llm.chat(asked(first, text_part("another question")), params, use_tqdm=False)
    assert seen() == (3, 1)
