"""Answers that are large although their requests are small: none is written in the event loop."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.messages.outputs import PIECE_LOGPROBS, StepOutputs
from quire.messages.plan import PromptLogprobs, TokenLogprobs
from quire.server.logprobs import MANY_DETAILS, MANY_TOKENS, takes_long
from tests.abuse.bodies import CHAT, EMBED, RESPONSES, TEXT, USER
from tests.abuse.loop_watch import LoopWatch
from tests.server.attacked_server import request_head
from tests.server.conftest import Host, Live

BOUND = 0.05
"""Seconds of CPU time in one callback of the loop. Each of these took 0.1 to 0.3 before; now they take a few ms."""
MANY = {"ignore_eos": True, "temperature": 1}
TOP = {"logprobs": True, "top_logprobs": 20}


@pytest.fixture(scope="module")
def roomy(tiny_model: Path) -> Iterator[Live]:
    """A server with a context of 16,384 tokens."""
    host = Host(
        tiny_model, hf_overrides={"max_position_embeddings": 16384}, num_gpu_blocks_override=4096, max_num_seqs=128,
        max_num_batched_tokens=4096,
    )  # fmt: skip
    live, stop = host.start()
    yield live
    live.assert_idle()
    stop()
    host.close()


def post(path: str, **body: Any) -> Callable[[Live], None]:
    def ask(live: Live) -> None:
        answer = live.post(path, body)
        assert answer.status_code == 200, answer.text[:300]

    return ask


def pipelined(request: bytes) -> Callable[[Live], None]:
    def ask(live: Live) -> None:
        with connected(live) as sock:
            sock.sendall(request * (1_000_000 // len(request)))
            assert sock.recv(100).startswith(b"HTTP/1.1 ")

    return ask


def read_late(path: str, **body: Any) -> Callable[[Live], None]:
    """A stream whose reader begins when all is generated: what came meanwhile is one piece."""

    def ask(live: Live) -> None:
        with connected(live, buffer=4096) as sock:
            data = json.dumps(body).encode()
            tokens = body["n"] * body["max_tokens"] + live.engine_metrics()["quire:generation_tokens"]
            deadline = time.monotonic() + 60
            sock.sendall(request_head(path, len(data)) + data)
            while live.engine_metrics()["quire:generation_tokens"] < tokens:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            end = b""
            while b"[DONE]" not in end:
                end = end[-20:] + sock.recv(1 << 16)

    return ask


def connected(live: Live, buffer: int | None = None) -> socket.socket:
    name, port = live.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((name, int(port)))
    sock.settimeout(60)
    return sock


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(post(TEXT, prompt=[5] * 6000, prompt_logprobs=20, max_tokens=1), id="logprobs of a prompt"),
        pytest.param(post(TEXT, prompt=[5] * 6000, logprobs=20, echo=True, max_tokens=1, stream=True), id="echo"),
        pytest.param(post(TEXT, prompt="a", n=128, logprobs=20, max_tokens=30, **MANY), id="logprobs of sequences"),
        pytest.param(post(CHAT, messages=USER, n=128, max_tokens=30, **TOP, **MANY), id="logprobs of a chat"),
        pytest.param(
            post(RESPONSES, input="a", max_output_tokens=800, include=["message.output_text.logprobs"],
                 top_logprobs=20, **MANY),
            id="logprobs of a response",
        ),
        pytest.param(read_late(CHAT, messages=USER, n=16, max_tokens=150, stream=True, **TOP, **MANY), id="late chat"),
        pytest.param(read_late(TEXT, prompt="a", n=16, max_tokens=150, stream=True, logprobs=20, **MANY), id="late"),
        pytest.param(post(TEXT, prompt=[[5] * 100] * 1000, max_tokens=1), id="many prompts"),
        pytest.param(post(EMBED, input=["abc"] * 1000), id="many vectors"),
        pytest.param(pipelined(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"), id="pipelined requests"),
        pytest.param(pipelined(request_head(TEXT, 1) + b"a"), id="pipelined bodies"),
        pytest.param(pipelined(b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 9000), id="headers"),
    ],
)  # fmt: skip
def test_no_answer_holds_the_loop(roomy: Live, ask: Callable[[Live], None]) -> None:
    gc.collect()
    gc.freeze()  # as `quire serve` does: a collection over this process's tests is not the server's work
    watch = LoopWatch(roomy._loop)
    try:
        with watch.watching():
            ask(roomy)
    finally:
        gc.unfreeze()
    assert watch.longest < BOUND


def test_logprobs_of_prompts_are_sent_in_pieces_and_none_is_missing() -> None:
    def entry(number: int, width: int) -> TokenLogprobs:
        return TokenLogprobs(list(range(width)), [float(number)] * width, 1)

    found = [
        (("a", 0), PromptLogprobs(7, [entry(i, 21) for i in range(1000)])),
        (("b", 0), PromptLogprobs(0, [entry(i, 1) for i in range(50)])),
        (("c", 0), PromptLogprobs(3, [entry(i, 100_000) for i in range(2)])),
        (("d", 0), PromptLogprobs(0, [])),
    ]
    outputs = StepOutputs(keys=[("x", 0)], tokens=[5], prompt_logprobs=list(found))
    pieces = list(outputs.pieces())
    assert [piece.keys for piece in pieces] == [[]] * (len(pieces) - 1) + [[("x", 0)]]
    for piece in pieces:
        sizes = [len(one.ids) for _, part in piece.prompt_logprobs for one in part.entries]
        assert sum(sizes) <= PIECE_LOGPROBS or len(sizes) == 1
    together: dict[tuple[str, int], list[float]] = {}
    for piece in pieces:
        for key, part in piece.prompt_logprobs:
            mine = together.setdefault(key, [])
            start = next(whole.start for other, whole in found if other == key)
            assert part.start == start + len(mine)
            mine += [one.values[0] for one in part.entries]
    assert together == {key: [one.values[0] for one in whole.entries] for key, whole in found if whole.entries}
    assert [piece.tokens for piece in StepOutputs(keys=[("x", 0)], tokens=[1]).pieces()] == [[1]]


@pytest.mark.parametrize(
    ("tokens", "top", "is_long"),
    [
        (MANY_TOKENS, None, False), (MANY_TOKENS + 1, None, True), (MANY_DETAILS - 1, 0, False),
        (MANY_DETAILS + 1, 0, True), (MANY_DETAILS // 21 + 1, 20, True), (MANY_DETAILS // 21, 20, False), (1, -1, True),
    ],
)  # fmt: skip
def test_what_is_written_in_a_thread(tokens: int, top: int | None, is_long: bool) -> None:
    assert takes_long(tokens, top) is is_long
