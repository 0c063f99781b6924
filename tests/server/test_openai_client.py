"""The official `openai` client against a live server, sync and async, streaming and not."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from quire.server.limits import QueueTicket
from tests.server.clients import CHAT, RESPONSES, TEXT, USER, AsyncClient, Client, SyncClient, assembled, text_of
from tests.server.conftest import MODEL, Live

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
ROWS = 16
KINDS = {"sync": SyncClient, "async": AsyncClient}


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, live: Live) -> Client:
    """Each test runs with both clients."""
    made: Client = KINDS[request.param](live)
    return made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """The class of the client, for tests that start their own server."""
    return KINDS[request.param]


@contextmanager
def full(live: Live) -> Iterator[Callable[[], None]]:
    """The server considers all rows of the engine occupied, until the block ends or the yielded function is called."""

    async def enter() -> QueueTicket:
        return live.server.admission.enter([(ROWS, 1)])[0]

    ticket = live.run(enter())

    def leave() -> None:
        live.call(ticket.leave)

    try:
        yield leave
    finally:
        leave()


class TestChat:
    def test_the_answer_matches_the_engine_and_a_stream_adds_up_to_it(self, client: Client, llm: LLM) -> None:
        (expected,) = llm.chat(USER, SamplingParams(**GREEDY), use_tqdm=False)
        answer = client.call(CHAT, messages=USER, **GREEDY)
        (choice,) = answer.choices
        assert (answer.object, answer.model, choice.message.role) == ("chat.completion", MODEL, "assistant")
        assert choice.message.content == expected.outputs[0].text
        assert choice.finish_reason == expected.outputs[0].finish_reason
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        chunks = client.stream(CHAT, messages=USER, **GREEDY)
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        whole = assembled(chunks).choices[0]
        assert (whole.message.content, whole.finish_reason) == (choice.message.content, choice.finish_reason)

    def test_several_sequences(self, client: Client) -> None:
        fields: dict[str, Any] = {"messages": USER, "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
        answer = client.call(CHAT, **fields)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
        streamed = assembled(client.stream(CHAT, **fields))
        assert [choice.message.content for choice in streamed.choices] == texts

    def test_logprobs(self, client: Client) -> None:
        fields: dict[str, Any] = {"messages": USER, **GREEDY, "logprobs": True, "top_logprobs": 4}
        fields["extra_body"] = {"skip_special_tokens": False}
        (choice,) = client.call(CHAT, **fields).choices
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 4
            assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
            assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
        streamed = assembled(client.stream(CHAT, **fields)).choices[0].logprobs.content
        assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in choice.logprobs.content]

    def test_logprobs_of_requested_tokens(self, client: Client) -> None:
        ids = [5, 6, 40]
        body = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        chat = client.call(CHAT, messages=USER, **GREEDY, logprobs=True, extra_body=body).choices[0]
        for entry in chat.logprobs.content:
            assert {top.token for top in entry.top_logprobs} == {entry.token, *(f"token_id:{each}" for each in ids)}
        text = client.call(TEXT, prompt="the world", **GREEDY, logprobs=3, extra_body=body).choices[0]
        for token, tops in zip(text.logprobs.tokens, text.logprobs.top_logprobs, strict=True):
            assert set(tops) == {token, *(f"token_id:{each}" for each in ids)}
        with pytest.raises(openai.BadRequestError, match="needs logprobs=true"):
            client.call(CHAT, messages=USER, **GREEDY, extra_body=body)

    def test_a_stop_string_ends_generation_and_is_left_out(self, client: Client) -> None:
        text = client.call(CHAT, messages=USER, **GREEDY).choices[0].message.content
        stop = text[4:6]
        (choice,) = client.call(CHAT, messages=USER, stop=[stop, "never there"], **GREEDY).choices
        assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
        streamed = assembled(client.stream(CHAT, messages=USER, stop=[stop, "never there"], **GREEDY)).choices[0]
        assert (streamed.message.content, streamed.finish_reason) == (choice.message.content, "stop")

    def test_a_seed_determines_the_text(self, client: Client) -> None:
        def text(seed: int) -> str:
            answer = client.call(CHAT, messages=USER, seed=seed, temperature=1.5, max_tokens=16)
            return str(answer.choices[0].message.content)

        assert text(1) == text(1)
        assert len({text(seed) for seed in range(4)}) > 1

    def test_usage_at_the_end_of_a_stream_and_in_every_chunk(self, client: Client) -> None:
        fields = {"messages": USER, **GREEDY}
        usage = client.call(CHAT, **fields).usage
        assert not any(chunk.usage for chunk in client.stream(CHAT, **fields))
        *chunks, last = client.stream(CHAT, stream_options={"include_usage": True}, **fields)
        assert last.choices == [] and last.usage.completion_tokens == usage.completion_tokens
        assert not any(chunk.usage for chunk in chunks)
        always = {"include_usage": True, "continuous_usage_stats": True}
        counts = [chunk.usage.completion_tokens for chunk in client.stream(CHAT, stream_options=always, **fields)]
        assert counts == sorted(counts) and counts[-1] == usage.completion_tokens

    def test_the_clients_own_stream_helper(self, live: Live) -> None:
        text = live.openai().chat.completions.create(model=MODEL, messages=USER, **GREEDY).choices[0].message.content
        assert text is not None
        with live.openai().chat.completions.stream(model=MODEL, messages=USER, stop=text[8:], **GREEDY) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= set(kinds)
        assert final.choices[0].message.content == text[:8]


class TestCompletions:
    def test_prompts_as_text_and_tokens_and_lists_of_either(self, client: Client, llm: LLM) -> None:
        texts = ["abc", "the world", "hello"]
        outputs = llm.generate(texts, SamplingParams(**GREEDY), use_tqdm=False)
        tokens = [output.prompt_token_ids for output in outputs]
        expected = [output.outputs[0].text for output in outputs]
        for prompt in (texts[1], tokens[1]):
            answer = client.call(TEXT, prompt=prompt, **GREEDY)
            assert [choice.text for choice in answer.choices] == [expected[1]]
            assert answer.usage.prompt_tokens == len(tokens[1])
        for prompts in (texts, tokens):
            answer = client.call(TEXT, prompt=prompts, **GREEDY)
            assert [choice.text for choice in answer.choices] == expected
            assert answer.usage.prompt_tokens == sum(map(len, tokens))
            chunks = client.stream(TEXT, prompt=prompts, **GREEDY)
            assert [text_of(chunks, index) for index in range(3)] == expected

    def test_sequences_of_each_prompt_are_adjacent(self, client: Client) -> None:
        fields: dict[str, Any] = {"prompt": ["abc", "hello"], "n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 6}
        answer = client.call(TEXT, **fields)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        alone = client.call(TEXT, **{**fields, "prompt": "hello"})
        assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]

    def test_logprobs_in_columns(self, client: Client) -> None:
        answer = client.call(TEXT, prompt="the world", logprobs=3, **GREEDY)
        columns = answer.choices[0].logprobs
        assert len(columns.tokens) == len(columns.token_logprobs) == answer.usage.completion_tokens
        for token, logprob, best in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
            assert len(best) == 3 and max(best, key=best.get) == token and best[token] == logprob
        chunks = client.stream(TEXT, prompt="the world", logprobs=3, **GREEDY)
        streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [token for part in streamed for token in part.tokens] == columns.tokens
        assert [offset for part in streamed for offset in part.text_offset] == columns.text_offset

    def test_likelihoods_as_eval_harnesses_read_them(self, client: Client, llm: LLM) -> None:
        """Context and continuation in one prompt of token ids; the continuation's logprobs are summed."""
        pairs = [("the world", " in the sun"), ("hello", " an or"), ("abc", "d")]
        encode = llm.get_tokenizer().encode
        contexts, wholes = [encode(a) for a, _ in pairs], [encode(a) + encode(b) for a, b in pairs]
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
        expected = [
            _score(output.prompt_logprobs or [], tokens, len(context))
            for output, tokens, context in zip(
                llm.generate(wholes, params, use_tqdm=False), wholes, contexts, strict=True
            )
        ]
        for limit in (0, 1):
            answer = client.call(TEXT, prompt=wholes, echo=True, logprobs=1, max_tokens=limit, temperature=0, seed=1234)
            for choice, (likelihood, is_greedy), context in zip(answer.choices, expected, contexts, strict=True):
                columns, end = choice.logprobs, -1 if limit else None
                assert sum(columns.token_logprobs[len(context) : end]) == pytest.approx(likelihood, abs=1e-3)
                tickets = zip(columns.tokens[len(context) : end], columns.top_logprobs[len(context) : end], strict=True)
                assert all(max(best, key=best.get) == token for token, best in tickets) == is_greedy
            assert answer.usage.completion_tokens == limit * len(pairs)


def _score(positions: list[Any], tokens: list[int], start: int) -> tuple[float, bool]:
    """A continuation's log-likelihood, and whether it is the greedy continuation."""
    entries = [(positions[i][tokens[i]].logprob, positions[i][tokens[i]].rank) for i in range(start, len(tokens))]
    return math.fsum(logprob for logprob, _ in entries), all(rank == 1 for _, rank in entries)


class TestExtraFields:
    """vLLM's own fields, through `extra_body`."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_n_sigma": 0.2},
            {"xtc_probability": 1.0, "xtc_threshold": 0.002}, {"repetition_penalty": 1.7}, {"presence_penalty": 1.5},
            {"frequency_penalty": -1.0}, {"logit_bias": {40: 8.0, 41: -100.0}}, {"bad_words": ["the", "x"]},
            {"allowed_token_ids": [40, 41, 42, 43]}, {"min_tokens": 9}, {"ignore_eos": True},
            {"stop_token_ids": [50, 60, 70, 80, 90]}, {"include_stop_str_in_output": True, "stop": ["e", "a", "S"]},
            {"skip_special_tokens": False}, {"spaces_between_special_tokens": False}, {"truncate_prompt_tokens": 2},
        ],
        ids=str,
    )  # fmt: skip
    def test_each_field_means_the_same_as_in_python(self, live: Live, llm: LLM, fields: dict[str, Any]) -> None:
        base: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 11, "max_tokens": 20}
        (expected,) = llm.generate("the world", SamplingParams(**{**base, **fields}), use_tqdm=False)
        body = {**base, **fields, "return_token_ids": True}
        (choice,) = live.openai().completions.create(model=MODEL, prompt="the world", extra_body=body).choices
        assert choice.token_ids == list(expected.outputs[0].token_ids)  # type: ignore[attr-defined]
        assert choice.text == expected.outputs[0].text
        assert choice.stop_reason == expected.outputs[0].stop_reason  # type: ignore[attr-defined]
        assert choice.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]

    def test_token_ids_of_prompt_and_answer(self, client: Client, live: Live) -> None:
        fields = {"messages": USER, **GREEDY, "extra_body": {"return_token_ids": True}}
        answer = client.call(CHAT, **fields)
        (choice,) = answer.choices
        decoded = live.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"]
        assert decoded == "<|user|>abc</s><|assistant|>"
        assert len(choice.token_ids) == answer.usage.completion_tokens
        chunks = client.stream(CHAT, **fields)
        assert chunks[0].prompt_token_ids == answer.prompt_token_ids
        parts = [chunk.choices[0] for chunk in chunks]
        assert [token for part in parts for token in getattr(part, "token_ids", [])] == choice.token_ids

    def test_prompt_logprobs_and_metrics(self, client: Client) -> None:
        extra = {"prompt_logprobs": 1, "return_metrics": True, "cache_salt": "a", "priority": 0}
        answer = client.call(CHAT, messages=USER, **GREEDY, extra_body=extra)
        assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == answer.usage.prompt_tokens
        assert answer.metrics["time_to_first_token_ms"] > 0

    @pytest.mark.parametrize(
        "constraint",
        [
            {"choice": ["the world", "hello"]},
            {"regex": "(the world|hello)"},
            {"grammar": 'root ::= "the world" | "hello"'},
            {"json": {"enum": ["the world", "hello"]}},
        ],
        ids=lambda constraint: next(iter(constraint)),
    )
    def test_structured_output(self, client: Client, constraint: dict[str, Any]) -> None:
        for method, fields in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "abc"})):
            answer = client.call(method, **fields, max_tokens=30, extra_body={"structured_outputs": constraint})
            (choice,) = answer.choices
            text = choice.message.content if method == CHAT else choice.text
            assert text.strip('"') in ("the world", "hello") and choice.finish_reason == "stop"


class TestModelsEmbeddingsResponses:
    def test_models(self, live: Live, client: Client) -> None:
        assert [model.id for model in live.openai().models.list()] == [MODEL]
        model = client.call("models.retrieve", model=MODEL)
        assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 256)

    def test_names_with_a_slash(self, serving: Callable[..., Live], kind: Any) -> None:
        client = kind(serving(served_model_name=("org/name", "short")))
        assert client.call("models.retrieve", model="org/name").id == "org/name"
        assert client.call(CHAT, model="short", messages=USER, max_tokens=1).model == "short"

    def test_embeddings(self, client: Client) -> None:
        answer = client.call("embeddings.create", input=["the world", "abc"])
        for item in answer.data:
            assert len(item.embedding) == 64 and math.hypot(*item.embedding) == pytest.approx(1, abs=1e-4)
        plain = client.call("embeddings.create", input="abc", encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(answer.data[1].embedding, abs=1e-6)

    def test_responses(self, client: Client) -> None:
        chat = client.call(CHAT, messages=USER, **GREEDY)
        fields: dict[str, Any] = {"input": "abc", "temperature": 0, "max_output_tokens": 12, "store": False}
        answer = client.call(RESPONSES, **fields)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        events = client.stream(RESPONSES, **fields)
        assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == answer.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created" and events[-1].response.output_text == answer.output_text


class TestErrors:
    @pytest.mark.parametrize(
        "fields, param, words",
        [
            ({"temperature": -1}, "temperature", "in [0, 100]"),
            ({"messages": []}, "messages", "at least one"),
            ({"max_tokens": 10_000}, "max_tokens", "maximum context length is 256"),
            ({"extra_body": {"kv_transfer_params": {"a": 1}}}, "kv_transfer_params", "KV transfer"),
            ({"stop": [""]}, "stop", "non-empty"),
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "unknown role"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_a_bad_request(self, client: Client, fields: dict[str, Any], param: str, words: str) -> None:
        for ask in (client.call, client.stream):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(CHAT, **{"messages": USER, **fields})
            error = caught.value
            assert (error.status_code, error.param, error.type) == (400, param, "BadRequestError")
            assert words in error.message

    def test_an_unknown_model(self, client: Client) -> None:
        for method in (CHAT, TEXT, RESPONSES, "embeddings.create", "models.retrieve"):
            fields = {CHAT: {"messages": USER}, TEXT: {"prompt": "a"}}.get(method, {"input": "a"})
            with pytest.raises(openai.NotFoundError, match="gpt-9"):
                client.call(method, **({} if method == "models.retrieve" else fields), model="gpt-9")

    def test_keys(self, serving: Callable[..., Live], kind: Any) -> None:
        live = serving(api_key=("right",))
        for ask in (kind(live).call, kind(live, api_key="wrong").stream):
            with pytest.raises(openai.AuthenticationError):
                ask(CHAT, messages=USER)
        assert kind(live, api_key="right").call(CHAT, messages=USER, max_tokens=1).choices

    def test_a_full_server(self, serving: Callable[..., Live], kind: Any) -> None:
        live = serving(max_queued_requests=0)
        with full(live):
            for ask in (kind(live).call, kind(live).stream):
                with pytest.raises(openai.RateLimitError) as caught:
                    ask(CHAT, messages=USER)
                assert int(caught.value.response.headers["retry-after"]) >= 1
        assert kind(live).call(CHAT, messages=USER, max_tokens=1).choices

    def test_the_client_retries_by_itself(self, serving: Callable[..., Live]) -> None:
        """It honours Retry-After: a rejected request is answered once there is room."""
        live = serving(max_queued_requests=0)
        with full(live) as leave:
            threading.Timer(0.3, leave).start()
            patient = live.openai(max_retries=4)
            assert patient.chat.completions.create(model=MODEL, messages=USER, max_tokens=1).choices
        assert live.server.admission.rejected["requests"] >= 1

    def test_timeouts_of_the_client_and_of_the_server(self, live: Live, kind: Any) -> None:
        with pytest.raises(openai.APITimeoutError):
            kind(live, timeout=0.05).call(TEXT, prompt="abc", n=16, **LONG)
        live.assert_idle()
        with pytest.raises(openai.APIStatusError, match="longer than its") as caught:
            extra = {"ignore_eos": True, "timeout": 0.05}
            kind(live).call(TEXT, prompt="abc", n=16, max_tokens=200, extra_body=extra)
        assert caught.value.status_code == 408

    def test_closing_a_stream_midway(self, client: Client, live: Live) -> None:
        for method, fields in (
            (CHAT, {"messages": USER, **LONG}),
            (TEXT, {"prompt": ["abc", "x"], "n": 4, **LONG}),
            (RESPONSES, {"input": "abc", "max_output_tokens": 200, "extra_body": {"ignore_eos": True}}),
        ):
            assert len(client.leave(method, 4, **fields)) == 4
            live.assert_idle(5)

    def test_a_cancelled_task_leaves_nothing_behind(self, live: Live) -> None:
        async def work() -> None:
            async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
                asking = client.chat.completions.create
                tasks = [asyncio.ensure_future(asking(model=MODEL, messages=USER, **LONG)) for _ in range(4)]
                await asyncio.sleep(0.05)
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ends)

        asyncio.run(work())
        live.assert_idle(5)

    def test_many_at_once(self, live: Live) -> None:
        async def work() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
                ask = client.completions.create
                asked = (ask(model=MODEL, prompt="the " * (1 + i % 4), **GREEDY) for i in range(40))
                return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

        texts = asyncio.run(work())
        assert all(texts[i] == texts[i % 4] for i in range(40))
