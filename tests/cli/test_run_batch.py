"""`quire run-batch`: every line gets its result, whatever the others are."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from quire.cli.batch.files import BatchInput, BatchOutput, BatchResult, LineError, read_line
from quire.cli.batch.metrics_listener import metrics_listener
from quire.cli.batch.runner import HELD_FACTOR, BatchRunner, OrderedResults, post
from quire.cli.bench.load.client import RunCounters
from quire.cli.interrupts import cancelled_by_interrupt
from quire.cli.main import main
from quire.cli.run_batch import _report
from quire.errors import ValidationError
from quire.server.config import ServerConfig
from quire.server.serve import listening
from tests.adapters.beside import Beside
from tests.server.scrape import Scrape

ENGINE = ["--dtype", "float32", "--num-gpu-blocks-override", "128", "--device", "cpu", "--served-model-name", "tiny"]


def line(custom_id: str = "a", url: str = "/v1/completions", method: str = "POST", **body) -> str:
    body = {"model": "tiny", **body}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def completion(custom_id: str, **more) -> str:
    return line(custom_id, **{"prompt": "the world", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more})


def by_id(text: str) -> dict[str, dict]:
    results = [json.loads(each) for each in text.splitlines()]
    return {result["custom_id"]: result for result in results}


def test_every_line_is_run_and_invalid_lines_do_not_stop_the_others(quire, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "sk-not-for-batches")
    chat = {"messages": [{"role": "user", "content": "the world"}], "max_tokens": 3, "ignore_eos": True}
    lines = [
        completion("text"),
        "",
        line("chat", "/v1/chat/completions", **chat),
        line("vector", "/v1/embeddings", input="the world"),
        line("pair", "/score", text_1="the world", text_2="a world"),
        "this is no JSON",
        completion("streamed", stream=True),
        completion("text"),
        completion("hot", temperature=900),
        completion("other", model="gpt-4o"),
        line("elsewhere", "/v1/files"),
        completion("last"),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"]
    ran = quire("run-batch", tiny_model, *files, *ENGINE)
    assert ran.code == 1, ran.err
    assert "5 completed, 6 failed" in ran.err
    text = (tmp_path / "out.jsonl").read_text()
    assert text.count("\n") == 11
    found = by_id(text)
    statuses = {name: result["response"]["status_code"] for name, result in found.items() if result["response"]}
    assert statuses == {"chat": 200, "vector": 200, "pair": 200, "hot": 400, "other": 404, "last": 200} | (
        {"text": 200} if found["text"]["response"] else {}
    )
    for result in found.values():
        assert result["id"].startswith("batch_req_")
        assert set(result) == {"id", "custom_id", "response", "error"}
        is_ok = result["response"] is not None and result["response"]["status_code"] == 200
        assert is_ok == (result["error"] is None)
        assert result["response"] is None or is_ok == (result["response"]["body"] is not None)
    assert found["last"]["response"]["request_id"]
    assert found["last"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["vector"]["response"]["body"]["data"][0]["embedding"]
    assert "temperature" in found["hot"]["error"]["error"]["message"]
    assert found["other"]["error"]["error"]["code"] == 404
    order = [result["custom_id"] for result in map(json.loads, text.splitlines())]
    assert order == ["text", "chat", "vector", "pair", None, "streamed", "text", "hot", "other", "elsewhere", "last"]
    assert found["streamed"]["error"]["code"] == "stream_not_supported"
    assert found["elsewhere"]["error"]["code"] == "invalid_url"
    assert -1 <= found["pair"]["response"]["body"]["data"][0]["score"] <= 1
    assert found[None]["error"]["message"].startswith("line 6: ")
    texts = [each["response"]["body"]["choices"][0]["text"] for each in map(json.loads, text.splitlines())
             if each["custom_id"] in ("text", "last") and each["response"]]  # fmt: skip
    assert len(texts) == 2
    assert len(set(texts)) == 1  # the same greedy request gives the same response


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
VLLM_BATCH = [
    line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=3),
    line("streamed", "/v1/chat/completions", stream="True", messages=[{"role": "user", "content": "Hello"}]),
    line("other model", "/v1/chat/completions", model="other", messages=[{"role": "user", "content": "Hello"}]),
    line("bad url", "/bad_url"),
    line("vector", "/v1/embeddings", input="Hello"),
    *(line(url, url, queries="the world", documents=["a", "b"]) for url in ("/score", "/v1/score")),
    *(line(url, url, query="the world", documents=["a", "b"]) for url in ("/rerank", "/v1/rerank", "/v2/rerank")),
    line("tool", "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], tools=[TOOL],
         tool_choice="required", max_tokens=100, seed=3),
]  # fmt: skip


@pytest.mark.slow
def test_batches_of_vllms_tests(quire, tiny_model, tmp_path, monkeypatch):
    """tests/entrypoints/launchers/test_run_batch.py, and the batch of serve/instrumentator/test_metrics.py."""
    ours, theirs = os.pipe()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(ours, "rb")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages: list[Scrape] = []

    def look() -> None:
        """Ends the input when what it asks for is counted."""
        with os.fdopen(theirs, "w") as pipe, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            pipe.write("\n".join(VLLM_BATCH) + "\n")
            pipe.flush()
            deadline, successes = time.monotonic() + 60, 0.0
            while successes < 8 and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                    pages.append(Scrape(client.get("/metrics").text))
                    successes = pages[-1].sum("vllm:request_success_total")
                time.sleep(0.05)

    watcher = threading.Thread(target=look)
    watcher.start()
    flags = ["--no-enable-tool-preamble", "--enable-metrics", "--url", "127.0.0.1", "--port", str(port)]
    code = main(["run-batch", str(tiny_model), "-i", "-", "-o", str(tmp_path / "out.jsonl"), *ENGINE, *flags])
    watcher.join(60)
    assert code == 0
    assert pages[-1].sum("vllm:request_success_total") >= 8
    found = by_id((tmp_path / "out.jsonl").read_text())
    failed = {name for name, result in found.items() if result["error"] is not None}
    assert failed == {"streamed", "other model", "bad url"} and len(found) == len(VLLM_BATCH)
    message = found["tool"]["response"]["body"]["choices"][0]["message"]
    assert {use["function"]["name"] for use in message["tool_calls"]} == {"add"}
    (tmp_path / "empty").write_text("")
    none = quire("run-batch", tiny_model, "-i", tmp_path / "empty", "-o", tmp_path / "none.jsonl", *ENGINE)
    assert (none.code, (tmp_path / "none.jsonl").read_text()) == (0, "")


def test_metrics_while_a_batch_runs():
    async def page():
        return b"a 1\n"

    async def work():
        with listening(ServerConfig(port=0)) as (sock, address):
            async with metrics_listener(sock, page), httpx.AsyncClient(base_url=address) as client:
                got = [await client.get(path) for path in ("/metrics", "/")]
                return [(answer.status_code, answer.text, answer.headers["content-type"][:10]) for answer in got]

    assert asyncio.run(work()) == [(200, "a 1\n", "text/plain")] * 2


def test_a_port_in_use_is_found_before_the_model_is_loaded(quire, tiny_model, tmp_path):
    (tmp_path / "in").write_text("")
    with listening(ServerConfig(port=0)) as (sock, _):
        flags = ["--enable-metrics", "--port", str(sock.getsockname()[1])]
        failed = quire("run-batch", tiny_model, "-i", tmp_path / "in", "-o", tmp_path / "out", *ENGINE, *flags)
    assert failed.code == 2 and "cannot listen on" in failed.err and "loading" not in failed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_adapters_are_models_of_a_batch(quire, tiny_model, tmp_path):
    beside = Beside(tiny_model, tmp_path)
    folder = beside.write("mine", target_modules="all-linear")
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 6, "return_token_ids": True, "prompt": [5, 9, 20]}
    lines = [line(name, model=model, **greedy) for name, model in (("a", "mine"), ("b", "tiny"), ("c", "another"))]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"]
    quire("run-batch", tiny_model, *files, *ENGINE, "--enable-lora", "--lora-modules", f"mine={folder}")
    found = by_id((tmp_path / "out.jsonl").read_text())
    for name, weights in (("a", {"mine": 1.0}), ("b", {})):
        tokens = found[name]["response"]["body"]["choices"][0]["token_ids"]
        assert tokens == beside.tokens([5, 9, 20], 6, weights)
    assert found["c"]["response"]["status_code"] == 404


@pytest.mark.slow
def test_ctrl_c_keeps_the_results_and_the_next_run_continues(tiny_model, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n".join(completion(str(i), max_tokens=200) for i in range(60)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire.cli.main", "run-batch", str(tiny_model), "-i", str(tmp_path / "in.jsonl")]
    command += ["-o", str(out), "--max-concurrency", "2", *ENGINE]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 2) and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "run the same command again to continue" in said
    answered = out.read_text().count("\n")
    assert 2 <= answered < 60
    with out.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_')  # as after a kill in the middle of a line
    second = subprocess.run(command[: -len(ENGINE) - 2] + ENGINE, stderr=subprocess.PIPE, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert f"{60 - answered} completed, 0 failed, {answered} done before" in second.stderr
    assert out.read_text().count("\n") == 60
    assert sorted(map(int, by_id(out.read_text()))) == list(range(60))


# Without a model: the application is a stand-in that is known.


async def busy_twice(scope, receive, send):
    """Refuses the first two requests, then returns what it was sent."""
    busy_twice.calls += 1
    body = (await receive())["body"]
    is_busy = busy_twice.calls <= 2
    headers = [(b"Retry-After", b"0")] if is_busy else []
    await send({"type": "http.response.start", "status": 429 if is_busy else 200, "headers": headers})
    seen = {"path": scope["path"], "body": json.loads(body), "usage": {"completion_tokens": 5}}
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


def run_with(app, text: str, output: str, concurrency: int = 4) -> BatchRunner:
    batch = BatchRunner(app, "key", concurrency, RunCounters())

    async def work():
        with BatchInput(text) as source, BatchOutput(output) as out:
            await batch.run(source, out)

    asyncio.run(work())
    return batch


def test_requests_to_a_busy_engine_are_retried(tmp_path):
    busy_twice.calls = 0
    (tmp_path / "in").write_text(completion("a"))
    batch = run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out"))
    result = by_id((tmp_path / "out").read_text())["a"]
    assert result["response"]["status_code"] == 200
    assert result["response"]["body"]["body"]["prompt"] == "the world"
    assert (batch.counters.done, batch.counters.failed, batch.counters.tokens) == (1, 0, 5)


def test_an_interrupt_keeps_the_results_and_the_next_run_does_the_rest(tmp_path):
    asked, answered = [], []

    async def app(scope, receive, send):
        name = json.loads((await receive())["body"])["prompt"]
        asked.append(name)
        if len(asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        answered.append(name)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def interrupted():
        with (
            BatchInput(str(tmp_path / "in")) as source,
            BatchOutput(str(tmp_path / "out")) as output,
            cancelled_by_interrupt(),
        ):
            await BatchRunner(app, "key", 1, RunCounters()).run(source, output)

    (tmp_path / "in").write_text("\n".join(completion(str(i), prompt=str(i)) for i in range(12)))
    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(interrupted())
    assert set(by_id((tmp_path / "out").read_text())) == set(answered) == {"0", "1", "2", "3", "4"}
    with (tmp_path / "out").open("a") as file:
        file.write('{"id": "batch_req_1", "custom_')  # as after a kill in the middle of a line
    batch = run_with(app, str(tmp_path / "in"), str(tmp_path / "out"))
    assert (batch.skipped, batch.counters.done) == (5, 7)
    assert asked[6:] == [str(i) for i in range(5, 12)]
    assert (tmp_path / "out").read_text().count("\n") == 12
    assert len(by_id((tmp_path / "out").read_text())) == 12


def test_an_invalid_line_is_reported_once_however_often_the_batch_is_run(tmp_path):
    busy_twice.calls = 2
    wrong = ["no JSON", "[]", "no JSON", line("elsewhere", "/v1/files"), completion("a", stream=True)]
    (tmp_path / "in").write_text("\n".join([*wrong, completion("b"), completion("b")]))
    first = run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out"))
    assert (first.counters.done, first.counters.failed, first.skipped) == (7, 6, 0)
    text = (tmp_path / "out").read_text()
    again = run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out"))
    assert (again.counters.done, again.skipped) == (0, 7)
    assert (tmp_path / "out").read_text() == text
    (tmp_path / "in").write_text("\n".join([*wrong, completion("b"), "no JSON either"]))
    grown = run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out"))
    assert (grown.counters.done, grown.counters.failed, grown.skipped) == (1, 1, 6)


def test_refused_lines_that_have_moved_are_not_reported_again(tmp_path):
    """Line numbers are in the messages; a line that comes before changes them."""
    busy_twice.calls = 2
    wrong = ["no JSON", line("elsewhere", "/v1/files"), '{"custom_id": 5}', completion("a", stream=True), "no JSON"]
    (tmp_path / "in").write_text("\n".join(wrong))
    assert run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out")).counters.done == 5
    for added in ("", completion("b"), "no JSON", "[]"):
        text = (tmp_path / "in").read_text()
        (tmp_path / "in").write_text(f"{added}\n{text}")
        again = run_with(busy_twice, str(tmp_path / "in"), str(tmp_path / "out"))
        assert again.counters.done == (1 if added else 0), added
    assert (tmp_path / "out").read_text().count("\n") == 8


def test_results_may_go_to_standard_output(tmp_path, capsys):
    busy_twice.calls = 2
    (tmp_path / "in").write_text(completion("a") + "\n" + completion("b"))
    run_with(busy_twice, str(tmp_path / "in"), "-")
    assert set(by_id(capsys.readouterr().out)) == {"a", "b"}


def test_concurrency_is_limited_and_results_are_written_at_once(tmp_path):
    most = now = 0
    lines_at_fifth = 0

    async def app(scope, receive, send):
        nonlocal most, now, lines_at_fifth
        now += 1
        most = max(most, now)
        name = json.loads((await receive())["body"])["prompt"]
        if name == "5":
            lines_at_fifth = (tmp_path / "out").read_text().count("\n")
        await asyncio.sleep(0.01)
        now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    (tmp_path / "in").write_text("\n".join(completion(str(i), prompt=str(i)) for i in range(12)))
    run_with(app, str(tmp_path / "in"), str(tmp_path / "out"), concurrency=2)
    assert most == 2
    assert lines_at_fifth >= 3
    assert len(by_id((tmp_path / "out").read_text())) == 12


def test_results_are_in_the_order_of_lines_and_few_wait_for_a_slow_one(tmp_path):
    begun: list[int] = []
    is_slow_done = asyncio.Event()

    async def app(scope, receive, send):
        name = json.loads((await receive())["body"])["prompt"]
        begun.append(int(name))
        if name == "0":
            await is_slow_done.wait()
        elif len(begun) == 2 * HELD_FACTOR:
            is_slow_done.set()  # all that may be open are: without this line, no other could begin
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    (tmp_path / "in").write_text("\n".join(completion(str(i), prompt=str(i)) for i in range(80)))
    run_with(app, str(tmp_path / "in"), str(tmp_path / "out"), concurrency=2)
    order = [json.loads(each)["custom_id"] for each in (tmp_path / "out").read_text().splitlines()]
    assert order == [str(i) for i in range(80)]


def test_no_line_begins_while_too_many_results_wait():
    async def work():
        written: list[str] = []
        results = OrderedResults(SimpleNamespace(write=written.append), 3)
        for number in (1, 2, 3):
            await asyncio.wait_for(results.wait_for_room(), 5)
            results.begin(number)
        results.finish(2, "b")
        results.finish(3, "c")
        waiting = asyncio.ensure_future(results.wait_for_room())
        await asyncio.sleep(0)
        assert (waiting.done(), written) == (False, [])
        results.finish(1, "a")
        await asyncio.wait_for(waiting, 5)
        assert written == ["a", "b", "c"]
        results.begin(4)
        results.begin(5)
        results.finish(5, "e")
        results.write_rest()
        assert written[3:] == ["e"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("lines", "code"),
    [([completion("a")], 0), ([completion("a", stream=True), line("b", "/bad_url")], 0), (["no JSON"], 1)],
    ids=["all", "failed requests", "a line that is no request"],
)
def test_the_exit_code_says_whether_all_lines_are_requests(tmp_path, lines, code, capsys):
    async def refusing(scope, receive, send):
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "no", "code": 400}}'})

    (tmp_path / "in").write_text("\n".join(lines))
    batch = run_with(refusing, str(tmp_path / "in"), str(tmp_path / "out"))
    assert batch.counters.failed == len(lines)
    assert _report(batch, was_stopped=False) == code
    if lines == [completion("a")]:
        result = by_id((tmp_path / "out").read_text())["a"]
        assert result["response"]["status_code"] == 400
        assert result["response"]["body"] is None
        assert result["error"] == {"error": {"message": "no", "code": 400}}


@pytest.mark.parametrize("url", ["/score", "/v1/score", "/rerank", "/v2/rerank", "/classify", "/pooling"])
def test_urls_of_other_tasks(url):
    assert read_line(line("a", url).encode(), 1).url == url


def test_a_slow_input_pipe_does_not_block_other_requests(tmp_path, monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(ours, "rb")))

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        if json.loads((await receive())["body"])["prompt"] == "first":
            os.write(theirs, completion("b", prompt="second").encode() + b"\n")  # only after the first has started
            os.close(theirs)

    os.write(theirs, completion("a", prompt="first").encode() + b"\n")
    run_with(app, "-", str(tmp_path / "out"))
    assert set(by_id((tmp_path / "out").read_text())) == {"a", "b"}


def test_the_application_sees_a_client_that_does_not_disconnect():
    async def app(scope, receive, send):
        assert (await receive())["body"] == b"{}"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receive(), 0.02)
        assert scope["method"] == "POST"
        assert (b"x-a", b"b") in scope["headers"]
        await send({"type": "http.response.start", "status": 204, "headers": [(b"Retry-After", b"3")]})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    answer = asyncio.run(post(app, "/x", b"{}", {"x-a": "b"}))
    assert (answer.status, answer.headers, answer.body) == (204, {"retry-after": "3"}, b"12")


@pytest.mark.parametrize(
    ("text", "code", "said", "custom_id"),
    [
        ("{", "invalid_line", "line 3", None),
        ("[]", "invalid_line", "Expected `object`", None),
        ('{"custom_id": "x"}', "invalid_line", "missing required field `url`", "x"),
        ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', "invalid_line", "Expected `str`", None),
        (line(""), "invalid_line", "custom_id must have", None),
        (line("x", method="GET"), "invalid_method", "'GET'", "x"),
        (line("x", "/health"), "invalid_url", "'/health'", "x"),
        (line("x", stream=1), "stream_not_supported", "leave stream out", "x"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": []}', "invalid_line", "body: Expected `object`", "x"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"a"}}', "invalid_line", "JSON", None),
    ],
)
def test_invalid_lines(text, code, said, custom_id):
    with pytest.raises(LineError) as caught:
        read_line(text.encode(), 3)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert said in str(caught.value)


def test_an_output_file_with_other_content_is_not_appended_to(tmp_path):
    (tmp_path / "notes").write_text("dear diary\n")
    with pytest.raises(ValidationError, match="line 1, is not a batch result"):
        BatchOutput(str(tmp_path / "notes"))
    with BatchOutput(str(tmp_path / "notes"), overwrite=True) as output:
        output.write(BatchResult.of("a", 200, "r", b"{}"))
    assert set(by_id((tmp_path / "notes").read_text())) == {"a"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "/nowhere", "-o", "/tmp/x"], "--input-file /nowhere: No such file"),
        (["-i", __file__, "-o", "/nowhere/x"], "--output-file /nowhere/x: No such file"),
        (["-i", __file__], "-o/--output-file"),
        (["-i", "https://example.com/in.jsonl", "-o", "/tmp/x"], "only files are read and written"),
        (["-i", __file__, "-o", "http://example.com/out"], "only files are read and written"),
    ],
)
def test_bad_input_is_one_line(quire, arguments, said):
    ran = quire("run-batch", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err
