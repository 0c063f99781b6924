"""/v1/sessions and session_id over real sockets: with any suspends, the tokens are those of an uninterrupted run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from blake3 import blake3

from quire import LLM, SamplingParams
from tests.server.conftest import Host, Live
from tests.server.served import served

GREEDY = {"temperature": 0, "ignore_eos": True}
BEGIN, MORE = "hello the world one two three four five", " more"


@pytest.fixture(scope="module")
def session_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = str(tmp_path_factory.mktemp("kv"))
    host = Host(
        tiny_model, swap_space=0.02, kv_disk=folder, logits_processors=["tests.executor.processors.TakesLong"],
        max_tenant_sessions=50,
    )  # fmt: skip
    live, stop = host.start()
    yield live
    stop()
    host.close()


@pytest.fixture
def sessions(session_server: Live) -> Iterator[Live]:
    """A server with session storage; checked after the test to hold no session and no blocks."""
    yield session_server
    delete_all(session_server.client)
    session_server.assert_idle()


def delete_all(client: httpx.Client, **more: Any) -> None:
    while data := client.get("/v1/sessions", **more).json()["data"]:
        for session in data:
            assert client.delete(f"/v1/sessions/{session['id']}", **more).status_code == 200


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path) -> tuple[list[int], list[int]]:
    """Token ids of two answers, from one uninterrupted run."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        first = llm.generate(BEGIN, params, use_tqdm=False)[0]
        tokenizer = llm.get_tokenizer()
        tokens = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        tokens += tokenizer.encode(MORE, add_special_tokens=False)
        second = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0]
    return list(first.outputs[0].token_ids), list(second.outputs[0].token_ids)


def turn(live: Live, name: str, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 12, "return_token_ids": True, **GREEDY, **fields}
    response = live.post(f"/v1/sessions/{name}/generate", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_turns_with_suspends_between_match_an_uninterrupted_run(
    sessions: Live, uninterrupted: tuple[list[int], list[int]]
) -> None:
    made = sessions.post("/v1/sessions", {"id": "agent-7", "input": BEGIN, "metadata": {"for": "tests"}}).json()
    assert (made["id"], made["object"], made["metadata"]) == ("agent-7", "session", {"for": "tests"})
    first = turn(sessions, "agent-7")
    assert first["choices"][0]["token_ids"] == uninterrupted[0]
    asleep = sessions.post("/v1/sessions/agent-7/suspend?wait=true", None).json()
    assert (asleep["status"], asleep["device_tokens"]) == ("asleep", 0)
    assert asleep["saved_tokens"] == asleep["num_tokens"] - 1
    assert sessions.engine_metrics()["quire:num_blocks_used"] == 0
    assert sessions.post("/v1/sessions/agent-7/resume", None).status_code == 200
    second = turn(sessions, "agent-7", input=MORE)
    assert second["choices"][0]["token_ids"] == uninterrupted[1]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == asleep["num_tokens"] - 1
    info = sessions.client.get("/v1/sessions/agent-7").json()
    assert (info["status"], info["num_tokens"]) == ("idle", second["usage"]["total_tokens"])


def test_a_fork_continues_independently(sessions: Live, uninterrupted: tuple[list[int], list[int]]) -> None:
    sessions.post("/v1/sessions", {"id": "a", "input": BEGIN})
    turn(sessions, "a")
    fork = sessions.post("/v1/sessions/a/fork", {"id": "b"}).json()
    assert (fork["parent"], fork["forked_at"]) == ("a", fork["num_tokens"])
    assert sessions.client.delete("/v1/sessions/a").json()["deleted"]
    assert turn(sessions, "b", input=MORE)["choices"][0]["token_ids"] == uninterrupted[1]
    early = sessions.post("/v1/sessions/b/fork", {"id": "c", "at": 5}).json()
    assert early["num_tokens"] == 5
    assert sessions.post("/v1/sessions/b/fork", {"id": "d", "at": 10**6}).status_code == 400


def test_an_exported_session_can_be_imported(sessions: Live, uninterrupted: tuple[list[int], list[int]]) -> None:
    sessions.post("/v1/sessions", {"id": "a", "input": BEGIN})
    turn(sessions, "a")
    file = sessions.client.get("/v1/sessions/a/export")
    assert file.headers["content-type"] == "application/octet-stream"
    binary = {"content": file.content, "headers": {"content-type": "application/octet-stream"}}
    assert sessions.client.post("/v1/sessions/import", **binary).status_code == 409
    assert sessions.client.post("/v1/sessions/import?id=b", **binary).json()["id"] == "b"
    assert turn(sessions, "b", input=MORE)["choices"][0]["token_ids"] == uninterrupted[1]
    damaged = {**binary, "content": file.content[:-1] + b"?"}
    assert sessions.client.post("/v1/sessions/import?id=c", **damaged).status_code == 400


def exported(**fields: Any) -> bytes:
    """An export file with a right checksum and these fields instead of honest ones."""
    body = msgspec.msgpack.encode(fields)
    return b"quireSE\n" + (1).to_bytes(4, "little") + blake3(body).digest() + body


@pytest.mark.parametrize(
    "changes",
    [
        *({"tokens": np.array([5, token, 6], "<i4").tobytes()} for token in (-1, 128, 2**31 - 1, -(2**31))),
        {"tokens": b"\0\0\0"}, {"tokens": "text"}, {"name": "a/../b"}, {"name": "x" * 10_000},
        {"meta": {"a": "b" * 10_000}}, {"meta": {"a": 1}}, {"meta": 7}, {"created": "now"}, {"fingerprint": b""},
        {"more": msgspec.Raw(b"\x91" * 100_000 + b"\x90")}, {"name": msgspec.Raw(b"\xa2\xff\xff")},
    ],
)  # fmt: skip
def test_an_import_of_impossible_values_is_refused(sessions: Live, changes: dict[str, Any]) -> None:
    """The checksum is no proof: it can be computed again."""
    sessions.post("/v1/sessions", {"id": "a", "input": BEGIN})
    honest = msgspec.msgpack.decode(sessions.client.get("/v1/sessions/a/export").content[44:])
    kind = {"content-type": "application/octet-stream"}
    assert sessions.client.post("/v1/sessions/import?id=b", content=exported(**honest), headers=kind).status_code == 200
    answer = sessions.client.post("/v1/sessions/import?id=c", content=exported(**honest | changes), headers=kind)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000
    assert sessions.client.get("/v1/sessions/c").status_code == 404


def test_chat_with_the_whole_conversation_can_use_a_session(sessions: Live) -> None:
    messages = [{"role": "user", "content": "hello the world, hello the world"}]
    body = {"messages": messages, "session_id": "chat-1", "max_tokens": 10, "return_token_ids": True, **GREEDY}
    first = sessions.post("/v1/chat/completions", body).json()
    assert sessions.post("/v1/sessions/chat-1/suspend?wait=true", None).json()["status"] == "asleep"
    sessions.run(sessions.server.llm.reset_prefix_cache())
    again = sessions.post("/v1/chat/completions", body).json()
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16, "the common first block was loaded"
    plain = sessions.post("/v1/chat/completions", {**body, "session_id": None}).json()
    assert plain["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    header = {"headers": {"X-Session-Id": "text-1"}}
    made = sessions.post("/v1/completions", {"prompt": BEGIN, "max_tokens": 4, **GREEDY}, **header).json()
    info = sessions.client.get("/v1/sessions/text-1").json()
    assert info["num_tokens"] == made["usage"]["total_tokens"]
    for refused in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}, {"prompt": "a", "echo": True, "max_tokens": 0}):
        assert sessions.post("/v1/completions", {**refused, "session_id": "x"}).status_code == 400, refused


def test_a_header_names_a_session_only_if_it_is_free(sessions: Live) -> None:
    """opencode sends two requests of one session at a time; a body that names a busy session is refused."""
    header = {"headers": {"X-Session-Id": "twice"}}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    slow = {**body, "max_tokens": 200, "ignore_eos": True, "stream": True, "vllm_xargs": {"seconds": 0.02}}
    with sessions.client.stream("POST", "/v1/chat/completions", json=slow, **header) as first:
        lines = first.iter_lines()
        next(lines)
        second = sessions.post("/v1/chat/completions", body, **header)
        assert (second.status_code, second.headers["x-quire-ignored"]) == (200, "X-Session-Id")
        assert sessions.post("/v1/chat/completions", {**body, "session_id": "twice"}).status_code == 409
    several = sessions.post("/v1/chat/completions", {**body, "n": 2, "temperature": 1}, **header)
    assert (several.status_code, several.headers["x-quire-ignored"]) == (200, "X-Session-Id")


def test_messages_are_answered_like_a_chat_and_streamed_with_its_events(sessions: Live) -> None:
    """The tiny model's template is <|role|>text</s>: two turns in a session are one conversation."""
    messages = [{"role": "user", "content": "hello"}]
    sessions.post("/v1/sessions", {"id": "s"})
    body = {"input": messages, "max_tokens": 8, "return_token_ids": True, "stream": True, "temperature": 0}
    chunks = events(sessions, "/v1/sessions/s/generate", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    result = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    whole = sessions.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert whole["choices"][0]["message"]["content"] == result
    assert sessions.post("/v1/sessions/s/append", {"input": [{"role": "user", "content": "on"}]}).status_code == 200
    refused = sessions.post("/v1/sessions/s/append", {"input": [{"role": "user", "content": "on"}]})
    assert refused.status_code == 400 and "has no answer yet" in refused.json()["error"]["message"]
    chat = turn(sessions, "s", answer="chat")
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["role"] == "assistant"
    text = events(sessions, "/v1/sessions/s/generate", {"input": " x", "max_tokens": 4, "stream": True, **GREEDY})
    assert {chunk["object"] for chunk in text} == {"text_completion"}


def events(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    import json

    with live.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_disconnect_midway_leaves_the_session_unchanged(sessions: Live) -> None:
    sessions.post("/v1/sessions", {"id": "s", "input": BEGIN})
    turn(sessions, "s")
    before = sessions.client.get("/v1/sessions/s/export").content
    body = {"input": MORE, "max_tokens": 150, "stream": True, "vllm_xargs": {"seconds": 0.1}, **GREEDY}
    with sessions.client.stream("POST", "/v1/sessions/s/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        for path, more in (("append", {"input": "x"}), ("generate", {"input": "x"})):
            busy = httpx.post(f"{sessions.url}/v1/sessions/s/{path}", json=more)
            assert busy.status_code == 409, busy.text
    wait_until(lambda: sessions.client.get("/v1/sessions/s/export").content == before)


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_generated_name_is_not_looked_up(sessions: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = sessions.server.llm.call_sessions

    async def noted(op: Any) -> Any:
        asked.append(op)
        return await ask(op)

    monkeypatch.setattr(sessions.server.llm, "call_sessions", noted)
    for body in ({}, {"id": "mine"}):
        assert sessions.post("/v1/sessions", body).status_code == 200
    assert [op.is_new for op in asked] == [True, False]
    assert asked[0].key != asked[1].key == "mine"


def test_the_error_of_a_full_session_names_remedies(sessions: Live) -> None:
    sessions.post("/v1/sessions", {"id": "full", "input": [5] * 250})
    assert turn(sessions, "full", max_tokens=6)["choices"][0]["finish_reason"] == "length"
    for answer in ("chat", "text"):
        refused = sessions.post("/v1/sessions/full/generate", {"answer": answer, "max_tokens": 4})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "session"
        assert "Fork it" in error["message"] and "max_model_len" in error["message"]


def test_errors_name_the_field(sessions: Live) -> None:
    assert sessions.client.get("/v1/sessions/nobody").status_code == 404
    assert sessions.post("/v1/sessions/nobody/generate", {"input": "x"}).status_code == 404
    assert sessions.post("/v1/sessions", {"id": "s"}).status_code == 200
    assert sessions.post("/v1/sessions", {"id": "s"}).status_code == 409
    empty = sessions.post("/v1/sessions/s/generate", {})
    assert empty.status_code == 400 and "empty" in empty.json()["error"]["message"]
    for bad in ("../etc", "a b", "é", "x" * 129, ""):
        assert sessions.post("/v1/sessions", {"id": bad}).status_code == 400
    assert sessions.client.get("/v1/sessions/a%2Fb").status_code in (400, 404)
    assert sessions.post("/v1/sessions/s/append", {"input": [1, {"role": "user", "content": "x"}]}).status_code == 400
    assert sessions.post("/v1/sessions/s/append", {"input": [10**6]}).status_code == 400
    assert sessions.post("/v1/sessions/s/append", {"input": "x" * 300}).status_code == 400, "longer than the model"
    assert sessions.post("/v1/sessions/s/generate", {"input": "x", "n": 2}).status_code == 400
    assert sessions.post("/v1/sessions/s/generate", {"input": "x", "temperature": -1}).status_code == 400
    assert sessions.client.get("/v1/sessions/s").json()["num_tokens"] == 0, "what was refused was not added"
    assert sessions.client.get("/v1/sessions?limit=0").status_code == 400
    assert sessions.post("/v1/sessions", {"id": "t", "ttl": -1}).status_code == 400


def test_pages_list_sessions_in_creation_order(sessions: Live) -> None:
    names = [f"n{i}" for i in (3, 1, 2, 5, 4)]
    for name in names:
        sessions.post("/v1/sessions", {"name": name})
    found: list[str] = []
    after = ""
    while True:
        page = sessions.client.get(f"/v1/sessions?limit=2{after}").json()
        found += [session["id"] for session in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert found == names


def test_tenants_have_separate_sessions(sessions: Live) -> None:
    one, two = ({"headers": {"X-Tenant": name}} for name in ("one", "two"))
    assert sessions.post("/v1/sessions", {"id": "s", "input": "a"}, **one).status_code == 200
    assert sessions.client.get("/v1/sessions/s", **two).status_code == 404
    assert sessions.client.get("/v1/sessions", **two).json()["data"] == []
    assert sessions.post("/v1/sessions", {"id": "s", "input": "b"}, **two).status_code == 200
    assert sessions.client.delete("/v1/sessions/s", **two).status_code == 200
    assert [each["id"] for each in sessions.client.get("/v1/sessions", **one).json()["data"]] == ["s"]
    body = {"max_tokens": 2, **GREEDY}
    assert sessions.post("/v1/sessions/s/generate", body, **one).status_code == 200
    assert sessions.post("/v1/sessions/s/generate", body).status_code == 404
    delete_all(sessions.client, **one)


def test_an_unused_session_expires(sessions: Live) -> None:
    made = sessions.post("/v1/sessions", {"id": "s", "ttl": 0.3}).json()
    assert made["expires_at"] is not None
    sessions.post("/v1/sessions", {"id": "t", "ttl": 0.3})
    assert sessions.client.patch("/v1/sessions/t", json={"ttl": None}).json()["expires_at"] is None
    time.sleep(0.4)
    assert sessions.client.get("/v1/sessions/s").status_code == 404
    assert sessions.client.get("/v1/sessions/t").status_code == 200


def test_a_tool_call_suspends_the_session_until_the_result_arrives(sessions: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "go"}]
    sessions.post("/v1/sessions", {"id": "s"})
    body = {"input": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    answer = sessions.post("/v1/sessions/s/generate", body).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls", answer
    wait_until(lambda: sessions.client.get("/v1/sessions/s").json()["status"] == "asleep")
    more = {"input": [{"role": "user", "content": "it is done"}], "max_tokens": 4, **GREEDY}
    assert sessions.post("/v1/sessions/s/generate", more).status_code == 200
    assert sessions.client.get("/v1/sessions/s").json()["status"] == "idle"


def test_a_tool_without_a_name_is_refused(sessions: Live) -> None:
    body = {"input": [{"role": "user", "content": "go"}], "tools": [{"type": "function", "function": {"name": ""}}]}
    refused = sessions.post("/v1/sessions", {"id": "s", **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools", refused.text
    assert sessions.client.get("/v1/sessions/s").status_code == 404
    sessions.post("/v1/sessions", {"id": "s"})
    assert sessions.post("/v1/sessions/s/append", body).status_code == 400
    sessions.client.delete("/v1/sessions/s")


def test_a_killed_engine_loses_no_session(
    tiny_model: Path, tmp_path: Path, uninterrupted: tuple[list[int], list[int]]
) -> None:
    arguments = (
        str(tiny_model), "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "64", "--port", "0",
        "--swap-space", "0.02", "--kv-disk", str(tmp_path / "kv"),
    )  # fmt: skip
    with served(*arguments) as first:
        url = first.wait_for(r"(http://[\d.]+:\d+)")[1]
        wait_until(lambda: answers(url), 90)
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/v1/sessions", json={"id": "s", "input": BEGIN})
            body = {"max_tokens": 12, "return_token_ids": True, **GREEDY}
            result = client.post("/v1/sessions/s/generate", json=body).json()
            assert result["choices"][0]["token_ids"] == uninterrupted[0]
            os.kill(first.children[0], signal.SIGKILL)  # the engine: the front process starts another
            wait_until(lambda: client.get("/v1/sessions/s").status_code == 200, 90)
            client.post("/v1/sessions/s/fork", json={"id": "t"})
            result = client.post("/v1/sessions/s/generate", json={"input": MORE, **body}).json()
            assert result["choices"][0]["token_ids"] == uninterrupted[1]
        os.killpg(first.process.pid, signal.SIGKILL)
    with served(*arguments) as second:
        url = second.wait_for(r"(http://[\d.]+:\d+)")[1]
        wait_until(lambda: answers(url), 90)
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [each["id"] for each in client.get("/v1/sessions").json()["data"]] == ["s", "t"]
            result = client.post("/v1/sessions/t/generate", json={"input": MORE, **body}).json()
            assert result["choices"][0]["token_ids"] == uninterrupted[1]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_tenant_at_its_quota_gets_429_and_sees_its_use(sessions: Live) -> None:
    crowd = {"x-tenant": "crowd"}
    for number in range(50):
        made = sessions.client.post("/v1/sessions", json={"id": f"s{number}", "input": "hello"}, headers=crowd)
        assert made.status_code == 200
    asked: list[tuple[str, Any]] = [
        ("/v1/sessions", {}),
        ("/v1/sessions/s0/fork", {"id": "more"}),
        ("/v1/completions", {"prompt": "hello", "session_id": "more", "max_tokens": 2}),
    ]
    for path, body in asked:
        answer = sessions.client.post(path, json=body, headers=crowd)
        assert answer.status_code == 429, answer.text
        assert "50 of 50 sessions (max_tenant_sessions)" in answer.json()["error"]["message"]
    exported = sessions.client.get("/v1/sessions/s0/export", headers=crowd).content
    octets = {**crowd, "content-type": "application/octet-stream"}
    assert sessions.client.post("/v1/sessions/import?id=more", content=exported, headers=octets).status_code == 429
    page = sessions.client.get("/v1/sessions?limit=2", headers=crowd).json()
    tokens = page["data"][0]["num_tokens"]
    assert page["usage"]["sessions"] == 50 and page["usage"]["tokens"] == 50 * tokens and page["usage"]["bytes"] > 5000
    assert sessions.client.get("/v1/sessions").json()["usage"] == {"sessions": 0, "tokens": 0, "bytes": 0}
    assert sessions.post("/v1/sessions", {"id": "other"}).status_code == 200
    assert sessions.client.delete("/v1/sessions/s1", headers=crowd).status_code == 200
    assert sessions.client.post("/v1/sessions", json={}, headers=crowd).status_code == 200
    delete_all(sessions.client, headers=crowd)
