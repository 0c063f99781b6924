"""What vLLM's own black-box tests of its server ask for, re-enacted with a tiny model: status codes, shapes, nulls,
counts and order. Each class names the files of vLLM's whose cases it stands for; docs/compatibility.md counts them."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from tests.conftest import TINY_VOCAB, tiny_tokenizer
from tests.server.conftest import MODEL, Live
from tests.server.scrape import Scrape

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "what is 1+1?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
VISIBLE = {"allowed_token_ids": list(range(4, 100))}
"""Tokens that have a text, so that the end of a stream has one too."""
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
USAGE_OPTIONS: list[tuple[dict[str, Any], bool, bool]] = [
    # options, usage in every chunk, usage at the end
    ({"include_usage": False, "continuous_usage_stats": False}, False, False),
    ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ({"include_usage": True, "continuous_usage_stats": False}, False, True),
    ({"include_usage": True, "continuous_usage_stats": True}, True, True),
]


def chunks(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = live.post(path, {**GREEDY, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(live: Live, **body: Any) -> Any:
    answer = live.post(CHAT, {"messages": USER, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(live: Live, **body: Any) -> Any:
    answer = live.post(TEXT, {"prompt": "abc", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def status(live: Live, path: str, **body: Any) -> int:
    given: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "abc"}
    return live.post(path, {**given, **GREEDY, **body}).status_code


class TestChat:
    """tests/entrypoints/openai/chat_completion: test_chat.py, test_chat_echo.py, and the validations."""

    def test_logprobs(self, live: Live) -> None:
        assert chat(live, logprobs=False)["choices"][0]["logprobs"] is None
        for count in (0, 5):
            content = chat(live, logprobs=True, top_logprobs=count)["choices"][0]["logprobs"]["content"]
            assert [len(each["top_logprobs"]) for each in content] == [count] * 5
        for count, stream in ((21, True), (30, False)):
            assert status(live, CHAT, logprobs=True, top_logprobs=count, stream=stream) == 400

    def test_all_logprobs(self, serving: Callable[..., Live], live: Live) -> None:
        assert status(live, CHAT, logprobs=True, top_logprobs=-1) == 400

    @pytest.mark.parametrize("count", [1, 0, -1, None])
    def test_prompt_logprobs(self, live: Live, count: int | None) -> None:
        fields = {} if count is None else {"prompt_logprobs": count}
        if count == -1:
            assert status(live, CHAT, **fields) == 400
            return
        found = chat(live, **fields)["prompt_logprobs"]
        assert found is None if count is None else len(found) > 3 and found[0] is None

    def test_usage_is_only_of_three_numbers(self, serving: Callable[..., Live]) -> None:
        live = serving(enable_prompt_tokens_details=False)
        prompt = len(tiny_tokenizer().encode("<|user|>what is 1+1?</s><|assistant|>", add_special_tokens=False))
        with live.openai() as client:
            made = client.chat.completions.create(
                model=MODEL, messages=USER, max_completion_tokens=5, extra_body={"ignore_eos": True}
            )
        assert made.choices[0].finish_reason == "length"
        assert made.usage == CompletionUsage(completion_tokens=5, prompt_tokens=prompt, total_tokens=prompt + 5)

    def test_a_stream_ends_once(self, live: Live) -> None:
        whole = chat(live, **VISIBLE)["choices"][0]
        found = chunks(live, CHAT, messages=USER, **VISIBLE)
        ends = [chunk for chunk in found if chunk["choices"][0]["finish_reason"] is not None]
        assert ends == found[-1:] and ends[0]["choices"][0]["finish_reason"] == whole["finish_reason"]
        deltas = [chunk["choices"][0]["delta"] for chunk in found]
        assert deltas[-1]["content"]
        assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]

    @pytest.mark.parametrize(("options", "always", "last"), USAGE_OPTIONS)
    def test_usage_in_streams(self, live: Live, options: dict[str, Any], always: bool, last: bool) -> None:
        check_usage(chunks(live, CHAT, messages=USER, stream_options=options), always, last)
        check_usage(chunks(live, TEXT, prompt="abc", stream_options=options), always, last)

    @pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
    @pytest.mark.parametrize("value", [None, True])
    def test_stream_options_need_a_stream(self, live: Live, name: str, value: bool | None) -> None:
        for path in (CHAT, TEXT):
            assert status(live, path, stream=False, stream_options={name: value}) == 400

    def test_forms_of_answers(self, live: Live) -> None:
        schema = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}
        forms: list[dict[str, Any]] = [
            {"structured_outputs": {"choice": ["Python", "Java"]}},
            {"structured_outputs": {"regex": "[1-9]{2}"}},
            {"structured_outputs": {"json": schema}},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "foo", "schema": schema}}},
            {"response_format": {"type": "text"}},
        ]
        for form in forms:
            fields = {"max_tokens": 40, "temperature": 1.0, "seed": 1, "ignore_eos": False, **form}
            answer = chat(live, **fields)["choices"][0]["message"]["content"]
            if "choice" in form.get("structured_outputs", {}):
                assert answer in ("Python", "Java")
            if "regex" in form.get("structured_outputs", {}):
                assert re.fullmatch("[1-9]{2}", answer)
        assert status(live, CHAT, structured_outputs={"regex": {1: "Python", 2: "C++"}}) == 400
        forbidden = chat(live, logprobs=True, top_logprobs=5, structured_outputs={"choice": ["Python", "Java"]})
        tops = forbidden["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert all(top["logprob"] >= -9999.0 for top in tops)

    def test_messages_of_other_shapes(self, live: Live) -> None:
        assert chat(live, messages=[{**USER[0], "extra_field": "0"}])["choices"]
        parts = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
        assert chat(live, messages=parts)["choices"] == chat(live)["choices"]
        assert status(live, CHAT, min_characters=10) == 200

    @pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
    def test_a_seed_has_64_bits(self, live: Live, seed: int) -> None:
        for path in (CHAT, TEXT):
            assert status(live, path, seed=seed) == 400

    def test_invocations_have_the_same_keys(self, live: Live) -> None:
        body = {"messages": USER, **GREEDY, "model": MODEL, "logprobs": False}
        expected, invoked = live.post(CHAT, body).json(), live.post("/invocations", body).json()
        assert expected.keys() == invoked.keys() and expected["choices"] == invoked["choices"]

    def test_samples(self, live: Live) -> None:
        made = chat(live, n=3, temperature=0.9, seed=42, max_tokens=20)["choices"]
        assert [choice["index"] for choice in made] == [0, 1, 2]
        assert len({choice["message"]["content"] for choice in made}) > 1
        found = chunks(live, CHAT, messages=USER, n=2, temperature=0.7)
        assert {choice["index"] for chunk in found for choice in chunk["choices"]} == {0, 1}

    @pytest.mark.parametrize("echo", [True, False])
    def test_echo_of_a_continued_message(self, live: Live, echo: bool) -> None:
        messages = [*USER, {"role": "assistant", "content": "abc the"}]
        fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        message = chat(live, **fields, echo=echo)["choices"][0]["message"]
        assert ("abc the" in message["content"]) == echo and message["role"] == "assistant"

    def test_stop_tokens_are_of_the_vocabulary(self, live: Live) -> None:
        assert status(live, CHAT, stop_token_ids=[TINY_VOCAB - 1]) == 200
        assert status(live, CHAT, stop_token_ids=[-1]) == 400
        refused = live.post(CHAT, {"messages": USER, "stop_token_ids": [TINY_VOCAB + 1]})
        assert refused.status_code == 400
        assert str(TINY_VOCAB + 1) in refused.text and str(TINY_VOCAB) in refused.text

    def test_logit_bias_is_of_the_vocabulary(self, live: Live) -> None:
        assert status(live, CHAT, logit_bias={"5": 1.0}) == 200
        for token in (TINY_VOCAB, TINY_VOCAB + 100):
            refused = live.post(CHAT, {"messages": USER, "logit_bias": {str(token): 1.0}})
            assert refused.status_code == 400 and str(token) in refused.text

    @pytest.mark.parametrize("body", ["this is not valid json{{{", '"text"', '["not", "an", "object"]', "42", "null"])
    def test_bodies_that_are_no_objects(self, live: Live, body: str) -> None:
        headers = {"content-type": "application/json"}
        assert live.client.post(CHAT, content=body, headers=headers).status_code == 400

    def test_a_salt_is_not_empty(self, live: Live) -> None:
        for path in (CHAT, TEXT):
            assert status(live, path, cache_salt="") == 400
            assert status(live, path, cache_salt="x") == 200
            assert status(live, path, cache_salt=5) == 400
        assert live.post("/v1/embeddings", {"input": "a", "cache_salt": ""}).status_code == 400
        assert live.post("/v1/responses", {"input": "a", "cache_salt": ""}).status_code == 400
        assert live.post("/score", {"text_1": "a", "text_2": "b", "cache_salt": ""}).status_code == 400

    def test_requested_logprobs(self, live: Live) -> None:
        ids = [5, 40, 99]
        fields = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        for count in (None, 3, 5):
            tops = {} if count is None else {"top_logprobs": count}
            for entry in chat(live, **fields, **tops, logprobs=True)["choices"][0]["logprobs"]["content"]:
                wanted = {f"token_id:{token}" for token in ids} | {entry["token"]}
                assert {top["token"] for top in entry["top_logprobs"]} == wanted
        batch = {"messages": [USER, USER], **GREEDY, **fields, "logprobs": True, "top_logprobs": 5}
        for choice in live.post("/v1/chat/completions/batch", batch).json()["choices"]:
            assert len(choice["logprobs"]["content"][0]["top_logprobs"]) in (3, 4)
        for path in (CHAT, TEXT):
            refused = live.post(path, {"messages": USER, "prompt": "a", "logprob_token_ids": [5]})
            assert refused.status_code == 400
            assert status(live, path, logprob_token_ids=123, logprobs=1) == 400
            for more in ({}, {"logprobs": False if path == CHAT else None}, {"logprobs": 1}):
                assert status(live, path, logprob_token_ids=[], **more) == 400
        assert chat(live, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]

    def test_tokens_as_ids(self, live: Live) -> None:
        for fields, is_id in (({"return_token_ids": True}, False), ({"return_tokens_as_token_ids": True}, True)):
            made = chat(live, logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"]["content"]
            for entry in made:
                assert entry["token"].startswith("token_id:") == is_id
                assert all(top["token"].startswith("token_id:") == is_id for top in entry["top_logprobs"])

    def test_wrong_content_type(self, live: Live) -> None:
        form = {"content-type": "application/x-www-form-urlencoded"}
        with live.openai() as client, pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model=MODEL, messages=USER, extra_headers=form)


def check_usage(found: list[dict[str, Any]], always: bool, last: bool) -> None:
    *others, end = found
    assert (end["choices"] == []) == last
    for chunk in others if last else found:
        assert (chunk.get("usage") is not None) == always
        assert len(chunk["choices"]) == 1
    if last:
        assert end["usage"]["completion_tokens"] == 5 and end["usage"]["prompt_tokens"] > 0
        assert end["usage"]["total_tokens"] == end["usage"]["prompt_tokens"] + 5


class TestMetrics:
    """tests/entrypoints/serve/instrumentator/test_metrics.py."""

    def test_counts_of_requests_one_after_another(self, serving: Callable[..., Live]) -> None:
        live = serving()
        before = Scrape(live.client.get("/metrics").text)
        requests, tokens, prompt = 3, 5, [5, 6, 7, 8]
        with live.openai() as client:
            for _ in range(requests):
                client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}
                )
        expected = {
            "time_to_first_token_seconds_count": requests,
            "inter_token_latency_seconds_count": requests * (tokens - 1),
            "e2e_request_latency_seconds_count": requests,
            "request_queue_time_seconds_count": requests,
            "request_inference_time_seconds_count": requests,
            "request_prefill_time_seconds_count": requests,
            "request_decode_time_seconds_count": requests,
            "request_num_preemptions_count": requests,
            "request_prompt_tokens_sum": requests * len(prompt),
            "request_prompt_tokens_count": requests,
            "request_generation_tokens_sum": requests * tokens,
            "request_generation_tokens_count": requests,
            "request_params_n_count": requests,
            "request_params_max_tokens_sum": requests * tokens,
            "request_params_max_tokens_count": requests,
            "iteration_tokens_total_sum": requests * (len(prompt) + tokens),
            "iteration_tokens_total_count": requests * tokens,
            "prompt_tokens_total": requests * len(prompt),
            "generation_tokens_total": requests * tokens,
            "request_success_total": requests,
        }
        names = {f"vllm:{name}" for name in expected}
        deadline = time.monotonic() + 10
        while True:
            after = Scrape(live.client.get("/metrics").text)
            gained = {name: after.sum(name) - before.sum(name) for name in names}
            if gained == {f"vllm:{name}": count for name, count in expected.items()}:
                break
            assert time.monotonic() < deadline, gained
            time.sleep(0.02)  # the last step is counted when the next is planned

    def test_names(self, live: Live) -> None:
        page = Scrape(live.client.get("/metrics").text)
        gauges = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc"
        counters = "prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total cache_config_info"
        assert {f"vllm:{name}" for name in f"{gauges} {counters}".split()} <= page.names
        (config,) = (dict(labels) for name, labels in page.values if name == "vllm:cache_config_info")
        for label in ("kv_cache_size_tokens", "kv_cache_max_concurrency"):
            assert float(config[label]) > 0

    def test_gauges_after_aborts(self, live: Live) -> None:
        def gauges() -> tuple[float, ...]:
            page = Scrape(live.client.get("/metrics").text)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return tuple(page.sum(f"vllm:{name}") for name in names)

        assert gauges() == (0, 0, 0)
        with live.openai() as client:
            fields: dict[str, Any] = {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
            streams = [client.completions.create(model=MODEL, prompt=[5] * 40, **fields) for _ in range(3)]
            for stream in streams:
                next(iter(stream))
            running, _, used = gauges()
            assert running > 0 and used > 0
            for stream in streams:
                stream.close()
        deadline = time.monotonic() + 10
        while gauges() != (0, 0, 0):
            assert time.monotonic() < deadline, gauges()
            time.sleep(0.02)


class TestTools:
    """tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py;
    tests/tool_use: test_chat_completion_request_validations.py, test_tool_choice_required.py."""

    @pytest.mark.parametrize("choice", ["required", NAMED])
    def test_forced_calls(self, live: Live, choice: Any) -> None:
        fields = {
            "tools": [CHAT_TOOL],
            "tool_choice": choice,
            "max_tokens": 60,
            "ignore_eos": False,
            "temperature": 1.0,
        }
        made = chat(live, **fields, seed=3, parallel_tool_calls=False)["choices"][0]
        assert made["message"]["content"] == "", "the text beside a forced call is empty, and not null"
        (call,) = made["message"]["tool_calls"]
        assert call["function"]["name"] == "add" and isinstance(json.loads(call["function"]["arguments"]), dict)
        assert call["type"] == "function" and len(call["id"]) > 16
        found = chunks(live, CHAT, messages=USER, **fields, seed=3, parallel_tool_calls=False)
        deltas = [chunk["choices"][0]["delta"] for chunk in found]
        assert not any(delta.get("content") for delta in deltas)
        calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
        assert len([each for each in calls if each.get("id")]) == 1
        arguments = "".join(each["function"].get("arguments") or "" for each in calls)
        assert arguments == call["function"]["arguments"]

    @pytest.mark.parametrize("choice", ["required", NAMED])
    def test_a_forced_call_that_is_cut_short(self, live: Live, choice: Any) -> None:
        """One token is no call yet; of a call whose name the request says, the arguments have begun."""
        fields = {"tools": [CHAT_TOOL], "tool_choice": choice, "max_tokens": 1}
        (made,) = chat(live, **fields)["choices"]
        assert made["finish_reason"] == "length" and made["message"]["content"] == ""
        assert bool(made["message"].get("tool_calls")) == (choice is NAMED)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(live, CHAT, messages=USER, **fields)]
        assert not any(delta.get("content") for delta in deltas)

    def test_choices_that_fit_no_tool(self, live: Live) -> None:
        other = {"type": "function", "function": {"name": "nondefined"}}
        cases: list[tuple[dict[str, Any], int]] = [
            ({"tool_choice": NAMED}, 400),
            ({"tool_choice": "auto"}, 400),
            ({"tool_choice": "required", "tools": None}, 400),
            ({"tools": [CHAT_TOOL], "tool_choice": other}, 400),
            ({"tools": [CHAT_TOOL], "tool_choice": {}}, 400),
            ({"tools": [CHAT_TOOL], "tool_choice": "bogus"}, 400),
            ({"tools": [CHAT_TOOL], "tool_choice": NAMED, "structured_outputs": {"json": {"type": "object"}}}, 400),
            ({"tools": [CHAT_TOOL], "tool_choice": "auto", "structured_outputs": {"json": {"type": "object"}}}, 200),
            ({"structured_outputs": {"json": {"type": "object"}, "regex": ".*"}}, 400),
            ({"structured_outputs": 3}, 400),
            ({"structured_outputs": {"json": {"type": "object"}}, "tool_choice": None}, 200),
            ({"tools": [CHAT_TOOL], "tool_choice": "none"}, 200),
        ]
        for fields, code in cases:
            assert (fields, status(live, CHAT, **fields)) == (fields, code)

    @pytest.mark.parametrize("arguments", ["{}", ""])
    def test_a_call_without_arguments_comes_back(self, scripted: Live, arguments: str) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        history = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        ]
        assert status(scripted, CHAT, messages=history) == 200


class TestCompletions:
    """tests/entrypoints/openai/completion: test_completion.py, test_prompt_validation.py, test_empty_prompt_list.py;
    tests/entrypoints/openai/basic: test_return_token_ids.py."""

    def test_text_and_tokens(self, live: Live) -> None:
        made = text(live, prompt="abc")
        (choice,) = made["choices"]
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
        assert choice["prompt_logprobs"] is None and choice["token_ids"] is None
        assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert text(live, prompt=[0, 0, 0, 0, 0])["usage"]["prompt_tokens"] == 5

    def test_which_end_is_cut(self, live: Live) -> None:
        ids = list(range(4, 12))
        for side, kept in (("right", ids[:4]), ("left", ids[-4:])):
            fields = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
            assert text(live, prompt=ids, **fields)["choices"][0]["prompt_token_ids"] == kept
        assert status(live, TEXT, truncate_prompt_tokens=257) == 400

    @pytest.mark.parametrize("count", [None, 0, 5])
    def test_logprobs(self, live: Live, count: int | None) -> None:
        found = text(live, prompt=[0, 0, 0, 0, 0], logprobs=count)["choices"][0]["logprobs"]
        if count is None:
            assert found is None
            return
        assert found["token_logprobs"] is not None
        assert max(count, 1) <= len(found["top_logprobs"][0]) <= count + 1

    def test_too_many_logprobs(self, live: Live) -> None:
        assert status(live, TEXT, logprobs=21) == 400 and status(live, TEXT, logprobs=30, stream=True) == 400

    @pytest.mark.parametrize("count", [-1, 0, 1, None])
    def test_prompt_logprobs(self, live: Live, count: int | None) -> None:
        prompts = ["A robot may not", "My name is"]
        if count == -1:
            assert status(live, TEXT, prompt=prompts, prompt_logprobs=count) == 400
            return
        for choice in text(live, prompt=prompts, prompt_logprobs=count)["choices"]:
            assert (choice["prompt_logprobs"] is None) == (count is None)
            assert count is None or len(choice["prompt_logprobs"]) > 3

    def test_streams(self, live: Live) -> None:
        whole = text(live, **VISIBLE)["choices"][0]["text"]
        found = chunks(live, TEXT, prompt="abc", **VISIBLE)
        assert [chunk["choices"][0]["finish_reason"] for chunk in found if chunk["choices"][0]["finish_reason"]] == [
            "length"
        ]
        assert found[-1]["choices"][0]["text"] and "".join(chunk["choices"][0]["text"] for chunk in found) == whole

    def test_samples(self, live: Live) -> None:
        fields = {"n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 50, "ignore_eos": False}
        made = text(live, **fields, logprobs=0)["choices"]
        assert [choice["index"] for choice in made] == [0, 1, 2]
        assert len({choice["text"] for choice in made}) == 3
        found = chunks(live, TEXT, prompt="abc", **fields)
        ends = [choice for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in ends) == [0, 1, 2]

    @pytest.mark.parametrize("prompts", [["abc"] * 2, [[5, 6, 7]] * 2])
    def test_several_prompts(self, live: Live, prompts: list[Any]) -> None:
        first, second = text(live, prompt=prompts)["choices"]
        assert first["text"] == second["text"]
        search = {"n": 2, "use_beam_search": True, "temperature": 0.0, "max_tokens": 5}
        beams = live.post(TEXT, {"prompt": prompts, **search}).json()["choices"]
        assert len(beams) == 4 and beams[0]["text"] != beams[1]["text"]
        assert [beams[0]["text"], beams[1]["text"]] == [beams[2]["text"], beams[3]["text"]]
        texts = ["", ""]
        for chunk in chunks(live, TEXT, prompt=prompts):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts[0] == texts[1] == first["text"]

    @pytest.mark.parametrize("count", [1, 0])
    def test_echo_with_logprobs(self, live: Live, count: int) -> None:
        for prompt in ("Hello, my name is", [5, 6, 7, 8, 9, 10]):
            choice = text(live, prompt=prompt, echo=True, logprobs=count)["choices"][0]
            whole = prompt if isinstance(prompt, str) else tiny_tokenizer().decode(prompt)
            found = choice["logprobs"]
            assert choice["text"].startswith(whole)
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert len(found["tokens"]) == len(found["text_offset"]) == len(found["token_logprobs"]) > 5
            assert all(max(count, 1) <= len(tops) <= count + 1 for tops in found["top_logprobs"][1:])

    def test_offsets_of_streams_are_those_of_whole_answers(self, live: Live) -> None:
        fields = {"stop": ["zzzz"], "logprobs": 0, "max_tokens": 12}
        whole = text(live, **fields)["choices"][0]["logprobs"]["text_offset"]
        found = chunks(live, TEXT, prompt="abc", **fields)
        streamed = [at for chunk in found for at in chunk["choices"][0]["logprobs"]["text_offset"]]
        assert streamed == whole

    @pytest.mark.parametrize(
        "form",
        [
            {"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}},
            {"regex": "[.*"},
            {"grammar": "root ::= select_statementinvalidsyntax"},
        ],
    )
    def test_forms_that_are_none(self, live: Live, form: dict[str, Any]) -> None:
        assert status(live, TEXT, structured_outputs=form) == 400

    @pytest.mark.parametrize(
        "body", [{"prompt": None, "prompt_embeds": []}, {"prompt": []}, {"prompt": [999999]}, {"prompt": ""}]
    )
    def test_prompts_that_are_none(self, live: Live, body: dict[str, Any]) -> None:
        assert live.post(TEXT, {**GREEDY, **body}).status_code == 400

    def test_token_ids(self, live: Live) -> None:
        tokenizer = tiny_tokenizer()
        with_ids = text(live, return_token_ids=True, logprobs=1)["choices"][0]
        assert with_ids["prompt_token_ids"] == tokenizer.encode("abc")
        assert tokenizer.decode(with_ids["token_ids"]).startswith(with_ids["text"])
        without = text(live, return_token_ids=False, logprobs=1)
        assert without["choices"][0]["token_ids"] is None and without.get("prompt_token_ids") is None
        both = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
        echoed = text(live, echo=True, prompt_logprobs=1, **both)["choices"][0]
        ids = [int(token.removeprefix("token_id:")) for token in echoed["logprobs"]["tokens"]]
        assert ids == echoed["prompt_token_ids"] + echoed["token_ids"] and echoed["prompt_logprobs"]
        found = chunks(live, TEXT, prompt="abc", **both)
        assert found[0]["choices"][0]["prompt_token_ids"] == with_ids["prompt_token_ids"]
        streamed = [token for chunk in found for token in chunk["choices"][0]["token_ids"]]
        named = [token for chunk in found for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert streamed == [int(token.removeprefix("token_id:")) for token in named]

    def test_token_ids_of_chats(self, live: Live) -> None:
        whole = chat(live, return_token_ids=True)
        assert whole["prompt_token_ids"] and whole["choices"][0]["token_ids"]
        without = chat(live, return_token_ids=False)
        assert without["prompt_token_ids"] is None and without["choices"][0]["token_ids"] is None
        first, *rest = chunks(live, CHAT, messages=USER, return_token_ids=True)
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in rest)
        tokens = [token for chunk in rest for token in chunk["choices"][0].get("token_ids", [])]
        assert tokens == whole["choices"][0]["token_ids"]


class TestEmbeddings:
    """tests/entrypoints/pooling/embed: test_online.py."""

    def test_usage_and_order(self, live: Live) -> None:
        count = len(tiny_tokenizer().encode("abc"))
        for given in ("abc", ["abc"] * 10, [tiny_tokenizer().encode("abc")] * 10):
            made = live.post("/v1/embeddings", {"input": given, "encoding_format": "float"}).json()
            size = 1 if isinstance(given, str) else 10
            assert [each["index"] for each in made["data"]] == list(range(size)) and made["id"]
            assert (made["usage"]["prompt_tokens"], made["usage"]["total_tokens"]) == (count * size, count * size)
            assert made["usage"]["completion_tokens"] == 0

    def test_conversations(self, live: Live) -> None:
        made = live.post("/v1/embeddings", {"messages": USER}).json()
        rendered = "<|user|>what is 1+1?</s>"
        whole = live.post("/v1/embeddings", {"input": rendered, "add_special_tokens": False}).json()
        assert made["usage"] == {**whole["usage"], "prompt_tokens_details": made["usage"]["prompt_tokens_details"]}
        longer = live.post("/v1/embeddings", {"messages": USER, "add_generation_prompt": True}).json()
        assert longer["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"] + 1
        cut = live.post("/v1/embeddings", {"messages": USER, "continue_final_message": True}).json()
        assert cut["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"] - 1
        special = live.post("/v1/embeddings", {"messages": USER, "add_special_tokens": True}).json()
        assert special["usage"]["prompt_tokens"] == len(tiny_tokenizer().encode(rendered))
        both = {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}
        assert live.post("/v1/embeddings", both).status_code == 400

    def test_truncation(self, live: Live) -> None:
        body = {"input": "Como o Brasil pode fomentar", "truncate_prompt_tokens": 10}
        assert live.post("/v1/embeddings", body).json()["usage"]["prompt_tokens"] == 10
        assert live.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 8193}).status_code == 400

    def test_tasks(self, live: Live) -> None:
        for task in ("classify", "token_classify", "plugin"):
            refused = live.post("/pooling", {"input": "a", "task": task})
            assert refused.status_code == 400 and refused.json()["error"]["type"] == "BadRequestError"


class TestResponses:
    """tests/entrypoints/openai/responses: test_basic.py, test_simple.py, test_stateful.py;
    tests/tool_use/test_responses_request_validations.py."""

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({}, 200),
            ({"tools": []}, 200),
            ({"tool_choice": "none"}, 200),
            ({"tool_choice": "auto"}, 200),
            ({"tools": [], "tool_choice": "auto"}, 200),
            ({"tools": [], "tool_choice": "none"}, 200),
            ({"tool_choice": "required"}, 400),
            ({"tools": [], "tool_choice": "required"}, 400),
            ({"tool_choice": {"type": "function", "name": "add"}}, 400),
            ({"tools": [], "tool_choice": {"type": "function", "name": "add"}}, 400),
            ({"tools": [TOOL]}, 200),
            ({"tools": [TOOL], "tool_choice": "none"}, 200),
            ({"tools": [TOOL], "tool_choice": "auto"}, 200),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "nonexistent"}}, 400),
            ({"tools": [TOOL], "tool_choice": {"type": "function"}}, 400),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": ""}}, 400),
            ({"parallel_tool_calls": None}, 200),
            ({"parallel_tool_calls": False}, 200),
            ({"background": True, "store": False}, 400),
            ({"prompt": {"id": "p"}}, 400),
        ],
    )
    def test_choices_of_tools(self, live: Live, fields: dict[str, Any], code: int) -> None:
        answer = live.post("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "store": False, **fields})
        assert answer.status_code == code, answer.text
        if code == 200 and "parallel_tool_calls" in fields:
            assert answer.json()["parallel_tool_calls"] == (fields["parallel_tool_calls"] is not False)

    def test_histories(self, live: Live) -> None:
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
        thought = {"type": "reasoning", "summary": [], "encrypted_content": None}
        for ids in ({}, {"id": "x", "status": "completed"}):
            items = [user, {**said, **ids}, {**thought, **ids}, user]
            made = live.post("/v1/responses", {"input": items, "max_output_tokens": 4, "temperature": 0.0})
            assert made.status_code == 200, made.text
            assert made.json()["status"] in ("completed", "incomplete")

    def test_limits_and_logprobs(self, live: Live) -> None:
        body = {"input": "abc", "max_output_tokens": 4, "top_logprobs": 3, "include": ["message.output_text.logprobs"]}
        made = live.post("/v1/responses", body).json()
        if made["status"] == "incomplete":
            assert made["incomplete_details"]["reason"] == "max_output_tokens"
        content = made["output"][-1]["content"][0]
        assert all(len(entry["top_logprobs"]) == 3 for entry in content["logprobs"])
        extra = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "temperature": 0.7, "top_p": 0.9}
        assert live.post("/v1/responses", {"input": "abc", "max_output_tokens": 4, **extra}).status_code == 200
        with live.openai() as client:
            events = list(client.responses.create(**body, model=MODEL, stream=True))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert events[0].type == "response.created" and events[-1].type in (
            "response.completed", "response.incomplete",
        )  # fmt: skip
        assert "".join(delta.delta for delta in deltas) == events[-1].response.output_text

    def test_stored_responses(self, live: Live) -> None:
        with live.openai() as client:
            kept = client.responses.create(input="Hello!", model=MODEL, max_output_tokens=3)
            assert client.responses.retrieve(kept.id).status == kept.status
            lost = client.responses.create(input="Hello!", model=MODEL, max_output_tokens=3, store=False)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(lost.id)
            with pytest.raises(openai.BadRequestError):
                client.responses.cancel(kept.id)
            client.responses.delete(kept.id)


class TestServer:
    """tests/entrypoints/openai/basic: test_basic.py; tests/entrypoints/serve: middleware and instrumentator."""

    def test_plain_routes(self, live: Live) -> None:
        assert set(live.client.get("/version").json()) == {"version"}
        assert live.client.get("/health").status_code == 200
        assert live.client.get("/load").json()["server_load"] == 0
        (card,) = live.client.get("/v1/models").json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)

    def test_tokens_of_texts_and_chats(self, live: Live) -> None:
        ids = tiny_tokenizer().encode("abc")
        made = live.post("/tokenize", {"model": MODEL, "prompt": "abc"}).json()
        assert made["tokens"] == ids and made["count"] == len(ids) and made["max_model_len"] == 256
        assert made["token_strs"] is None
        strings = live.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()["token_strs"]
        assert strings == tiny_tokenizer().convert_ids_to_tokens(ids)
        assert live.post("/detokenize", {"tokens": ids}).json() == {"prompt": "abc"}


class TestTokenizer:
    """tests/entrypoints/serve/tokenize: test_tokenization.py."""

    @pytest.mark.parametrize("add_special", [False, True])
    def test_prompts(self, live: Live, add_special: bool) -> None:
        prompt = "This is a test prompt."
        tokens = tiny_tokenizer().encode(prompt, add_special_tokens=add_special)
        made = live.post("/tokenize", {"model": MODEL, "prompt": prompt, "add_special_tokens": add_special}).json()
        assert made == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}
        named = live.post("/tokenize", {"prompt": prompt, "return_token_strs": True}).json()
        assert named["token_strs"] == tiny_tokenizer().convert_ids_to_tokens(named["tokens"])
        assert live.post("/detokenize", {"model": MODEL, "tokens": tokens}).json().keys() == {"prompt"}

    @pytest.mark.parametrize("tools", [None, [CHAT_TOOL]])
    @pytest.mark.parametrize("add_special", [False, True])
    @pytest.mark.parametrize(("generates", "continues"), [(False, False), (True, False), (False, True)])
    def test_chats(self, live: Live, tools: Any, add_special: bool, generates: bool, continues: bool) -> None:
        tokenizer = tiny_tokenizer()
        messages = [*USER, {"role": "assistant", "content": "Sure,"}] if continues else USER
        flags = {"add_generation_prompt": generates, "continue_final_message": continues}
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **flags)
        tokens = tokenizer.encode(text, add_special_tokens=add_special)
        body = {"model": MODEL, "messages": messages, "tools": tools, "add_special_tokens": add_special, **flags}
        made = live.post("/tokenize", body).json()
        assert made == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}
        fields = {"messages": messages, "add_special_tokens": add_special, "return_token_ids": True, **flags}
        if tools is None:
            assert chat(live, **fields)["prompt_token_ids"] == tokens

    def test_what_it_is(self, live: Live) -> None:
        found = live.client.get("/tokenizer_info").json()
        kinds = {
            bool: "add_bos_token add_prefix_space clean_up_tokenization_spaces split_special_tokens",
            str: "tokenizer_class bos_token eos_token pad_token unk_token chat_template errors",
            int: "model_max_length", list: "additional_special_tokens", dict: "added_tokens_decoder",
        }  # fmt: skip
        for kind, names in kinds.items():
            assert all(isinstance(found[name], kind) for name in names.split() if found.get(name) is not None)
        assert found["tokenizer_class"] and found["model_max_length"] >= 256


class TestAccess:
    """tests/entrypoints/openai/chat_completion: test_root_path.py, test_enable_force_include_usage.py;
    serve/middleware: test_authentication_middleware.py, test_x_request_id.py."""

    def test_keys_below_a_prefix_and_slashes(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("abc-123",), root_path="/llm", allowed_origins=("*",))
        for prefix in ("", "/llm"):
            for key, code in (("abc", 401), ("abc-123", 200)):
                headers = {"authorization": f"Bearer {key}"}
                body = {"messages": USER, "max_tokens": 2}
                assert live.post(f"{prefix}{CHAT}", body, headers=headers).status_code == code
                assert live.client.get(f"{prefix}/v1/models/", headers=headers).status_code == code
            assert live.client.get(f"{prefix}/health/").status_code == 200
            assert live.client.get(f"{prefix}/v1/models/").status_code == 401
            assert live.client.get(f"{prefix}/health//").status_code == 401
        preflight = {"origin": "http://dashboard.example", "access-control-request-method": "GET"}
        for name, code in (("origin", 401), ("access-control-request-method", 401), ("", 200)):
            headers = {key: value for key, value in preflight.items() if key == name or not name}
            answer = live.client.options("/metrics", headers=headers)
            assert (answer.status_code, "vllm:" in answer.text) == (code, False)

    def test_request_ids(self, serving: Callable[..., Live]) -> None:
        live = serving(enable_request_id_headers=True)
        assert live.client.get("/health", headers={"x-request-id": "caller"}).headers.get_list("x-request-id") == [
            "caller"
        ]
        (made,) = live.client.get("/health").headers.get_list("x-request-id")
        assert uuid.UUID(made).version == 4 and uuid.UUID(made).hex == made

    def test_usage_that_is_forced(self, serving: Callable[..., Live]) -> None:
        live = serving(enable_force_include_usage=True)
        *others, last = (chunk["usage"] for chunk in chunks(live, CHAT, messages=USER, min_tokens=5))
        counts = [usage["completion_tokens"] for usage in others]
        assert counts == sorted(counts) and len(set(counts[1:])) == len(counts[1:])
        assert last["completion_tokens"] == counts[-1] == 5
        assert all(use["total_tokens"] == use["prompt_tokens"] + use["completion_tokens"] for use in (*others, last))
