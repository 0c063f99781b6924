"""Chat and plain completions over HTTP: the same text as the in-process engine, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.api.fill_in_middle import FillInMiddle
from quire.messages.outputs import CompletionOutput
from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.reasoning import make_reasoning_split
from quire.output.parsers.toolcalls import ToolPlan
from quire.server.chat_generation import GeneratedChoice
from tests.api.test_fill_in_middle import QWEN, with_tokens
from tests.server.conftest import MODEL, Live

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "abc"}]
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def events(live: Live, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, which must end with its end marker."""
    with live.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for chunk in chunks:
        assert chunk.startswith("data: ")
        yield json.loads(chunk[6:])


def test_reasoning_tokens_are_counted_however_late_they_are_read() -> None:
    text = "<think>abcdefgh</think>xyz"  # a token a character
    for pieces in ([*text], [text], [text[:12], text[12:]]):
        choice = GeneratedChoice(AnswerReader(make_reasoning_split("qwen3", "")), ToolPlan([]), True)
        for place, piece in enumerate(pieces):
            end = "stop" if place == len(pieces) - 1 else None
            choice.read(CompletionOutput(0, piece, [7] * len(piece), finish_reason=end))
        assert 8 <= choice.reasoning_tokens <= len(text) - 3, pieces


def parts_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The parts of one choice in a stream."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


class TestCompletions:
    def test_text_and_tokens_match_the_engine(self, live: Live, llm: LLM) -> None:
        prompts = ["abc", "the world", "x " * 40]
        expected = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
        for prompt, output in zip(prompts, expected, strict=True):
            answer = live.post(TEXT, {"prompt": prompt, **GREEDY, "return_token_ids": True}).json()
            (choice,) = answer["choices"]
            assert choice["text"] == output.outputs[0].text
            assert choice["token_ids"] == output.outputs[0].token_ids
            assert choice["prompt_token_ids"] == output.prompt_token_ids
            assert choice["finish_reason"] == "length"
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(output.prompt_token_ids)
            assert usage["completion_tokens"] == 20
            assert usage["total_tokens"] == usage["prompt_tokens"] + 20

    def test_lists_of_prompts_and_several_sequences_of_each(self, live: Live, llm: LLM) -> None:
        prompts = ["abc", "the world", "hello"]
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 3, "max_tokens": 8, "n": 2, "ignore_eos": True}
        expected = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
        tokens = [output.prompt_token_ids for output in expected]
        texts = [sample.text for output in expected for sample in output.outputs]
        for given in (prompts, tokens):
            answer = live.post(TEXT, {"prompt": given, **params}).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            assert [choice["text"] for choice in answer["choices"]] == texts
            chunks = list(events(live, TEXT, {"prompt": given, **params}))
            assert ["".join(part["text"] for part in parts_of(chunks, i)) for i in range(6)] == texts
            assert all([part["finish_reason"] for part in parts_of(chunks, i)][-1] == "length" for i in range(6))

    def test_suffix_fills_in_the_middle(self, live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = with_tokens(*QWEN)
        asked = {"prompt": "abc", "suffix": " the end", **GREEDY, "return_token_ids": True}
        refused = live.post(TEXT, asked)
        assert refused.status_code == 400 and "the model tiny completes a text only at the end" in refused.text
        monkeypatch.setattr(live.server.llm.inputs, "fill_in_middle", FillInMiddle(tokenizer, "m"))
        tokens = tokenizer.encode("<|fim_prefix|>abc<|fim_suffix|> the end<|fim_middle|>", add_special_tokens=False)
        (expected,) = llm.generate([tokens], SamplingParams(**GREEDY), use_tqdm=False)  # type: ignore[list-item]
        for prompt in ("abc", tokenizer.encode("abc", add_special_tokens=False)):
            answer = live.post(TEXT, {**asked, "prompt": prompt}).json()
            assert answer["choices"][0]["prompt_token_ids"] == tokens
            assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids
            assert answer["usage"]["prompt_tokens"] == len(tokens)
            echoed = live.post(TEXT, {**asked, "prompt": prompt, "echo": True}).json()
            assert echoed["choices"][0]["text"] == "abc" + expected.outputs[0].text
            streamed = list(events(live, TEXT, {**asked, "prompt": prompt, "echo": True}))
            assert "".join(part["text"] for part in parts_of(streamed)) == "abc" + expected.outputs[0].text
        for empty in ("", None):
            assert live.post(TEXT, {**asked, "suffix": empty}).json()["usage"]["prompt_tokens"] == 3
        assert live.post(TEXT, {**asked, "echo": True, "logprobs": 1}).status_code == 400
        too_long = live.post(TEXT, {**asked, "suffix": "x" * 300})
        assert too_long.status_code == 400 and "maximum context length" in too_long.text
        cut = live.post(TEXT, {**asked, "prompt": "x" * 300, "truncate_prompt_tokens": 40}).json()
        assert cut["usage"]["prompt_tokens"] == 40

    def test_scoring_a_prompt(self, live: Live, llm: LLM) -> None:
        """What lm-eval does: echo, logprobs, and no new token."""
        (expected,) = llm.generate(
            ["the world x"], SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0), use_tqdm=False
        )
        tokens = expected.prompt_token_ids
        for limit in (0, 1):
            body = {"prompt": tokens, "echo": True, "logprobs": 2, "max_tokens": limit, "temperature": 0}
            answer = live.post(TEXT, body).json()
            logprobs = answer["choices"][0]["logprobs"]
            assert len(logprobs["tokens"]) == len(tokens) + limit
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert expected.prompt_logprobs is not None
            for i in range(1, len(tokens)):
                position = expected.prompt_logprobs[i]
                assert position is not None
                assert logprobs["token_logprobs"][i] == pytest.approx(position[tokens[i]].logprob, abs=1e-4)
                best = max(position.values(), key=lambda entry: entry.logprob)
                shown = logprobs["top_logprobs"][i]
                assert max(shown, key=shown.get) == best.decoded_token
            text = answer["choices"][0]["text"]
            assert text == "the world x" if limit == 0 else text.startswith("the world x")
            for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
                assert text[start : start + len(token)] == token
            assert answer["usage"]["completion_tokens"] == limit

    def test_echo_is_streamed_once(self, live: Live) -> None:
        body = {"prompt": "the world", "echo": True, "logprobs": 1, **GREEDY}
        whole = live.post(TEXT, body).json()["choices"][0]
        parts = parts_of(list(events(live, TEXT, body)))
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert whole["text"].startswith("the world")
        for column in ("tokens", "text_offset"):
            assert [item for part in parts for item in part["logprobs"][column]] == whole["logprobs"][column]

    @pytest.mark.parametrize("as_tokens", [False, True])
    def test_echo_shows_the_truncated_prompt(self, live: Live, llm: LLM, as_tokens: bool) -> None:
        tokens = llm.get_tokenizer().encode("the world x y z")
        prompt = tokens if as_tokens else "the world x y z"
        body = {"prompt": prompt, "truncate_prompt_tokens": 3, "echo": True, "logprobs": 0, **GREEDY}
        choice = live.post(TEXT, body).json()["choices"][0]
        assert choice["text"].startswith(llm.get_tokenizer().decode(tokens[-3:]))
        columns = choice["logprobs"]
        for start, token in zip(columns["text_offset"], columns["tokens"], strict=True):
            assert choice["text"][start : start + len(token)] == token


class TestChat:
    def test_the_answer_matches_the_engine(self, live: Live, llm: LLM) -> None:
        (expected,) = llm.chat(USER, SamplingParams(**GREEDY), use_tqdm=False)
        answer = live.post(CHAT, {"messages": USER, "model": MODEL, **GREEDY, "return_token_ids": True}).json()
        (choice,) = answer["choices"]
        nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, **nulls}
        assert choice["token_ids"] == expected.outputs[0].token_ids
        assert answer["prompt_token_ids"] == expected.prompt_token_ids
        assert answer["object"] == "chat.completion" and answer["model"] == MODEL
        assert answer["id"].startswith("chatcmpl-")

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"n": 3, "temperature": 1.0, "seed": 7},
            {"logprobs": True, "top_logprobs": 3},
            {"logprobs": True, "return_tokens_as_token_ids": True},
            {"stop": ["x", "S"]},
            {"return_token_ids": True},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"logit_bias": {"40": 5}, "bad_words": ["the"], "min_tokens": 3},
        ],
        ids=lambda fields: ", ".join(fields),
    )
    def test_a_stream_adds_up_to_the_whole_answer(self, live: Live, fields: dict[str, Any]) -> None:
        body = {"messages": USER, **GREEDY, **fields}
        whole = live.post(CHAT, body).json()
        chunks = list(events(live, CHAT, body))
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for choice in whole["choices"]:
            first, *parts = parts_of(chunks, choice["index"])
            assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
            assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            assert [token for part in parts for token in part.get("token_ids", [])] == (choice["token_ids"] or [])
            if choice["logprobs"] is not None:
                streamed = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
                assert streamed == choice["logprobs"]["content"]
                assert len(streamed) == 20

    def test_each_token_is_a_separate_event(self, real: Live) -> None:
        body = {"messages": USER, **GREEDY, "return_token_ids": True, "max_tokens": 8}

        def counts() -> list[int]:
            chunks = parts_of(list(events(real, CHAT, body)))
            return [len(part["token_ids"]) for part in chunks if "token_ids" in part]

        # On a busy machine this reader may miss a step, whose token then arrives with the next: not each time.
        assert [1] * 8 in (counts() for _ in range(5))

    def test_usage_in_streams(self, live: Live) -> None:
        body = {"messages": USER, **GREEDY}
        usage = live.post(CHAT, body).json()["usage"]
        assert all("usage" not in chunk for chunk in events(live, CHAT, body))
        *_, last = events(live, CHAT, {**body, "stream_options": {"include_usage": True}})
        assert last["choices"] == []
        *_, by_default = events(live, CHAT, {**body, "stream_options": {}})
        assert by_default["choices"] == [] and by_default["usage"]["completion_tokens"] == usage["completion_tokens"]
        for no in (False, None):
            *_, end = events(live, CHAT, {**body, "stream_options": {"include_usage": no}})
            assert "usage" not in end and end["choices"][0]["finish_reason"] == "length"
            assert end["choices"][0]["delta"]["content"], "the end comes with the last text"
        usage.pop("prompt_tokens_details"), last["usage"].pop("prompt_tokens_details")
        assert last["usage"] == usage
        options = {"include_usage": True, "continuous_usage_stats": True}
        role, *more = events(live, CHAT, {**body, "return_token_ids": True, "stream_options": options})
        prompt = usage["prompt_tokens"]
        assert role["usage"] == {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
        num_reported = 0
        for chunk in more:
            num_reported += sum(len(choice.get("token_ids", [])) for choice in chunk["choices"])
            assert chunk["usage"]["completion_tokens"] == num_reported
        assert num_reported == 20

    def test_details_of_prompt_tokens_are_reported_where_the_server_says_so(self, serving: Callable[..., Live]) -> None:
        """As in vLLM: null in whole responses, left out of events, unless --enable-prompt-tokens-details."""
        plain = serving(enable_prompt_tokens_details=False)
        texts: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": USER, "max_tokens": 2}), ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
        ]  # fmt: skip
        for path, body in (*texts, ("/v1/embeddings", {"input": "abc"})):
            usage = plain.post(path, body).json()["usage"]
            assert usage["prompt_tokens_details"] is None and usage["prompt_tokens"] > 0
        both = {"messages": [USER, USER], "max_tokens": 2}
        assert plain.post("/v1/chat/completions/batch", both).json()["usage"]["prompt_tokens_details"] is None
        for path, body in texts:
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = list(events(plain, path, {**body, "stream_options": options}))
            assert all(
                set(chunk["usage"]) == {"prompt_tokens", "total_tokens", "completion_tokens"} for chunk in chunks
            )
        read = plain.post("/v1/messages", {"messages": USER, "max_tokens": 2}).json()["usage"]
        assert read["cache_read_input_tokens"] + read["input_tokens"] > 0
        details = plain.post("/v1/responses", {"input": "abc", "max_output_tokens": 2}).json()["usage"]
        assert details["input_tokens_details"]["cached_tokens"] >= 0

    def test_a_tool_choice_needs_tools(self, live: Live) -> None:
        body = {"messages": USER, "max_tokens": 1}
        for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
            answer = live.post(CHAT, {**body, "tool_choice": choice})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
        for fields in ({"tool_choice": "none"}, {"tool_choice": None}, {"tool_choice": "auto", "tools": []}):
            assert live.post(CHAT, {**body, **fields}).status_code == 200
        assert (
            live.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "tool_choice": "auto"}).status_code == 200
        )

    def test_top_logprobs_are_the_likeliest(self, live: Live) -> None:
        body = {"messages": USER, "temperature": 1.0, "seed": 1, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
        for entry in live.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 3 and values == sorted(values, reverse=True)
            assert bytes(entry["bytes"]).decode() == entry["token"]

    def test_a_stop_string_ends_generation(self, live: Live) -> None:
        text = live.post(CHAT, {"messages": USER, **GREEDY}).json()["choices"][0]["message"]["content"]
        stop = text[5:7]
        choice = live.post(CHAT, {"messages": USER, **GREEDY, "stop": stop}).json()["choices"][0]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)

    def test_the_models_generation_config_sets_defaults(self, live: Live) -> None:
        answer = live.post(CHAT, {"messages": USER}).json()
        assert 1 <= answer["usage"]["completion_tokens"] <= 7  # generation_config.json: max_new_tokens

    def test_cached_tokens_are_reported(self, live: Live) -> None:
        body = {"messages": [{"role": "user", "content": "cache me " * 12}], **GREEDY, "cache_salt": "one"}
        live.post(CHAT, body)
        again = live.post(CHAT, body).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= 16
        other = live.post(CHAT, {**body, "cache_salt": "two"}).json()["usage"]
        assert other["prompt_tokens_details"]["cached_tokens"] == 0

    def test_metrics_are_returned_on_request(self, live: Live, serving: Callable[..., Live]) -> None:
        body = {"messages": USER, **GREEDY}
        assert "metrics" not in live.post(CHAT, body).json()
        for answer in (
            live.post(CHAT, {**body, "return_metrics": True}).json(),
            serving(enable_per_request_metrics=True).post(CHAT, body).json(),
            list(events(live, CHAT, {**body, "return_metrics": True}))[-1],
        ):
            metrics = answer["metrics"]
            assert metrics["tokens_per_second"] > 0 and metrics["time_to_first_token_ms"] > 0
            assert metrics["queue_time_ms"] >= 0 and metrics["preemptions"] == 0

    def test_a_prompt_can_be_continued(self, live: Live) -> None:
        messages = [*USER, {"role": "assistant", "content": "the world"}]
        body = {"messages": messages, "continue_final_message": True, "return_token_ids": True, **GREEDY}
        tokens = live.post(CHAT, body).json()["prompt_token_ids"]
        assert live.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("<|assistant|>the world")

    def test_the_client_may_choose_the_id(self, live: Live, serving: Callable[..., Live]) -> None:
        body = {"messages": USER, "max_tokens": 1}
        assert live.post(CHAT, body, headers={"x-request-id": "mine"}).json()["id"] == "chatcmpl-mine"
        assert live.post(CHAT, {**body, "request_id": "yours"}).json()["id"] == "chatcmpl-yours"
        telling = serving(enable_request_id_headers=True)
        assert telling.post(CHAT, body, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
        assert telling.client.get("/health").headers["x-request-id"]


class TestOpenAIClient:
    def test_chat_and_completions_sync(self, live: Live) -> None:
        client = live.openai()
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, temperature=0)  # type: ignore[arg-type]
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=USER, max_tokens=5, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == answer.choices[0].message.content
        assert client.completions.create(model=MODEL, prompt="abc", max_tokens=2).choices[0].text is not None

    def test_a_named_tool_is_called_with_arguments_that_parse(self, live: Live) -> None:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": {
                "type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
                "required": ["n"], "additionalProperties": False}}}
            for name in ("add", "take")
        ]  # fmt: skip
        for choice, reason in (
            ({"type": "function", "function": {"name": "take"}}, "stop"),
            ("required", "tool_calls"),
        ):
            body = {"messages": USER, "tools": tools, "tool_choice": choice, "max_tokens": 120, "temperature": 0,
                    "parallel_tool_calls": False}  # fmt: skip
            whole = live.post(CHAT, body).json()["choices"][0]
            (call,) = whole["message"]["tool_calls"]
            assert call["function"]["name"] in ("add", "take")
            if whole["finish_reason"] != "length":
                assert whole["finish_reason"] == reason
                assert isinstance(json.loads(call["function"]["arguments"])["n"], int)
            parts = parts_of(list(events(live, CHAT, body)))
            deltas = [delta for part in parts for delta in part["delta"].get("tool_calls", [])]
            assert deltas[0]["function"]["name"] == call["function"]["name"]
            assert "".join(delta["function"].get("arguments", "") for delta in deltas) == call["function"]["arguments"]
            assert parts[-1]["finish_reason"] == whole["finish_reason"]

    def test_structured_output_matches_its_schema(self, live: Live) -> None:
        for fields in (
            {"structured_outputs": {"choice": ["the world", "hello"]}},
            {"structured_outputs": {"regex": "(the world|hello)"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["the", "he"]}},
                }
            },
        ):
            answer = live.post(CHAT, {"messages": USER, "max_tokens": 30, **fields}).json()
            assert answer["choices"][0]["message"]["content"].strip('"') in ("the world", "hello", "the", "he")


class TestTokenizing:
    def test_a_round_trip(self, live: Live, llm: LLM) -> None:
        answer = live.post("/tokenize", {"prompt": "the world", "return_token_strs": True}).json()
        assert answer["tokens"] == llm.get_tokenizer().encode("the world")
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 256
        assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the world"}

    def test_a_conversation(self, live: Live) -> None:
        tokens = live.post("/tokenize", {"messages": USER}).json()["tokens"]
        text = live.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert text == "<|user|>abc</s><|assistant|>"


def test_version_health_and_models_routes(live: Live) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = live.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert live.client.post("/ping").status_code == 200
    assert live.client.get("/load").json() == {"server_load": 0}
    assert live.client.get("/version").json()["version"]
    page = live.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "quire:num_requests_running" in page.text
    assert live.client.head("/health").status_code == 200


def test_the_openapi_document_lists_every_route(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.2")
    assert set(document["paths"]) >= {CHAT, TEXT, "/v1/models", "/v1/models/{model}", "/tokenize", "/health"}
    chat = document["paths"][CHAT]["post"]
    assert set(chat["responses"]) >= {"200", "400", "401", "404", "413", "429", "503"}
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"] and "additionalProperties" not in schema
    references = httpx.Response(200, json=document).text.split("#/components/schemas/")[1:]
    assert all(reference.split('"')[0] in document["components"]["schemas"] for reference in references)
