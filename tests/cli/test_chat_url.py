"""`quire chat --url`: chat with the model of a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from quire.cli.remote_conversation import RemoteConversation
from tests.cli.stub_server import running

ANSWER = "w0 w1 w2 w3 "


def test_every_piped_line_gets_a_reply_and_the_server_gets_the_messages_before(quire):
    with running() as stub:
        ran = quire("chat", "--url", stub.url, "--system", "Be kind", "--stats", stdin="Hi\n\nAnd?\n")
        assert (ran.code, ran.out) == (0, f"{ANSWER}\n{ANSWER}\n"), ran.err
        assert ran.err.count("[4 tokens") == 2
        assert "prompt 7, 3 cached]" in ran.err
        opening = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
        assert stub.seen[0].body["messages"] == opening
        said = {"role": "assistant", "content": ANSWER}
        assert stub.seen[1].body["messages"] == [*opening, said, {"role": "user", "content": "And?"}]


def test_only_given_flags_are_sent(quire, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    with running() as stub:
        quire("chat", "--url", stub.url + "/v1/", stdin="Hi\n")
        quire(*f"chat other --url {stub.url} --api-key sk-flag --temperature 0.5 --seed 3".split(), stdin="Hi\n")
        first, second = stub.seen
    assert set(first.body) == {"model", "messages", "stream", "stream_options"}
    assert (first.path, first.body["model"]) == ("/v1/chat/completions", "stub")
    assert (second.body["model"], second.body["temperature"], second.body["seed"]) == ("other", 0.5, 3)
    assert first.headers["authorization"] == "Bearer sk-environment"
    assert second.headers["authorization"] == "Bearer sk-flag"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("429", "the server returned HTTP 429: the queue is full"),
        ("hang up", "disconnected"),
        ("cut", "chunked read"),
        ("malformed", "sent a malformed event"),
        ("error event", "the engine died"),
        ("no end", "the response was cut off"),
    ],
)
def test_a_failed_response_is_an_error_and_the_conversation_continues(quire, fault, said):
    with running(fault=fault) as stub:
        ran = quire("chat", "--url", stub.url, stdin="Hi\n/stats\n")
    assert ran.code == 2
    assert said in ran.err
    assert "replies" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "is the server running?"),
        (["--url", "127.0.0.1:9"], "127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is for a local model"),
        (["--api-key", "x"], "--api-key needs --url"),
    ],
)
def test_bad_input_is_one_line(quire, arguments, said):
    ran = quire("chat", *arguments, stdin="Hi\n")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_ctrl_c_stops_the_reply_and_closes_the_connection(capsys):
    with running(gap=0.02, tokens=500) as stub:
        conversation = RemoteConversation(stub.url, None, None, {})
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        reply = conversation.ask("Hi")
        assert reply.note == "(stopped)"
        assert 0 < reply.tokens < 100
        until = time.monotonic() + 5
        while not stub.hang_ups and time.monotonic() < until:
            time.sleep(0.01)
        assert stub.hang_ups == 1
        stub.tokens = 4
        assert conversation.ask("And?").text == ANSWER
        conversation.close()


def test_the_time_to_the_first_token_counts_from_the_question(capsys):
    with running(first=0.2, gap=0.02, tokens=11) as stub:
        conversation = RemoteConversation(stub.url, None, None, {})
        reply = conversation.ask("Hi")
        conversation.close()
    assert 0.2 <= reply.seconds_to_first < 0.3
    assert reply.tokens_per_second == pytest.approx(50, rel=0.15)


def test_chat_with_a_server_needs_no_torch():
    with running() as stub:
        code = (
            "import sys; from quire.cli.main import main\n"
            f"assert main(['chat', '--url', {stub.url!r}]) == 0\n"
            "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
        )
        ran = subprocess.run([sys.executable, "-c", code], input=b"Hi\n", stdout=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stdout.decode()) == (0, f"{ANSWER}\n")
