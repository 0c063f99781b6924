"""/v1/embeddings over HTTP: clients get the engine's vectors, and errors name the field."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from quire import LLM, PoolingParams
from quire.cli.main import main
from tests.conftest import tiny_tokenizer
from tests.server.conftest import Live
from tests.server.scrape import Scrape

TEXTS = ["the world", "a word in the world", "x"]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with live.openai() as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, np.ndarray]:
    """Vectors of the same model, computed in this process."""
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        return {
            pooling: np.stack(
                [o.outputs.data for o in llm.encode(TEXTS, PoolingParams(pooling=pooling), use_tqdm=False)]
            )
            for pooling in ("last", "mean")
        }


def post(live: Live, **body: Any) -> httpx.Response:
    return live.post("/v1/embeddings", body)


def test_the_official_client_unmodified(client: openai.OpenAI, expected: dict[str, np.ndarray]) -> None:
    """The client requests base64 by itself, and returns numbers."""
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert answer.object == "list" and answer.model == "tiny"
    assert [item.index for item in answer.data] == [0, 1, 2]
    np.testing.assert_allclose([item.embedding for item in answer.data], expected["last"], atol=1e-5)
    tokens = sum(len(tiny_tokenizer().encode(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_numbers_and_base64_are_the_same_vector(live: Live, expected: dict[str, np.ndarray]) -> None:
    numbers = post(live, input=TEXTS, pooling="mean").json()
    coded = post(live, input=TEXTS, pooling="mean", encoding_format="base64").json()
    for index, (item, other) in enumerate(zip(numbers["data"], coded["data"], strict=True)):
        assert item["object"] == "embedding" and item["index"] == index
        vector = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        np.testing.assert_array_equal(np.array(item["embedding"], np.float32), vector)
        np.testing.assert_allclose(vector, expected["mean"][index], atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("many", [False, True])
def test_text_and_token_ids_are_the_same_input(live: Live, many: bool) -> None:
    ids = tiny_tokenizer().encode(TEXTS[1])
    text, tokens = ([TEXTS[1]], [ids]) if many else (TEXTS[1], ids)
    first, second = post(live, input=text).json(), post(live, input=tokens, model="tiny").json()
    np.testing.assert_allclose(first["data"][0]["embedding"], second["data"][0]["embedding"], atol=1e-5)


def test_dimensions_of_a_model_not_trained_for_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Matryoshka") as error:
        client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16)
    assert error.value.param == "dimensions"


def test_vectors_without_normalization(live: Live) -> None:
    raw = np.array(post(live, input="the world", use_activation=False).json()["data"][0]["embedding"])
    unit = np.array(post(live, input="the world").json()["data"][0]["embedding"])
    assert np.linalg.norm(raw) > 1.5
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-5)


def test_a_too_long_input_is_refused_unless_truncated(live: Live) -> None:
    long = list(range(4, 104)) * 3
    refused = post(live, input=long)
    assert refused.status_code == 400
    assert "maximum context length is 256" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "input"
    cut = post(live, input=long, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == 256
    whole = post(live, input=long[:20]).json()["data"][0]["embedding"]
    np.testing.assert_allclose(
        post(live, input=long, truncate_prompt_tokens=20).json()["data"][0]["embedding"], whole, atol=1e-5
    )


def test_a_prefix_is_cached_but_not_under_another_salt(live: Live) -> None:
    tokens = [7 + i % 90 for i in range(50)]

    def cached(**fields: Any) -> int:
        usage = post(live, input=tokens, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") == 48
    assert cached(cache_salt="two") == 0
    assert cached(cache_salt="one", pooling="mean") == 0


@pytest.mark.parametrize(
    ("body", "status", "message", "param"),
    [
        ({}, 400, "input is missing", "input"),
        ({"input": []}, 400, "empty list", "input"),
        ({"input": ""}, 400, "the prompt is empty", "input"),
        ({"input": [[]]}, 400, "the prompt is empty", "input"),
        ({"input": [1, "a"]}, 400, "input must be", "input"),
        ({"input": [True]}, 400, "", None),
        ({"input": {"a": 1}}, 400, "", "input"),
        ({"input": [5, 10**30]}, 400, "outside the vocabulary", "input"),
        ({"input": [-1]}, 400, "outside the vocabulary", "input"),
        ({"input": ["a"] * 2049}, 400, "2049", "input"),
        ({"input": "a", "model": "other"}, 404, "not served", "model"),
        ({"input": "a", "encoding_format": "hex"}, 400, "", "encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "at least 1", "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "at least 1", "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, 400, "at least 1", "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, 400, "use_activation", "normalize"),
        ({"input": "a", "pooling": "max"}, 400, "", "pooling"),
        ({"input": "a", "timeout": 0}, 400, "above 0", "timeout"),
        ({"input": "a", "priority": 2**40}, 400, "32 bits", "priority"),
    ],
)
def test_errors_name_the_field(live: Live, body: dict[str, Any], status: int, message: str, param: str | None) -> None:
    answer = post(live, **body)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status
    assert message in error["message"]
    assert param is None or error["param"] == param


def test_a_disconnect_and_a_timeout_leave_nothing_behind(live: Live) -> None:
    """The `live` fixture checks that all blocks are freed."""
    inputs = [[4 + (i + j) % 90 for j in range(250)] for i in range(1024)]
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{live.url}/v1/embeddings", json={"input": inputs}, timeout=0.1)
    late = post(live, input=inputs, timeout=0.01)
    assert late.status_code == 408


def test_a_client_that_disconnects_while_queued_frees_its_slot_at_once(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not only when the engine has ended the requests: the task may be cancelled before that."""
    admission, lets_go, has_gone = live.server.admission, threading.Event(), threading.Event()

    async def stuck(*_: Any, **__: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            while not lets_go.is_set():
                await asyncio.sleep(0.01)
            has_gone.set()

    monkeypatch.setattr(live.server.llm, "submit", stuck)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/embeddings", json={"input": [[5, 6, 7]] * 3}, timeout=0.3)
        deadline = time.monotonic() + 5
        while admission.sequences and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not has_gone.is_set()
        assert (admission.requests, admission.sequences, admission.queued_tokens) == (0, 0, 0)
    finally:
        lets_go.set()
    assert has_gone.wait(5)


def test_embeddings_are_counted_in_the_metrics(live: Live) -> None:
    """In requests, prompt tokens and latency; there are no generated tokens to count."""
    before = Scrape(live.client.get("/metrics").text)
    tokens = [11 + i % 80 for i in range(40)]
    post(live, input=[tokens, tokens[:7]], cache_salt="counted")
    after = Scrape(live.client.get("/metrics").text)

    def grown(name: str, **labels: str) -> float:
        return after.sum(f"quire:{name}", **labels) - before.sum(f"quire:{name}", **labels)

    assert grown("request_success_total", finished_reason="stop") == 2
    assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") == 47
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens"):
        assert grown(f"{name}_count") == 2, name
    for name in ("time_to_first_token_seconds", "request_generation_tokens", "request_params_max_tokens"):
        assert grown(f"{name}_count") == 0, name
    labels = {"handler": "/v1/embeddings", "method": "POST", "status": "200"}
    assert grown("http_responses_total", **labels) == 1


def test_the_load_generator_supports_embeddings(live: Live, tmp_path: Path) -> None:
    flags = ["--backend", "openai-embeddings", "--num-prompts", "6", "--input-len", "4", "--max-concurrency", "3"]
    path = tmp_path / "result.json"
    code = main(["bench", "serve", "--base-url", live.url, "--save-result", str(path), *flags])
    found = json.loads(path.read_text())
    assert code == 0 and (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 0)
    assert found["total_input_tokens"] >= 24 and found["mean_e2el_ms"] > 0 and "mean_ttft_ms" not in found


def test_one_bad_input_refuses_all_of_them(live: Live) -> None:
    answer = post(live, input=[[5, 6], [5, 10**6], [7]])
    assert answer.status_code == 400


def test_an_aborted_request_ends_its_stream(live: Live) -> None:
    llm = live.server.llm

    async def last_of_many() -> Any:
        """More requests than run at once: the last of them is queued when it is aborted."""
        coming = [llm.encode([5 + i] * 250, request_id=str(i)) for i in range(64)]
        readers = [asyncio.ensure_future(anext(one)) for one in coming]
        await asyncio.sleep(0)
        await llm.abort("63")
        outputs = await asyncio.gather(*readers)
        for one in coming:
            await one.aclose()
        return outputs

    *others, output = live.run(last_of_many())
    assert all(other.finish_reason == "stop" and len(other.outputs.data) == 64 for other in others)
    assert output.request_id == "63" and output.finished
    assert output.finish_reason == "abort" and len(output.outputs.data) == 0
