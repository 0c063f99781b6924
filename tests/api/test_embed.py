"""`LLM.embed` and `LLM.encode`: what comes out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quire
from quire import LLM, PoolingParams, SamplingParams
from quire.errors import ConfigError, ValidationError


def test_a_vector_of_length_one_for_each_prompt_in_order(llm: LLM) -> None:
    prompts = ["the world", [5, 6, 7], {"prompt": "a word"}, {"prompt_token_ids": [9]}]
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs[1::2]] == [[5, 6, 7], [9]]
    for output in outputs:
        assert type(output) is quire.EmbeddingRequestOutput and output.finished and output.finish_reason == "stop"
        assert output.outputs.hidden_size == len(output.outputs.embedding) == 64
        assert isinstance(output.outputs.embedding[0], float)
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1, abs=1e-6)
    (alone,) = llm.embed("the world", use_tqdm=False)
    np.testing.assert_allclose(alone.outputs.embedding, outputs[0].outputs.embedding, atol=1e-5)


def test_encode_gives_arrays(llm: LLM) -> None:
    params = [PoolingParams(), PoolingParams(use_activation=False)]
    unit, raw = llm.encode([[5, 6, 7]] * 2, params, pooling_task="embed", use_tqdm=False)
    assert unit.outputs.data.dtype == np.float32 and unit.outputs.data.shape == (64,)
    np.testing.assert_allclose(raw.outputs.data / np.linalg.norm(raw.outputs.data), unit.outputs.data, atol=1e-6)


def test_the_engine_sets_the_default_pooling(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    prompt = [5, 6, 7, 8]
    mean, last = (
        llm.embed(prompt, pooling_params=PoolingParams(pooling=pooling), use_tqdm=False)[0].outputs.embedding
        for pooling in ("mean", "last")
    )
    assert not np.allclose(mean, last, atol=1e-2)
    np.testing.assert_allclose(llm.embed(prompt, use_tqdm=False)[0].outputs.embedding, last, atol=1e-5)
    other = make_llm(pooling="mean", runner="pooling", convert="embed")
    np.testing.assert_allclose(other.embed(prompt, use_tqdm=False)[0].outputs.embedding, mean, atol=1e-5)
    with pytest.raises(ConfigError, match="pooling must be one of last, mean"):
        quire.EngineConfig(pooling="max")


def test_dimensions_need_a_matryoshka_model(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    params = PoolingParams(dimensions=8)
    with pytest.raises(ValidationError, match="Matryoshka") as error:
        llm.embed([5, 6], pooling_params=params, use_tqdm=False)
    assert error.value.parameter == "dimensions"
    able = make_llm(hf_overrides={"is_matryoshka": True})
    whole, cut = able.embed([[5, 6]] * 2, pooling_params=[PoolingParams(use_activation=False), params], use_tqdm=False)
    head = np.array(whole.outputs.embedding[:8])
    np.testing.assert_allclose(cut.outputs.embedding, head / np.linalg.norm(head), atol=1e-5)
    with pytest.raises(ValidationError, match="the model's vectors have 64"):
        able.embed([5, 6], pooling_params=PoolingParams(dimensions=65), use_tqdm=False)


def test_truncation_keeps_the_end_token(llm: LLM) -> None:
    def kept(prompt: list[int], keep: int) -> list[int]:
        params = PoolingParams(truncate_prompt_tokens=keep)
        return llm.embed(prompt, pooling_params=params, use_tqdm=False)[0].prompt_token_ids

    assert kept([5, 6, 7, 8, 9], 3) == [5, 6, 7]
    assert kept([5, 6, 7, 8, 1], 3) == [5, 6, 1]
    assert kept([5, 6], 3) == [5, 6]
    assert len(kept([5] * 300, -1)) == 256


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed([[5], []], use_tqdm=False), "the prompt is empty"),
        (lambda llm: llm.embed([5, 128], use_tqdm=False), "outside the vocabulary"),
        (lambda llm: llm.embed([5] * 257, use_tqdm=False), "maximum context length is 256"),
        (lambda llm: llm.encode([5], pooling_task="classify"), "has no head for classes"),
        (lambda llm: llm.encode([5], pooling_task="token_embed"), "task must be 'embed' or 'classify'"),
        (lambda llm: llm.embed([[5], [6]], pooling_params=[PoolingParams()]), "2 prompts, but 1 pooling_params"),
        (lambda llm: llm.embed([5], pooling_params=SamplingParams()), "must be PoolingParams"),
        (lambda llm: llm.generate([5], PoolingParams()), "must be SamplingParams"),
        (lambda llm: next(llm.stream([5], PoolingParams())), "must be SamplingParams"),
    ],
)
def test_refusals_leave_no_request_behind(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    """The `llm` fixture checks that nothing is left."""
    with pytest.raises(ValidationError, match=message):
        call(llm)


def test_params_that_were_changed_are_checked_again(llm: LLM) -> None:
    params = PoolingParams()
    params.pooling = "median"
    with pytest.raises(ValidationError, match="pooling must be one of last, mean"):
        llm.embed([5], pooling_params=params, use_tqdm=False)


def test_requests_by_hand(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("vector", [5, 6, 7], PoolingParams())
    engine.add_request("text", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    seen = {}
    while engine.has_unfinished_requests():
        seen |= {output.request_id: output for output in engine.step()}
    assert type(seen["vector"]) is quire.PoolingRequestOutput and type(seen["text"]) is quire.RequestOutput
    assert len(seen["text"].outputs[0].token_ids) == 3
