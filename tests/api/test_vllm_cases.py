"""What vLLM's own tests of `LLM` ask for, re-enacted with a tiny model: tests/entrypoints/llm: test_generate.py,
test_chat.py, test_prompt_validation.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from tests.conftest import TINY_VOCAB

PROMPTS = ["abc", "the world", "a", "said the"]


def params(*temperatures: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, top_p=0.95, max_tokens=2) for temperature in temperatures]


def test_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    for given in (params(0.01, 0.3, 0.7, 0.99), params(0.3)[0], None):
        assert len(llm.generate(PROMPTS, sampling_params=given, use_tqdm=False)) == 4
    with pytest.raises(ValidationError):
        llm.generate(PROMPTS, sampling_params=params(0.1, 0.2, 0.3), use_tqdm=False)


def test_priorities(llm: LLM) -> None:
    (one,) = params(0.3)
    for given in (None, [0, 0, 0, 0], 1):
        assert len(llm.generate(PROMPTS, one, priority=given, use_tqdm=False)) == 4
    for wrong in ([0, 0, 0], []):
        with pytest.raises(ValidationError):
            llm.generate(PROMPTS, one, priority=wrong, use_tqdm=False)
    for given in ([0], 1):
        assert len(llm.generate(PROMPTS[0], one, priority=given, use_tqdm=False)) == 1


def test_the_models_length_and_metrics(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=20, disable_log_stats=False)
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False):
        assert output.prompt_token_ids is not None
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 20
        assert output.metrics is not None


def test_prompts_that_are_wrong(llm: LLM) -> None:
    for wrong in ([""], {"prompt_token_ids": [TINY_VOCAB]}):
        with pytest.raises(ValidationError):
            llm.generate(wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_chats(llm: LLM) -> None:
    (one,) = params(0.3)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[:2]]
    assert len(llm.chat(chats[0], one, use_tqdm=False)) == 1
    made: Any = llm.chat(chats, one, use_tqdm=False)
    assert len(made) == 2
    bos = llm.get_tokenizer().bos_token_id
    assert made[0].prompt_token_ids.count(bos) <= 1
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if shout %}!{% endif %}"
    quiet, loud = (
        llm.chat(chats[0], one, chat_template=template, chat_template_kwargs={"shout": shout}, use_tqdm=False)[0]
        for shout in (False, True)
    )
    assert (quiet.prompt, loud.prompt) == ("abc", "abc!")
