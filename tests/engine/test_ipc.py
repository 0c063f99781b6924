"""The process boundary: messages round-trip in whatever pieces they arrive, and malformed ones are rejected."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from typing import Any

import msgspec
import pytest

from quire.engine import ipc
from quire.engine.process import refusal
from quire.engine.remote import LinkedEngine, error_of
from quire.engine.stats import Metric
from quire.errors import CacheTooSmallError, EngineDeadError, QuireError, ValidationError
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.frames import TURN_BYTES, FrameSplitter
from quire.messages.outputs import Finished, Started, StepOutputs
from quire.messages.plan import PromptLogprobs, TokenLogprobs
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.server.fronts.link import FrontLink

PARAMS = SamplingParams(
    n=2, temperature=0.5, top_p=0.9, seed=2**64 - 1, stop=["a", "é"], stop_token_ids=[3], logit_bias={5: -1.5, 7: 2},
    bad_words=["x"], allowed_token_ids=[1, 2], extra_args={"k": [1, {"z": None}]}, output_kind=RequestOutputKind.DELTA,
)  # fmt: skip
REQUEST = NewRequest(
    "a-1", [1, 2, 3], PARAMS, 40, [0], [[4, 5]], [b"\x00\xff" * 16], "salt", False, 2**63 - 1, -4, "tenant", 1.5
)
OUTPUTS = StepOutputs(
    keys=[("a", 0), ("b", 1)],
    tokens=[5, 6, 7],
    counts=[2, 1],
    logprobs={1: TokenLogprobs([5, 6], [-0.5, float("-inf")], 3)},
    prompt_logprobs=[(("a", 0), PromptLogprobs(1, [TokenLogprobs([1], [-2.0], 1)]))],
    started=[Started(("b", 1), 12.5, 16)],
    finished=[Finished(("a", 0), "stop", 7, 2), Finished(("b", 1), "error", None, 0, "why")],
)
DOWN: list[Any] = [
    ipc.StartEngine(
        {"model": "m", "seed": 3, "hf_overrides": {"a": [1.5]}}, {"name": "m", "gguf": None}, ["/x", ""], 20
    ),
    ipc.Add(REQUEST), ipc.Abort("a-1"), ipc.Finish(("a-1", 1), 4, "stop"), ipc.ResetPrefixCache(1), ipc.Ping(2),
    ipc.GetStats(3), ipc.ShutdownEngine(),
]  # fmt: skip
UP: list[Any] = [
    ipc.EngineReady("cpu", "float32", 256, 8, 512, 16, 128, 2048, 1 << 40, 1 << 41, 0.5, b"\x01" * 32),
    ipc.Outputs(OUTPUTS),
    ipc.RequestRefused("a", "ValidationError", "why", "prompt"), ipc.HealthReport(2, 5), ipc.ResetReport(1, False),
    ipc.StatsReport(3, [Metric("quire:steps", "counter", 4.0)]), ipc.RelayedLog("quire.x", 20, "line"), ipc.Died("why"),
]  # fmt: skip


def payload(message: Any) -> bytes:
    (data,) = FrameSplitter().feed(ipc.encode(message))
    return data


@pytest.mark.parametrize("message", DOWN, ids=lambda message: type(message).__name__)
def test_messages_to_the_engine_round_trip(message: Any) -> None:
    assert ipc.decode_down(payload(message)) == message


@pytest.mark.parametrize("message", UP, ids=lambda message: type(message).__name__)
def test_messages_to_the_front_round_trip(message: Any) -> None:
    assert ipc.decode_up(payload(message)) == message


def test_messages_are_decoded_from_any_pieces() -> None:
    stream = b"".join(map(ipc.encode, DOWN * 20))
    pieces, random_source, at = [], random.Random(1), 0
    while at < len(stream):
        size = random_source.choice([1, 2, 3, 5, 200, 4000])
        pieces.append(stream[at : at + size])
        at += size
    frames = FrameSplitter()
    assert [ipc.decode_down(data) for piece in pieces for data in frames.feed(piece)] == DOWN * 20


def test_a_reader_that_stops_early_loses_nothing() -> None:
    frames = FrameSplitter()
    first = next(iter(frames.feed(ipc.encode(DOWN[2]) + ipc.encode(DOWN[3]))))
    assert [ipc.decode_down(data) for data in (first, *frames.feed(b""))] == DOWN[2:4]


class Linked(LinkedEngine):
    """An engine whose end of the socket is the test."""

    pid, _title, _has_ended = 0, "it", False

    def _describe_end(self) -> str:
        return "it has ended"

    def _wait_for_end(self, seconds: float) -> bool:
        return False


@pytest.mark.parametrize("is_front", [False, True])
def test_a_backlog_is_read_in_many_passes_of_the_loop(is_front: bool) -> None:
    """Between them, other streams get their tokens. A message longer than a turn takes no more turns for it."""
    small = ipc.encode(ipc.HealthReport(1, 2, 3))
    long = ipc.encode(ipc.RequestRefused("a", "QuireError", "x" * 300_000))
    in_pass: Counter[int] = Counter()

    async def work() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        passes = 0

        def note(_: Any) -> None:
            in_pass[passes] += 1

        link: Any = FrontLink(ours) if is_front else Linked(None, None, ours)  # type: ignore[arg-type, abstract]
        setattr(link, "on_payload" if is_front else "on_message", note)
        backlog = small * (60_000 // len(small)) + long
        assert theirs.send(backlog) == len(backlog)
        link.attach()
        while passes < 100:
            await asyncio.sleep(0)
            passes += 1
        link.close(*([] if is_front else ["the test ends"]))
        theirs.close()
        ours.close()

    asyncio.run(work())
    assert in_pass.total() == 60_000 // len(small) + 1
    assert max(in_pass.values()) <= TURN_BYTES // len(small) + 1
    last_small, last = sorted(in_pass)[-2:]
    assert last - last_small <= 4, in_pass


def test_an_invalid_request_is_named_and_any_other_invalid_message_raises() -> None:
    wrong = msgspec.msgpack.encode({"type": "Add", "request": {"id": "a-1", "prompt": "text"}})
    with pytest.raises(ipc.MalformedRequestError) as caught:
        ipc.decode_down(wrong)
    assert refusal(caught.value.request_id, caught.value).id == "a-1"
    with pytest.raises(msgspec.ValidationError):
        ipc.decode_down(msgspec.msgpack.encode({"type": "Ping", "question": "x"}))
    with pytest.raises(ValidationError, match="cannot be sent"):
        ipc.encode(ipc.StartEngine({"x": object()}, {}, [], 0))


def test_errors_keep_their_class() -> None:
    wrong = error_of(refusal("a", ValidationError("why", "prompt", 3)))
    assert (type(wrong), str(wrong), getattr(wrong, "parameter", None)) == (ValidationError, "why", "prompt")
    assert type(error_of(refusal("a", CacheTooSmallError("why")))) is CacheTooSmallError
    assert type(error_of(refusal("a", ipc.MalformedRequestError("a", "why")))) is ValidationError
    other, none = error_of(refusal("a", KeyError("why"))), error_of(refusal("", KeyError("why")))
    assert type(other) is QuireError and "KeyError" in str(other)
    assert type(none) is EngineDeadError and "KeyError" in str(none)


def test_keys_are_the_same_in_both_processes() -> None:
    theirs = ContentKeys(4, b"model")
    ours = ContentKeys.rooted(4, theirs.root())
    for salt in ("", "s"):
        assert ours.of(range(20), salt) == theirs.of(range(20), salt)


def test_a_link_raises_when_the_other_end_has_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        link = ipc.MessageLink(ours)
        assert link.receive(wait=False) == []
        with theirs:
            ipc.MessageLink(theirs).send(DOWN[2])
            assert [ipc.decode_down(data) for data in link.receive(wait=True)] == [DOWN[2]]
        with pytest.raises(EOFError):
            link.receive(wait=True)
