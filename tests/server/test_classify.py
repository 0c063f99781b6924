"""/classify, and /score and /rerank with a classifier of pairs, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.classifiers import numbers, write_classifier
from tests.conftest import CHAT_TEMPLATE, tiny_tokenizer
from tests.server.conftest import Host, Live

TEXTS = ["the world", "a word in the world", "x"]
USER = [{"role": "user", "content": "abc"}]


def ids(*texts: str) -> list[list[int]]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder: Path = tmp_path_factory.mktemp("classes")
    reference = write_classifier(folder)
    host = Host(folder)
    live, stop = host.start()
    yield live, reference
    live.assert_idle()
    stop()
    host.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder: Path = tmp_path_factory.mktemp("pairs")
    reference = write_classifier(folder, "Llama", ["relevant"])
    host = Host(folder)
    live, stop = host.start()
    yield live, reference
    live.assert_idle()
    stop()
    host.close()


def test_probabilities_and_the_likeliest_label(classes: tuple[Live, Any]) -> None:
    live, reference = classes
    wanted = numbers(reference, *ids(*TEXTS)).softmax(-1)
    for given in (TEXTS, ids(*TEXTS)):
        answer = live.post("/classify", {"model": "tiny", "input": given}).json()
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        np.testing.assert_allclose([each["probs"] for each in answer["data"]], wanted, atol=1e-5)
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
        assert [each["num_classes"] for each in answer["data"]] == [3, 3, 3]
        labels = ("bad", "so so", "good")
        assert [each["label"] for each in answer["data"]] == [labels[int(row.argmax())] for row in wanted]
        read = sum(map(len, ids(*TEXTS)))
        assert answer["usage"] == {
            "prompt_tokens": read, "total_tokens": read, "completion_tokens": 0, "prompt_tokens_details": None,
        }  # fmt: skip
    raw = live.post("/classify", {"input": TEXTS, "use_activation": False}).json()
    np.testing.assert_allclose([each["probs"] for each in raw["data"]], numbers(reference, *ids(*TEXTS)), atol=1e-4)


def test_a_conversation_is_classified(classes: tuple[Live, Any]) -> None:
    live, reference = classes
    prompt = tiny_tokenizer().encode("<|user|>abc</s>", add_special_tokens=False)
    wanted = numbers(reference, prompt).softmax(-1)[0]
    answer = live.post("/classify", {"messages": USER}).json()
    np.testing.assert_allclose(answer["data"][0]["probs"], wanted, atol=1e-5)
    longer = live.post("/classify", {"messages": USER, "add_generation_prompt": True}).json()
    assert longer["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] + 1
    both = {"messages": USER, "add_generation_prompt": True, "continue_final_message": True}
    assert live.post("/classify", both).status_code == 400


UNSERVED = ("/score", "/rerank", "/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/v1/responses")


def test_other_routes_of_a_classifier(classes: tuple[Live, Any]) -> None:
    live, reference = classes
    wanted = numbers(reference, *ids(TEXTS[0])).softmax(-1)[0]
    for task in ({}, {"task": "classify"}):
        pooled = live.post("/pooling", {"input": TEXTS[0], **task}).json()
        np.testing.assert_allclose(pooled["data"][0]["data"], wanted, atol=1e-5)
    for body in ({"input": TEXTS[0]}, {"messages": USER}):
        keys = ("object", "model", "data", "usage")
        expected, invoked = live.post("/classify", body).json(), live.post("/invocations", body).json()
        assert {key: invoked[key] for key in keys} == {key: expected[key] for key in keys}
    refused: list[tuple[str, Any, int]] = [
        ("/pooling", {"input": "a", "task": "embed"}, 400),
        ("/pooling", {"input": "a", "task": "token_classify"}, 400),
        ("/classify", {"input": ""}, 400),
        ("/classify", {"input": []}, 400),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 257}, 400),
        ("/classify", {"input": "a", "model": "other"}, 404),
        ("/score", {"queries": "a", "documents": "b"}, 404),
        ("/rerank", {"query": "a", "documents": ["b"]}, 404),
        ("/v1/embeddings", {"input": "a"}, 404),
        ("/v1/completions", {"prompt": "a"}, 404),
        ("/v1/chat/completions", {"messages": USER}, 404),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}, 404),
        ("/v1/responses", {"input": "a"}, 404),
    ]
    for path, body, status in refused:
        answer = live.post(path, body)
        assert (path, answer.status_code) == (path, status)
        assert answer.json()["error"]["message"]
        assert answer.json().get("detail") == ("Not Found" if status == 404 and path in UNSERVED else None)
    cut = live.post("/classify", {"input": "hello " * 600, "truncate_prompt_tokens": 5}).json()
    assert cut["usage"]["prompt_tokens"] == cut["usage"]["total_tokens"] == 5


def test_scores_and_ranks_of_a_classifier_of_pairs(pairs: tuple[Live, Any]) -> None:
    live, reference = pairs
    tokenizer = tiny_tokenizer()
    query, *documents = [*TEXTS, "one"]
    wanted = numbers(reference, *(tokenizer(query, text)["input_ids"] for text in documents))[:, 0]
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        answer = live.post("/score", {names[0]: query, names[1]: documents}).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted.sigmoid(), atol=1e-5)
    ranked = live.post("/rerank", {"query": query, "documents": documents, "use_activation": False}).json()
    order = sorted(range(3), key=lambda index: -wanted[index].item())
    assert [each["index"] for each in ranked["results"]] == order
    np.testing.assert_allclose([each["relevance_score"] for each in ranked["results"]], wanted[order], atol=1e-4)
    assert ranked["results"][0]["document"] == {"text": documents[order[0]], "multi_modal": None}
    assert set(ranked["usage"]) == {"prompt_tokens", "total_tokens"}
    one = live.post("/rerank", {"query": query, "documents": documents[0]}).json()
    assert [each["index"] for each in one["results"]] == [0]
    pooled = live.post("/pooling", {"input": "a", "task": "classify"}).json()
    assert len(pooled["data"][0]["data"]) == 1


def test_documents_are_shortened(pairs: tuple[Live, Any]) -> None:
    live, reference = pairs
    long = "a word in the world " * 6
    body = {"query": "x", "documents": [long], "max_tokens_per_doc": 5}
    (cut,) = live.post("/rerank", body).json()["results"]
    tokenizer = tiny_tokenizer()
    short = tokenizer.decode(tokenizer.encode(long)[:5])
    wanted = numbers(reference, tokenizer("x", short)["input_ids"]).sigmoid()[0, 0]
    assert cut["relevance_score"] == pytest.approx(wanted.item(), abs=1e-5)
    whole = live.post("/rerank", {"query": "x", "documents": [long]}).json()
    assert whole["usage"]["prompt_tokens"] > live.post("/rerank", body).json()["usage"]["prompt_tokens"]
    for fields in ({"max_tokens_per_doc": -1}, {"max_tokens_per_query": 256}, {"truncate_prompt_tokens": 257}):
        assert live.post("/rerank", {"query": "x", "documents": ["a"], **fields}).status_code == 400
    assert live.post("/score", {"text_1": "x" * 300, "text_2": "a"}).status_code == 400


def test_a_template_for_pairs(tmp_path: Path) -> None:
    reference = write_classifier(tmp_path, "Llama", ["relevant"])
    template = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
    assert "user" in CHAT_TEMPLATE  # the tokenizer's own, which is not for pairs
    host = Host(tmp_path, chat_template=template)
    live, stop = host.start()
    try:
        wanted = numbers(reference, *ids("[query: x][document: a]")).sigmoid()[0, 0]
        answer = live.post("/score", {"text_1": "x", "text_2": "a"}).json()
        assert answer["data"][0]["score"] == pytest.approx(wanted.item(), abs=1e-5)
    finally:
        stop()
        host.close()
