"""The process boundary: every message between the engine's process and the one that has the users, and their bytes.

Messages are tagged structs in msgpack, each behind its length, over a Unix domain socket. Nothing is pickled: what
arrives is data of the declared types, or an error.
"""

from __future__ import annotations

from typing import Union

import msgspec

from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import ValidationError
from quire.executor import child
from quire.executor.child import RelayedLog, Surroundings
from quire.messages.experts import Rebalanced
from quire.messages.frames import LARGEST, frame
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Key, StepOutputs
from quire.messages.request import NewRequest

# Down: to the engine


class StartEngine(Surroundings, tag=True):
    """The first message: what to make an engine of."""

    replica: int = 0
    """Which engine this is of those behind one front…"""
    replicas: int = 1
    """…and how many there are: they share the machine."""
    meeting: str = ""
    """The file in which engines that step together find each other."""


class Add(msgspec.Struct, tag=True):
    """Queue a request. Answered by its outputs, or by `RequestRefused`."""

    request: NewRequest


class Abort(msgspec.Struct, tag=True):
    """End a request; its outputs tell when that has happened."""

    id: str


class Finish(msgspec.Struct, tag=True):
    """A stop string was found: end a sample after its first `at` output tokens."""

    key: Key
    at: int
    stop_reason: str


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached blocks. Answered by `ResetReport`."""

    question: int


class Ping(msgspec.Struct, tag=True):
    """Does the loop go round? Answered by `HealthReport`."""

    question: int


class GetStats(msgspec.Struct, tag=True):
    """Answered by `StatsReport`."""

    question: int


class GetMemoryMap(msgspec.Struct, tag=True):
    """Answered by `MemoryReport`."""

    question: int
    block_bytes: int
    """What a block takes on the device."""


class SessionCall(msgspec.Struct, tag=True):
    """Something about sessions. Answered by `SessionReply`, when it is durable."""

    question: int
    op: SessionOp


class Rouse(msgspec.Struct, tag=True):
    """The so many-th request has been sent, to one of the engines that step together: all of them wake up."""

    number: int


class RebalanceExperts(msgspec.Struct, tag=True):
    """Move experts to where the load is. Answered by `RebalanceReport`; engines that step together are all asked, with
    the same number, and do it together."""

    question: int
    number: int = 0


class ShutdownEngine(msgspec.Struct, tag=True):
    """End everything and leave."""


Down = Union[
    StartEngine, Add, Abort, Finish, ResetPrefixCache, Ping, GetStats, GetMemoryMap, SessionCall, Rouse,
    RebalanceExperts, ShutdownEngine,
]  # fmt: skip


# Up: to the front


class EngineReady(msgspec.Struct, tag=True):
    """The engine is made. What it turned out to be, as far as requests and their outputs depend on it."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weight_bytes: int
    kv_bytes: int
    start_seconds: float
    key_root: bytes
    """The parent of first blocks' content keys."""


class Outputs(msgspec.Struct, tag=True):
    """What a step told about requests."""

    outputs: StepOutputs


class RequestRefused(msgspec.Struct, tag=True):
    """A request that was not taken; with an empty id, the engine itself that could not be made."""

    id: str
    error: str
    """The error's class."""
    message: str
    parameter: str | None = None


class HealthReport(msgspec.Struct, tag=True):
    question: int
    unfinished: int
    """Requests that have not ended and wait for nothing but steps."""
    steps: int = 0
    """Steps made so far: where requests are open, this number grows."""


class StatsReport(msgspec.Struct, tag=True):
    question: int
    metrics: list[Metric]


class MemoryReport(msgspec.Struct, tag=True):
    question: int
    map: MemoryMap | None = None
    error: str = ""
    """Why there is none."""


class ResetReport(msgspec.Struct, tag=True):
    question: int
    is_empty: bool
    """No block had to stay with a running request."""


class RebalanceReport(msgspec.Struct, tag=True):
    question: int
    outcome: Rebalanced | None = None
    error: RequestRefused | None = None
    """Why there is none."""


class SessionReply(msgspec.Struct, tag=True):
    """What came of a question about sessions, or why nothing did."""

    question: int
    answer: SessionAnswer | None = None
    refused: RequestRefused | None = None


class Died(msgspec.Struct, tag=True):
    """The last message of an engine that cannot go on."""

    message: str


Up = Union[
    EngineReady, Outputs, RequestRefused, HealthReport, StatsReport, MemoryReport, ResetReport, RebalanceReport,
    SessionReply, RelayedLog, Died,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_down_decoder = msgspec.msgpack.Decoder(Down)
_up_decoder = msgspec.msgpack.Decoder(Up)


class MalformedRequestError(ValidationError):
    """A request that arrived, but not as one: a value in it is of the wrong kind."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(message, "request", request_id)
        self.request_id = request_id


class MalformedCallError(ValidationError):
    """The same, of a question about sessions."""

    def __init__(self, question: int, message: str) -> None:
        super().__init__(message, "session")
        self.question = question


def encode(message: Down | Up) -> bytes:
    """A message as it goes over the socket. A value that is no plain data raises."""
    try:
        data = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ValidationError(f"this cannot be sent to the engine's process: {error}") from error
    if len(data) > LARGEST:
        raise ValidationError(f"a message of {len(data)} bytes is too large for the engine's process")
    return frame(data)


def decode_down(data: bytes) -> Down:
    """A message to the engine. One that asks for something and is not as declared raises in a way that names it."""
    try:
        return _down_decoder.decode(data)
    except msgspec.ValidationError as error:
        raw = msgspec.msgpack.decode(data)
        if isinstance(raw, dict) and raw.get("type") == "Add" and isinstance(raw.get("request"), dict):
            raise MalformedRequestError(str(raw["request"].get("id", "")), str(error)) from error
        if isinstance(raw, dict) and raw.get("type") == "SessionCall" and isinstance(raw.get("question"), int):
            raise MalformedCallError(raw["question"], str(error)) from error
        raise


def decode_up(data: bytes) -> Up:
    return _up_decoder.decode(data)


class MessageLink(child.ChildLink):
    """The engine's end of the socket."""

    def send(self, message: Down | Up) -> None:
        """Waits while the other end is behind. May be called from any thread."""
        self.send_bytes(encode(message))

    def receive(self, wait: bool, seconds: float | None = None) -> list[bytes]:
        """Messages that have come; with `wait`, at least one read's worth, unless `seconds` pass."""
        return self.take(seconds if wait else 0.0)
