"""/v1/responses with state and /v1/conversations, as the official client uses them, over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from quire.engine.session_calls import DeleteSession, ReadTokens
from quire.server.dialects.response_items import stored_items
from quire.server.dialects.responses_chat import as_chat
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.fronts.counts import Count
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.responses import ResponsesRequest
from quire.sessions.log import session_key
from tests.server.conftest import MODEL, Host, Live
from tests.server.served import Served, served

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 20}
SLOW: dict[str, Any] = {
    "temperature": 0, "max_output_tokens": 150,
    "extra_body": {"vllm_xargs": {"seconds": 0.05}, "ignore_eos": True},
}  # fmt: skip
"""A response that takes 7 seconds, unless it is ended."""
LETTERS = {"structured_outputs": {"regex": "[a-z]{12}"}}
"""Answers that look the same in a conversation: the tiny model's own would have special tokens."""
HELLO = "hello the world, hello the world"


@pytest.fixture(scope="module")
def disk_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = str(tmp_path_factory.mktemp("kv"))
    host = Host(tiny_model, swap_space=0.02, kv_disk=folder, logits_processors=["tests.executor.processors.TakesLong"])
    live, stop = host.start(max_background_responses=2)
    yield live
    stop()
    host.close()


@pytest.fixture
def stateful(disk_server: Live) -> Iterator[Live]:
    """A server that stores on disk; checked to be idle after the test."""
    yield disk_server
    disk_server.assert_idle()


@pytest.fixture
def client(stateful: Live) -> openai.OpenAI:
    return stateful.openai(_strict_response_validation=True)


def ask(client: openai.OpenAI, given: Any = HELLO, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=given, **{**GREEDY, "extra_body": LETTERS, **fields})


def rendered(live: Live, *texts: str) -> str:
    """The prompt of a conversation of alternating messages, as transformers renders it."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    text: str = live.server.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def assert_answers(live: Live, response: Any, *texts: str) -> None:
    """The response answers this conversation: its prompt has the text, and its tokens are what follows it."""
    tokens = tokens_of(live, response.id)
    prompt = tokens[: response.usage.input_tokens]
    assert live.server.tokenizer.decode(prompt) == rendered(live, *texts)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "return_token_ids": True, **LETTERS}
    assert live.post("/v1/completions", body).json()["choices"][0]["token_ids"] == tokens[len(prompt) :]


def until(client: openai.OpenAI, name: str, *statuses: str) -> Any:
    """The response, once it has one of these statuses."""
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(name)).status not in statuses:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.02)
    return found


def messages(body: dict[str, Any], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a request with stored items before its input."""
    reader = FieldReader()
    request = reader.decode(json.dumps(body).encode(), ResponsesRequest)
    chat = as_chat(request, 100, reader, OfferedTools(None, reader), history)
    return [message.as_dict() for message in chat.messages]


class TestFollowUps:
    def test_a_follow_up_continues_the_conversation_and_finds_its_kv(
        self, stateful: Live, client: openai.OpenAI
    ) -> None:
        first = ask(client)
        assert first.store is True
        stateful.assert_idle()
        stateful.run(stateful.server.llm.reset_prefix_cache())
        second = ask(client, "go on", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert_answers(stateful, second, HELLO, first.output_text, "go on")
        # Every full block of the first turn was saved when it ended; nothing of them is left on the device.
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1 - 16
        assert second.usage.input_tokens > first.usage.total_tokens
        third = ask(client, "more", previous_response_id=second.id)
        assert third.usage.input_tokens_details.cached_tokens >= second.usage.total_tokens - 1 - 16
        assert_answers(stateful, third, HELLO, first.output_text, "go on", second.output_text, "more")

    def test_two_follow_ups_of_one_response_run_at_once(self, stateful: Live, client: openai.OpenAI) -> None:
        first = ask(client)
        made: dict[str, Any] = {}

        def follow(text: str) -> None:
            made[text] = ask(client, text, previous_response_id=first.id)

        threads = [threading.Thread(target=follow, args=(text,)) for text in ("left", "right")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for text in ("left", "right"):
            assert_answers(stateful, made[text], HELLO, first.output_text, text)

    def test_the_prompt_has_the_tokens_that_were_generated(self, stateful: Live, client: openai.OpenAI) -> None:
        """Here they are not those that the tokenizer makes of their text; only the end token is another."""
        letters = {"h": 1.0, "e": 1.0, "he": -100.0}
        bias = {str(stateful.server.tokenizer.convert_tokens_to_ids(text)): by for text, by in letters.items()}
        forced = {"structured_outputs": {"regex": "hehehe"}, "logit_bias": bias}
        first = ask(client, extra_body=forced)
        tokens = tokens_of(stateful, first.id)
        answer = tokens[first.usage.input_tokens : -1]
        assert len(answer) == 6 and stateful.server.tokenizer.encode("hehehe", add_special_tokens=False) != answer
        second = ask(client, "on", previous_response_id=first.id)
        assert tokens_of(stateful, second.id)[: len(tokens) - 1] == tokens[:-1]
        assert_answers(stateful, second, HELLO, "hehehe", "on")

    def test_instructions_are_not_carried_over(self) -> None:
        history = [{"type": "message", "role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        body = {"input": "c", "previous_response_id": "resp_1", "instructions": "Be brief."}
        chat = messages(body, history)
        assert [(message["role"], message["content"]) for message in chat] == [
            ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"),
        ]  # fmt: skip

    def test_results_refer_to_stored_calls(self) -> None:
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
        history = stored_items([{"role": "user", "content": "a"}, call], FieldReader())
        given = [{"type": "function_call_output", "call_id": "call_1", "output": "b"}]
        _, asked, result = messages({"input": given, "previous_response_id": "resp_1"}, history)
        assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1" and result["content"] == "b"

    @pytest.mark.slow
    def test_a_tool_loop_gives_what_the_whole_conversation_gives(self, real: Live) -> None:
        client = real.openai(_strict_response_validation=True)
        parameters = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                      "additionalProperties": False}  # fmt: skip
        tool = {"type": "function", "name": "press", "parameters": parameters, "strict": True}
        given: Any = {"tools": [tool], "extra_body": None}
        forced = {"tool_choice": {"type": "function", "name": "press"}, "max_output_tokens": 60}
        first = ask(client, "Press the button.", **given, **forced)
        (call,) = first.output
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "pressed"}]
        second = ask(client, result, previous_response_id=first.id, **given)
        listed = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
        items = [{"role": "user", "content": "Press the button."}, call.model_dump(exclude_none=True), *result]
        assert second.output_text == ask(client, items, **given, store=False).output_text

    def test_it_goes_on_without_the_session(self, stateful: Live, client: openai.OpenAI) -> None:
        first = ask(client)
        stateful.run(stateful.server.llm.call_sessions(DeleteSession(session_of(first.id))))
        second = ask(client, "go on", previous_response_id=first.id)
        assert_answers(stateful, second, HELLO, first.output_text, "go on")

    def test_reasoning_is_part_of_the_context(self, serving: Callable[..., Live]) -> None:
        live = serving(reasoning_parser="think")
        client = live.openai()
        form: Any = {"extra_body": {"structured_outputs": {"regex": "<think>hm</think>yes"}}, "max_output_tokens": 60}
        first = ask(client, "hello", **form)
        second = ask(client, "on", previous_response_id=first.id)
        listed = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]


def session_of(response: str) -> str:
    """The key of a stored response's session."""
    return session_key("\0responses\0", response)


def tokens_of(live: Live, response: str) -> list[int]:
    """All tokens of a stored response's session."""
    return live.run(live.server.llm.call_sessions(ReadTokens(session_of(response)))).tokens or []


class TestStored:
    def test_it_can_be_retrieved_and_deleted(self, client: openai.OpenAI) -> None:
        made = ask(client, metadata={"a": "b"})
        found = client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict()
        client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=made.id):
                call(made.id)
        with pytest.raises(openai.NotFoundError, match=made.id):
            ask(client, previous_response_id=made.id)

    def test_a_stream_is_stored_when_it_is_completed(self, client: openai.OpenAI) -> None:
        short: Any = {"extra_body": {"structured_outputs": {"regex": "yes!"}}}
        with client.responses.stream(model=MODEL, input="hello", **GREEDY, **short) as stream:
            final = stream.get_final_response()
        assert final.status == "completed" and final.completed_at
        assert client.responses.retrieve(final.id).output_text == "yes!"
        with client.responses.stream(
            model=MODEL, input="on", previous_response_id=final.id, **GREEDY, **short
        ) as again:
            assert again.get_final_response().previous_response_id == final.id

    def test_parse_follows_up(self, stateful: Live, client: openai.OpenAI) -> None:
        class Answer(BaseModel):
            ok: bool

        blanks = {str(stateful.server.tokenizer.convert_tokens_to_ids(text)): -100 for text in ("Ġ", "Ċ")}
        long: Any = {"temperature": 0, "max_output_tokens": 40, "extra_body": {"logit_bias": blanks}}
        first = client.responses.parse(model=MODEL, input="hello", text_format=Answer, **long)
        assert first.output_parsed is not None
        second = client.responses.parse(
            model=MODEL, input="on", text_format=Answer, **long, previous_response_id=first.id
        )
        assert isinstance(second.output_parsed, Answer)

    def test_what_is_not_to_be_stored_is_not(self, stateful: Live, client: openai.OpenAI) -> None:
        made = ask(client, store=False)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)

    def test_input_items_are_paged(self, client: openai.OpenAI) -> None:
        first = ask(client, [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
                             {"role": "user", "content": "three"}])  # fmt: skip
        second = ask(client, "four", previous_response_id=first.id)
        texts = ["one", "two", "three", first.output_text, "four"]
        rising = list(client.responses.input_items.list(second.id, order="asc", limit=2))
        assert [item.content[0].text for item in rising] == texts
        falling = list(client.responses.input_items.list(second.id, limit=2))
        assert [item.id for item in falling] == [item.id for item in reversed(rising)]
        after = client.responses.input_items.list(second.id, order="asc", after=rising[3].id)
        assert [item.id for item in after.data] == [rising[4].id] and not after.has_more

    @pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "no"}])
    def test_a_page_that_cannot_be_is_refused(self, stateful: Live, client: openai.OpenAI, query: Any) -> None:
        made = ask(client)
        answer = stateful.client.get(f"/v1/responses/{made.id}/input_items", params=query)
        assert answer.status_code == (404 if "after" in query else 400) and next(iter(query)) in answer.text

    def test_items_can_be_referred_to(self, stateful: Live, client: openai.OpenAI) -> None:
        first = ask(client)
        (asked,) = client.responses.input_items.list(first.id).data
        for kind in ({"type": "item_reference"}, {}):
            given: Any = [{**kind, "id": asked.id}, {**kind, "id": first.output[0].id},
                          {"role": "user", "content": "go on"}]  # fmt: skip
            second = ask(client, given)
            assert_answers(stateful, second, HELLO, first.output_text, "go on")
        with pytest.raises(openai.NotFoundError, match="msg_none"):
            ask(client, [{"type": "item_reference", "id": "msg_none"}])

    def test_a_request_that_ends_early_stores_nothing(self, stateful: Live, client: openai.OpenAI) -> None:
        with client.responses.create(model=MODEL, input=HELLO, stream=True, **SLOW) as stream:
            name = next(iter(stream)).response.id  # type: ignore[union-attr]
        stateful.assert_idle()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(KeyError):
            tokens_of(stateful, name)

    def test_tenants_find_only_their_own(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("one", "two"))
        mine, theirs = live.openai(api_key="one"), live.openai(api_key="two")
        made, kept = ask(mine), mine.conversations.create(items=[{"role": "user", "content": "x"}])
        (asked,) = mine.responses.input_items.list(made.id).data
        for call in (
            lambda: theirs.responses.retrieve(made.id),
            lambda: theirs.responses.delete(made.id),
            lambda: theirs.responses.cancel(made.id),
            lambda: theirs.responses.input_items.list(made.id),
            lambda: ask(theirs, previous_response_id=made.id),
            lambda: ask(theirs, conversation=kept.id),
            lambda: ask(theirs, [{"type": "item_reference", "id": asked.id}]),
            lambda: theirs.conversations.retrieve(kept.id),
            lambda: theirs.conversations.items.list(kept.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert mine.responses.retrieve(made.id).id == made.id
        assert live.client.get("/v1/sessions", headers={"Authorization": "Bearer one"}).json()["data"] == []

    def test_the_bound_is_kept(self, serving: Callable[..., Live]) -> None:
        live = serving(max_stored_responses=2, max_stored_bytes=6000)
        client = live.openai()
        names = [ask(client).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(names[0])
        client.responses.retrieve(names[2])
        large: Any = {"metadata": {"a": "x" * 6000}}
        assert ask(client, **large).store is False, "it is answered, and not stored"
        with pytest.raises(openai.InternalServerError, match="max-stored-bytes") as caught:
            ask(client, store=True, **large)
        assert caught.value.status_code == 507
        assert client.responses.retrieve(names[2]).id == names[2], "nothing was dropped for it"
        page = live.client.get("/metrics").text
        assert re.search(r'quire:stored_responses_dropped_total\{.*reason="size"\} 1\.0', page)
        assert re.search(r"quire:stored_response_bytes\{.*\} [1-9]", page)

    def test_a_server_that_stores_nothing_says_so(self, serving: Callable[..., Live]) -> None:
        client = serving(max_stored_responses=0).openai()
        made = ask(client)
        assert made.store is False and ask(client, store=False).store is False
        for call in (
            lambda: ask(client, store=True),
            lambda: ask(client, background=True),
            client.conversations.create,
        ):
            with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
                call()
        with pytest.raises(openai.NotFoundError):
            ask(client, previous_response_id=made.id)

    def test_what_contradicts_is_refused(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="previous_response_id and conversation"):
            ask(client, previous_response_id="resp_1", conversation="conv_1")
        with pytest.raises(openai.BadRequestError, match="background needs store"):
            ask(client, background=True, store=False)
        with pytest.raises(openai.BadRequestError, match="only a response with background"):
            client.responses.cancel(ask(client).id)


class TestConversations:
    def test_responses_are_added_to_it(self, stateful: Live, client: openai.OpenAI) -> None:
        made = client.conversations.create(metadata={"topic": "x"})
        first = ask(client, conversation=made.id)
        assert first.conversation.id == made.id
        second = ask(client, "go on", conversation={"id": made.id}, store=False)
        assert second.store is False
        assert second.usage.input_tokens_details.cached_tokens > 0
        items = client.conversations.items.list(made.id, order="asc").data
        assert [item.content[0].text for item in items] == [HELLO, first.output_text, "go on", second.output_text]
        third = ask(client, "more", conversation=made.id)
        assert_answers(stateful, third, HELLO, first.output_text, "go on", second.output_text, "more")
        assert third.usage.input_tokens_details.cached_tokens >= second.usage.total_tokens - 1 - 16

    def test_items_are_created_retrieved_and_deleted(self, client: openai.OpenAI) -> None:
        made = client.conversations.create(items=[{"role": "user", "content": "one"}])
        added = client.conversations.items.create(
            made.id,
            items=[{"role": "assistant", "content": "two"}, {"type": "message", "role": "user", "content": "x"}],
        )
        assert [item.role for item in added.data] == ["assistant", "user"]
        found: Any = client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
        assert found.content[0].text == "two"
        assert client.conversations.items.delete(added.data[1].id, conversation_id=made.id).id == made.id
        left = client.conversations.items.list(made.id, order="asc").data
        assert [item.content[0].text for item in left] == ["one", "two"]
        changed = client.conversations.update(made.id, metadata={"k": "v"})
        assert changed.metadata == {"k": "v"} and client.conversations.retrieve(made.id) == changed
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            ask(client, conversation=made.id)

    @pytest.mark.parametrize(
        "items", [[{"role": "wizard", "content": "x"}], [{"type": "item_reference", "id": "x"}], [7]]
    )
    def test_what_is_not_an_item_is_refused(self, stateful: Live, items: Any) -> None:
        answer = stateful.post("/v1/conversations", {"items": items})
        assert answer.status_code == 400 and "items[0]" in answer.text

    def test_it_has_one_response_at_a_time(self, client: openai.OpenAI) -> None:
        made = client.conversations.create()
        running = ask(client, conversation=made.id, background=True, **SLOW)
        with pytest.raises(openai.ConflictError, match="under way"):
            ask(client, conversation=made.id)
        client.responses.cancel(running.id)
        assert client.conversations.items.list(made.id).data == [], "what was cancelled is not part of it"
        assert ask(client, conversation=made.id).conversation.id == made.id


class TestBackground:
    def test_it_is_queued_and_then_completed(self, stateful: Live, client: openai.OpenAI) -> None:
        made = ask(client, background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        done = until(client, made.id, "completed", "incomplete")
        assert_answers(stateful, done, HELLO)
        assert client.responses.cancel(made.id).status == done.status, "it has ended: nothing to cancel"
        assert ask(client, "on", previous_response_id=made.id).usage.input_tokens_details.cached_tokens > 0

    def test_it_can_be_cancelled_and_deleted(self, client: openai.OpenAI) -> None:
        made = ask(client, background=True, **SLOW)
        until(client, made.id, "in_progress")
        with pytest.raises(openai.BadRequestError, match="is (queued|in_progress)"):
            ask(client, previous_response_id=made.id)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        other = ask(client, background=True, **SLOW)
        client.responses.delete(other.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(other.id)

    def test_a_tenant_has_a_bounded_number(self, client: openai.OpenAI) -> None:
        running = [ask(client, background=True, **SLOW) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="max-background-responses"):
            ask(client, background=True)
        for one in running:
            client.responses.cancel(one.id)
        until(client, ask(client, background=True).id, "completed", "incomplete")

    def test_its_events_can_be_read_again_from_any_place(self, client: openai.OpenAI) -> None:
        with client.responses.create(model=MODEL, input=HELLO, background=True, stream=True, **GREEDY) as stream:
            begun = [next(stream) for _ in range(2)]
        assert [event.type for event in begun] == ["response.created", "response.queued"]
        name = begun[0].response.id  # type: ignore[union-attr]
        whole = list(client.responses.retrieve(name, stream=True))
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert whole[2].type == "response.in_progress"
        assert whole[-1].type in ("response.completed", "response.incomplete")
        rest = list(client.responses.retrieve(name, stream=True, starting_after=5))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in whole[6:]]
        with client.responses.stream(response_id=name, starting_after=5) as helped:
            assert [event.sequence_number for event in helped] == [event.sequence_number for event in rest]
        assert client.responses.retrieve(name).output_text == whole[-1].response.output_text  # type: ignore[union-attr]

    def test_only_streams_have_events(self, stateful: Live, client: openai.OpenAI) -> None:
        made = ask(client)
        with pytest.raises(openai.BadRequestError, match="background=true and stream=true"):
            client.responses.retrieve(made.id, stream=True)
        for query in ({"stream": "maybe"}, {"stream": "true", "starting_after": "x"}):
            assert stateful.client.get(f"/v1/responses/{made.id}", params=query).status_code == 400

    def test_a_deadline_fails_it(self, client: openai.OpenAI) -> None:
        slow = {**SLOW, "extra_body": {**SLOW["extra_body"], "timeout": 0.3}}
        made = ask(client, background=True, **slow)
        failed = until(client, made.id, "failed")
        assert "0.3 seconds" in failed.error.message

    def test_it_waits_while_the_queue_is_full(self, stateful: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        client, admission = stateful.openai(), stateful.server.admission
        monkeypatch.setattr("quire.server.stored.background.RETRY_SECONDS", 0.02)
        before, refused = admission.rejected["requests"], admission.enter

        def full(sizes: Any) -> Any:
            if admission.rejected["requests"] < before + 3:
                raise admission._full(Count.REJECTED_REQUESTS, "many requests are waiting", 1)
            return refused(sizes)

        monkeypatch.setattr(admission, "enter", full)
        done = until(client, ask(client, background=True).id, "completed", "incomplete", "failed")
        assert done.status != "failed" and admission.rejected["requests"] == before + 3


class TestEnds:
    def test_a_killed_server_finds_everything_again(self, tiny_model: Path, tmp_path: Path) -> None:
        flags = (
            str(tiny_model), "--dtype", "float32", "--num-gpu-blocks-override", "64", "--device", "cpu", "--port", "0",
            "--kv-disk", str(tmp_path / "kv"), "--served-model-name", MODEL, "--api-key", "one", "--api-key", "two",
            "--admin-key", "root", "--logits-processors", "tests.executor.processors.TakesLong",
        )  # fmt: skip
        with served(*flags) as server:
            url = address(server)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0)
            first = ask(client)
            kept = client.conversations.create(items=[{"role": "user", "content": "x"}])
            blocks, admin = -(-(first.usage.total_tokens - 1) // 16), {"Authorization": "Bearer root"}
            wait_until(lambda: httpx.get(f"{url}/admin/memory", headers=admin).json()["disk"]["blocks"] >= blocks)
            running = ask(client, background=True, **SLOW)
            until(client, running.id, "in_progress")
            os.killpg(server.process.pid, signal.SIGKILL)
        with served(*flags) as server:
            url = address(server)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0)
            assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
            second = ask(client, "go on", previous_response_id=first.id)
            assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1, "all its KV"
            failed = client.responses.retrieve(running.id)
            assert failed.status == "failed" and failed.error is not None and "server ended" in failed.error.message
            assert client.conversations.retrieve(kept.id).id == kept.id
            with pytest.raises(openai.NotFoundError):
                openai.OpenAI(base_url=f"{url}/v1", api_key="two").responses.retrieve(first.id)

    @pytest.mark.slow
    @pytest.mark.parametrize("has_disk", [True, False])
    def test_a_killed_engine_loses_no_response(self, tiny_model: Path, tmp_path: Path, has_disk: bool) -> None:
        """The follow-up waits for the next engine; without a disk, that one computes the conversation again."""
        disk = {"kv_disk": str(tmp_path / "kv"), "swap_space": 0.02} if has_disk else {}
        host = Host(tiny_model, **disk)
        live, stop = host.start()
        client = live.openai()
        first = ask(client)
        live.assert_idle()
        if has_disk:  # what is written later than the answer is lost with the engine
            blocks = -(-(first.usage.total_tokens - 1) // 16)
            wait_until(lambda: live.engine_metrics()["quire:disk_blocks"] >= blocks)
        os.kill(host.llm.replicas[0].engine.pid, signal.SIGKILL)
        second = ask(client, "go on", previous_response_id=first.id)
        assert_answers(live, second, HELLO, first.output_text, "go on")
        assert (second.usage.input_tokens_details.cached_tokens > 0) is has_disk
        stop()
        host.close()

    def test_a_stopped_server_ends_background_responses(self, host: Host) -> None:
        live, stop = host.start(shutdown_timeout=0.1)
        client = live.openai()
        long: Any = {"max_output_tokens": 200, "extra_body": {"ignore_eos": True, "min_tokens": 200}}
        made = [ask(client, background=True, **long) for _ in range(8)]
        stop()
        ended = [job.answer.writer.response for job in live.server.stored.background._jobs.values()]
        assert {response.id for response in ended} == {one.id for one in made}
        assert {response.status for response in ended} <= {"incomplete", "failed"}


def address(server: Served) -> str:
    url: str = server.wait_for(r"(http://[\d.]+:\d+)")[1]
    wait_until(lambda: is_ready(url))
    return url


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", headers={"Authorization": "Bearer one"}).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
