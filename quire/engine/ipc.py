"""The process boundary: every message between the engine's process and the front, and their encoding.

Messages are tagged structs in msgpack, each prefixed with its length, over a Unix domain socket. Nothing is pickled:
what arrives is data of the declared types, or an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import msgspec

from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import ValidationError
from quire.executor.child import ChildContext, ChildLink, RelayedLog
from quire.messages.engine_view import BlockDetail, EngineView, RequestTimeline, Tier
from quire.messages.experts import Rebalanced
from quire.messages.frames import LARGEST, frame
from quire.messages.media import EncoderLimits, decode_array, encode_array
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Key, StepOutputs
from quire.messages.request import NewRequest

if TYPE_CHECKING:
    from quire.engine.engine_info import EngineInfo

# Down: to the engine


class StartEngine(ChildContext, tag=True):
    """The first message: which engine to build."""

    replica: int = 0
    """Number of this engine among those behind one front…"""
    replicas: int = 1
    """…and how many there are: they share the machine."""
    rendezvous: str = ""
    """Path of the file through which engines in lockstep find each other."""
    grammar_ends: list[int] = msgspec.field(default_factory=list)
    """End-of-sequence tokens of requests with a grammar; if there have been any, the engine gets ready for more while
    it starts."""


class Add(msgspec.Struct, tag=True):
    """Queue a request. Answered by its outputs, or by `RequestRefused`."""

    request: NewRequest


class Abort(msgspec.Struct, tag=True):
    """Abort a request; its last output reports the end."""

    id: str


class Finish(msgspec.Struct, tag=True):
    """A stop string was found: finish a sequence after its first `at` output tokens."""

    key: Key
    at: int
    stop_reason: str


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Drop all cached blocks. Answered by `ResetReport`."""

    question: int


class Ping(msgspec.Struct, tag=True):
    """Health check of the loop. Answered by `HealthReport`."""

    question: int


class GetStats(msgspec.Struct, tag=True):
    """Answered by `StatsReport`."""

    question: int


class GetMemoryMap(msgspec.Struct, tag=True):
    """Answered by `MemoryReport`."""

    question: int
    block_bytes: int
    """Bytes of a block on the device."""


class GetView(msgspec.Struct, tag=True):
    """What the page shows of the engine now. Answered by `ViewReport`."""

    question: int


class GetTimeline(msgspec.Struct, tag=True):
    """What happened to a recent request. Answered by `ViewReport`, with nothing if it is not known."""

    question: int
    id: str


class GetBlock(msgspec.Struct, tag=True):
    """What uses a block. Answered by `ViewReport`."""

    question: int
    block: int
    tier: Tier = "device"


class SessionCall(msgspec.Struct, tag=True):
    """A session operation. Answered by `SessionReply` once it is durable."""

    question: int
    op: SessionOp


class Wake(msgspec.Struct, tag=True):
    """Request `number`, counted over all engines in lockstep, has been sent to one of them: all wake up."""

    number: int


class PrepareGrammars(msgspec.Struct, tag=True):
    """Another engine has got a request with a grammar: get ready to compile one. `end_ids`: the end-of-sequence
    tokens."""

    end_ids: list[int]


class RebalanceExperts(msgspec.Struct, tag=True):
    """Move experts to balance the load. Answered by `RebalanceReport`. Engines in lockstep all get the same number and
    move them together."""

    question: int
    number: int = 0


class ShutdownEngine(msgspec.Struct, tag=True):
    """Abort everything and exit."""


Down = Union[
    StartEngine, Add, Abort, Finish, ResetPrefixCache, Ping, GetStats, GetMemoryMap, GetView, GetTimeline, GetBlock,
    SessionCall, Wake, PrepareGrammars, RebalanceExperts, ShutdownEngine,
]  # fmt: skip


# Up: to the front


class EngineReady(msgspec.Struct, tag=True):
    """The engine has started. The fields of an `EngineInfo` that the front needs."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    cache_tokens: int
    weight_bytes: int
    kv_bytes: int
    start_seconds: float
    key_root: bytes
    """The parent of first blocks' content keys."""
    encoder: EncoderLimits = EncoderLimits()
    """What requests may have beside token ids."""


def ready_message(info: EngineInfo) -> EngineReady:
    """A started engine as the message that describes it."""
    return EngineReady(
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        cache_tokens=info.cache_tokens,
        weight_bytes=info.weight_bytes,
        kv_bytes=info.kv_bytes,
        start_seconds=info.start_seconds,
        key_root=info.keys.root(),
        encoder=info.encoder,
    )


class Outputs(msgspec.Struct, tag=True):
    """The outputs of a step."""

    outputs: StepOutputs


class RequestRefused(msgspec.Struct, tag=True):
    """A request was not accepted; with an empty id: the engine could not be started."""

    id: str
    error: str
    """The error's class."""
    message: str
    parameter: str | None = None


class HealthReport(msgspec.Struct, tag=True):
    """Answers `Ping`."""

    question: int
    unfinished: int
    """Unfinished requests, without those that wait for a grammar."""
    steps: int = 0
    """Steps made so far: grows while there are unfinished requests."""


class StatsReport(msgspec.Struct, tag=True):
    """Answers `GetStats`."""

    question: int
    metrics: list[Metric]


class MemoryReport(msgspec.Struct, tag=True):
    """Answers `GetMemoryMap`."""

    question: int
    map: MemoryMap | None = None
    error: str = ""
    """Why there is no result."""


class ViewReport(msgspec.Struct, tag=True):
    """Answers `GetView`, `GetTimeline` and `GetBlock`."""

    question: int
    answer: Union[EngineView, RequestTimeline, BlockDetail, None] = None
    refused: RequestRefused | None = None
    """Why there is no result."""


class ResetReport(msgspec.Struct, tag=True):
    """Answers `ResetPrefixCache`."""

    question: int
    is_empty: bool
    """Whether no block was kept for a running request."""


class RebalanceReport(msgspec.Struct, tag=True):
    """Answers `RebalanceExperts`."""

    question: int
    outcome: Rebalanced | None = None
    error: RequestRefused | None = None
    """Why there is no result."""


class SessionReply(msgspec.Struct, tag=True):
    """The result of a session call, or why it failed."""

    question: int
    answer: SessionAnswer | None = None
    refused: RequestRefused | None = None


class Died(msgspec.Struct, tag=True):
    """The last message of an engine that has failed."""

    message: str


Up = Union[
    EngineReady, Outputs, RequestRefused, HealthReport, StatsReport, MemoryReport, ViewReport, ResetReport,
    RebalanceReport, SessionReply, RelayedLog, Died,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_down_decoder = msgspec.msgpack.Decoder(Down, dec_hook=decode_array)
_up_decoder = msgspec.msgpack.Decoder(Up)


class MalformedRequestError(ValidationError):
    """A field of a request has the wrong type."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(message, "request", request_id)
        self.request_id = request_id


class MalformedCallError(ValidationError):
    """A field of a session call has the wrong type."""

    def __init__(self, question: int, message: str) -> None:
        super().__init__(message, "session")
        self.question = question


def encode(message: Down | Up) -> bytes:
    """A message as sent over the socket; raises if a value is not plain data."""
    try:
        data = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ValidationError(f"a value cannot be sent to the engine's process: {error}") from error
    if len(data) > LARGEST:
        raise ValidationError(f"a message of {len(data)} bytes to the engine's process is above the limit of {LARGEST}")
    return frame(data)


def decode_down(data: bytes) -> Down:
    """A message to the engine. A malformed request or session call raises an error that identifies it."""
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


class MessageLink(ChildLink):
    """The engine's end of the socket."""

    def send(self, message: Down | Up) -> None:
        """Waits while the socket is full. May be called from any thread."""
        self.send_bytes(encode(message))

    def receive(self, wait: bool, seconds: float | None = None) -> list[bytes]:
        """Messages that have arrived; with `wait`, waits for one read, at most `seconds`."""
        return self.receive_payloads(seconds if wait else 0.0)
