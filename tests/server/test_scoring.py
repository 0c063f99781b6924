"""/pooling, /score, /rerank, /classify, /invocations, /tokenizer_info and several chats in one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.server.protocol import embeddings
from quire.server.protocol import scoring as protocol
from quire.server.routes import scoring as routes
from tests.server.conftest import MODEL, Live

USER: list[Any] = [{"role": "user", "content": "abc"}]
TEXTS = ["hello the world", "hello the word", "x y z", "one two three"]


def vectors(live: Live, *texts: str) -> np.ndarray:
    data = live.post("/v1/embeddings", {"input": list(texts)}).json()["data"]
    return np.array([each["embedding"] for each in data])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_score_is_the_cosine_of_the_embeddings(live: Live, path: str) -> None:
    made = vectors(live, *TEXTS)
    cosines = made @ made.T
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        answer = live.post(path, {"model": MODEL, names[0]: TEXTS[0], names[1]: TEXTS[1:]}).json()
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
        assert [each["score"] for each in answer["data"]] == pytest.approx(list(cosines[0, 1:]), abs=1e-5)
        assert {each["object"] for each in answer["data"]} == {"score"} and answer["object"] == "list"
    both = live.post(path, {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}).json()
    assert [each["score"] for each in both["data"]] == pytest.approx([cosines[0, 2], cosines[1, 3]], abs=1e-5)
    assert both["usage"]["prompt_tokens"] == both["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_score(live: Live, path: str) -> None:
    query, *documents = TEXTS
    made = vectors(live, *TEXTS)
    expected = sorted(range(3), key=lambda index: -float(made[0] @ made[index + 1]))
    answer = live.post(path, {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]]}).json()
    assert [each["index"] for each in answer["results"]] == expected
    assert [each["document"]["text"] for each in answer["results"]] == [documents[index] for index in expected]
    first = live.post(path, {"query": query, "documents": documents, "top_n": 1, "return_documents": False}).json()
    assert [set(each) for each in first["results"]] == [{"index", "relevance_score"}]
    assert first["results"][0]["relevance_score"] == answer["results"][0]["relevance_score"]


def test_pooling_returns_the_embeddings(live: Live) -> None:
    answer = live.post("/pooling", {"input": TEXTS, "task": "embed"}).json()
    assert np.allclose([each["data"] for each in answer["data"]], vectors(live, *TEXTS))
    assert {each["object"] for each in answer["data"]} == {"pooling"}


def test_each_side_may_have_as_many_texts_as_a_request_for_vectors(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 2,048 documents and their query were one text too many."""

    def scores(path: str, body: dict[str, Any]) -> list[float]:
        answer = live.post(path, body).json()
        if path == "/score":
            return [each["score"] for each in answer["data"]]
        return [each["relevance_score"] for each in sorted(answer["results"], key=lambda each: each["index"])]

    fitting: list[tuple[str, dict[str, Any]]] = [
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ]
    wanted = [scores(*each) for each in fitting]
    for module in (embeddings, protocol, routes):
        monkeypatch.setattr(module, "MAX_INPUTS", 2)
    for each, known in zip(fitting, wanted, strict=True):
        assert scores(*each) == pytest.approx(known, abs=1e-5)
    for path, body, field in (
        ("/rerank", {"query": "a", "documents": ["b", "c", "d"]}, "documents"),
        ("/score", {"text_1": "a", "text_2": ["b", "c", "d"]}, "text_2"),
        ("/pooling", {"input": ["b", "c", "d"]}, "input"),
    ):
        answer = live.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/classify", {"input": "a"}, 404, "does not classify"),
        ("/score", {"text_1": "a"}, 400, "text_1 and text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "give one, or as many"),
        ("/score", {"text_1": "a", "text_2": []}, 400, "text_2 is empty"),
        ("/score", {"text_1": "a", "text_2": [{"image": 1}]}, 400, "text only"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 1, "model": "other"}, 404, "not served"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents is empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "at least 0"),
        ("/rerank", {"query": "a", "documents": [f"b{i}" for i in range(2100)]}, 400, "at most 2048"),
        ("/pooling", {"input": "a", "task": "classify"}, 400, "task"),
        ("/invocations", {"colour": 1}, 400, "none of messages"),
        ("/invocations", {"messages": "x"}, 400, "messages"),
        ("/v1/embeddings", {"input": "a", "messages": USER}, 400, "either"),
    ],
)
def test_refusals(live: Live, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = live.post(path, body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_embeddings_of_messages(live: Live) -> None:
    made = live.post("/v1/embeddings", {"messages": USER}).json()
    text = live.post("/v1/embeddings", {"input": "<|user|>abc</s>", "add_special_tokens": False}).json()
    assert made["usage"] == text["usage"] | {"prompt_tokens_details": made["usage"]["prompt_tokens_details"]}
    assert made["data"][0]["embedding"] == pytest.approx(text["data"][0]["embedding"], abs=1e-5)


def test_either_end_of_an_input_is_truncated(live: Live) -> None:
    ends = {"left": "efgh", "right": "abcd", None: "abcd"}
    for side, text in ends.items():
        fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "add_special_tokens": False}
        made = live.post("/v1/embeddings", {"input": "abcdefgh", **fields}).json()["data"][0]["embedding"]
        short = live.post("/v1/embeddings", {"input": text, "add_special_tokens": False}).json()["data"][0]["embedding"]
        assert made == pytest.approx(short, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "temperature": 0}),
        ("/v1/embeddings", {"input": "abc"}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_an_invocation_is_what_its_body_is_for(live: Live, path: str, body: dict[str, Any]) -> None:
    changes = ("id", "created", "usage")
    expected, answer = live.post(path, body).json(), live.post("/invocations", body).json()
    assert {k: v for k, v in answer.items() if k not in changes} == {
        k: v for k, v in expected.items() if k not in changes
    }


def test_an_invocation_can_be_streamed(live: Live) -> None:
    answer = live.post("/invocations", {"messages": USER, "max_tokens": 2, "stream": True})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


def test_tokenizer_info(serving: Callable[..., Live]) -> None:
    live = serving()
    info = live.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["tokenizer_class"]) == ("</s>", type(live.server.tokenizer).__name__)
    assert "raise_exception" in info["chat_template"] and not [name for name in info if name.endswith("_file")]
    assert serving(enable_tokenizer_info_endpoint=False).client.get("/tokenizer_info").status_code == 404


class TestSeveralChats:
    PATH = "/v1/chat/completions/batch"

    def test_each_is_answered_as_if_alone(self, live: Live) -> None:
        chats = [[{"role": "user", "content": text}] for text in TEXTS]
        fields = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
        answer = live.post(self.PATH, {"messages": chats, **fields}).json()
        alone = [live.post("/v1/chat/completions", {"messages": each, **fields}).json() for each in chats]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["message"] for choice in answer["choices"]] == [each["choices"][0]["message"] for each in alone]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == sum(each["usage"][name] for each in alone)

    def test_a_form_holds_for_all(self, live: Live) -> None:
        answer = live.post(
            self.PATH, {"messages": [USER, USER], "guided_choice": ["xyx", "yyx"], "max_tokens": 9}
        ).json()
        assert {choice["message"]["content"] for choice in answer["choices"]} <= {"xyx", "yyx"}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"stream": True}, "stream"),
            ({"n": 2}, "n"),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"tools": [{"function": {"name": "f"}}]}, "tools"),
            ({"session_id": "s"}, "session_id"),
            ({"prompt_logprobs": 0}, "prompt_logprobs"),
            ({"messages": []}, "messages"),
            ({"messages": [USER, []]}, "messages"),
            ({"messages": USER}, "messages[0]"),
        ],
    )
    def test_what_it_refuses(self, live: Live, fields: dict[str, Any], param: str) -> None:
        answer = live.post(self.PATH, {"messages": [USER], **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
