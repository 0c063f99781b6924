"""`LLM.classify`, and `LLM.score` with a classifier of pairs, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire import LLM, PoolingParams, SamplingParams
from quire.errors import ConfigError, ValidationError
from tests.classifiers import numbers, write_classifier
from tests.conftest import tiny_tokenizer, write_tiny_model

PROMPTS = ["the world", "a word in the world", "x" * 90]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"


def ids(*texts: str) -> list[list[int]]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.encode(text) for text in texts]


def test_probabilities_of_each_prompt(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    reference = write_classifier(tmp_path)
    llm = make_llm(tmp_path, max_num_batched_tokens=32, runner="pooling", convert="classify")
    wanted = numbers(reference, *ids(*PROMPTS))
    outputs = llm.classify(PROMPTS, use_tqdm=False)
    assert all(type(output) is quire.ClassificationRequestOutput and output.finished for output in outputs)
    assert [output.outputs.num_classes for output in outputs] == [3, 3, 3]
    np.testing.assert_allclose([o.outputs.probs for o in outputs], wanted.softmax(-1), atol=1e-5)
    again = llm.classify(ids(*PROMPTS), use_tqdm=False)  # from the prefix cache
    assert sum(output.num_cached_tokens or 0 for output in again) > 0
    np.testing.assert_allclose([o.outputs.probs for o in again], wanted.softmax(-1), atol=1e-5)
    raw = llm.encode(PROMPTS, PoolingParams(use_activation=False), pooling_task="classify", use_tqdm=False)
    np.testing.assert_allclose([o.outputs.data for o in raw], wanted, atol=1e-4)


def test_what_a_classifier_does_not_do(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    write_classifier(tmp_path)
    llm = make_llm(tmp_path)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.generate("a", SamplingParams(), use_tqdm=False), "does not generate"),
        (lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False), "does not generate"),
        (lambda: llm.embed("a", use_tqdm=False), "does not embed"),
        (lambda: llm.encode("a", pooling_task="token_classify", use_tqdm=False), "nothing else is implemented"),
        (lambda: llm.score("a", "b", use_tqdm=False), "has 3 classes"),
        (lambda: llm.classify("a", pooling_params=PoolingParams(dimensions=2), use_tqdm=False), "dimensions"),
    ]
    for call, words in calls:
        with pytest.raises(ValidationError, match=words):
            call()


def test_a_model_without_classes_does_not_classify(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="has no head for classes"):
        llm.classify("a", use_tqdm=False)


def test_scores_of_a_classifier_of_pairs(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    reference = write_classifier(tmp_path, "Llama", ["relevant"])
    llm = make_llm(tmp_path)
    tokenizer = tiny_tokenizer()
    pairs = [("the world", "a word"), ("the world", "x")]
    wanted = numbers(reference, *(tokenizer(one, other)["input_ids"] for one, other in pairs))[:, 0]
    outputs = llm.score("the world", ["a word", "x"], use_tqdm=False)
    assert all(type(output) is quire.ScoringRequestOutput for output in outputs)
    np.testing.assert_allclose([o.outputs.score for o in outputs], wanted.sigmoid(), atol=1e-5)
    raw = llm.score(
        ["the world"] * 2, ["a word", "x"], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
    )
    np.testing.assert_allclose([o.outputs.score for o in raw], wanted, atol=1e-4)
    rendered = numbers(reference, *ids("[query: the world][document: a word]"))[0, 0]
    (templated,) = llm.score("the world", "a word", chat_template=TEMPLATE, use_tqdm=False)
    assert templated.outputs.score == pytest.approx(rendered.sigmoid().item(), abs=1e-5)
    long = "a word in the world " * 4
    (cut,) = llm.score("x", long, pooling_params=PoolingParams(extra_kwargs={"max_tokens_per_doc": 3}), use_tqdm=False)
    short = tokenizer.decode(tokenizer.encode(long)[:3])
    assert cut.prompt_token_ids == tokenizer("x", short)["input_ids"]
    with pytest.raises(ValidationError, match="extra_kwargs takes"):
        PoolingParams(extra_kwargs={"colour": 1})
    with pytest.raises(ValidationError, match="reads two texts"):
        llm.score([[5, 6]], "a", use_tqdm=False)


def test_a_language_model_as_a_reranker(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Qwen3's rerankers: the probability that the next token is the one for yes, and not the one for no."""
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    llm = make_llm(
        tmp_path,
        hf_overrides={
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": ["n", "y"],
            "is_original_qwen3_reranker": True,
        },
    )
    no, yes = tiny_tokenizer().convert_tokens_to_ids(["n", "y"])
    with torch.no_grad():
        logits = model(torch.tensor(ids("the world" + "a word"))).logits[0, -1, [no, yes]]
    (output,) = llm.score("the world", "a word", use_tqdm=False)
    assert output.prompt_token_ids == ids("the worlda word")[0]
    assert output.outputs.score == pytest.approx(logits.softmax(0)[1].item(), abs=1e-5)


def test_a_checkpoint_without_the_head_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(Exception, match=r"score\.weight"):
        make_llm(tmp_path, task="classify")
    with pytest.raises(ConfigError, match="task='reward' is not supported"):
        make_llm(tmp_path, task="reward")
