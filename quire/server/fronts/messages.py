"""Every message between the hub and a front: the engine's own (`quire.engine.ipc`), and those of the server."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from quire.api.adapters import AdapterEntry
from quire.engine import ipc
from quire.engine.session_calls import SessionOp
from quire.executor.child import ChildContext
from quire.messages.frames import frame
from quire.messages.media import decode_array, encode_array
from quire.server.observability.snapshots import MetricsSnapshot

# To a front


class HubState(msgspec.Struct, tag=True):
    """The state of the engines; sent when it has changed."""

    is_serving: bool
    is_hopeful: bool
    """Whether requests are accepted, though they may have to wait for an engine."""
    status: str
    retry_after: int


class StartFront(ChildContext, tag=True):
    """The first message: what to serve, and how."""

    server: dict[str, Any]
    """The fields of a `ServerConfig`."""
    number: int
    """Of this front; the hub is 0…"""
    fronts: int
    """…and how many there are, with the hub."""
    first_id: int
    """Its requests are numbered from here: no other front uses these numbers, nor did its predecessor."""
    created: int
    """When the server was started, in seconds since the epoch."""
    ready: ipc.EngineReady
    state: HubState
    adapters: list[AdapterEntry]


class SetAdapters(msgspec.Struct, tag=True):
    """The adapters that requests can name from now on. Answered by `AdaptersSet`."""

    question: int
    adapters: list[AdapterEntry]


class DrainFront(msgspec.Struct, tag=True):
    """Take no more requests, finish the open ones, exit."""


class GetFrontMetrics(msgspec.Struct, tag=True):
    """Answered by `FrontMetrics`."""

    question: int


class RouteStart(msgspec.Struct, tag=True):
    """Answers `RouteCall`: the head of the response…"""

    question: int
    status: int
    headers: list[tuple[bytes, bytes]]


class RouteBody(msgspec.Struct, tag=True):
    """…and the parts of its body."""

    question: int
    data: bytes
    more: bool


ToFront = Union[ipc.Up, StartFront, HubState, SetAdapters, DrainFront, GetFrontMetrics, RouteStart, RouteBody]

# To the hub


class FrontReady(msgspec.Struct, tag=True):
    """The front accepts requests."""


class KeysFollow(msgspec.Struct, tag=True):
    """Requests that follow have content keys of this root: the front has taken an `EngineReady`."""

    root: bytes


class FrontMetrics(msgspec.Struct, tag=True):
    """Answers `GetFrontMetrics`."""

    question: int
    snapshot: MetricsSnapshot


class AdaptersSet(msgspec.Struct, tag=True):
    """Answers `SetAdapters`."""

    question: int


class RouteCall(msgspec.Struct, tag=True):
    """An authorized request to a route that only the hub can answer."""

    question: int
    method: str
    route: str
    """The route's path, with placeholders…"""
    params: dict[str, str] = {}
    """…and what they stand for."""
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    tenant: str = ""


class RouteCancel(msgspec.Struct, tag=True):
    """The client of a `RouteCall` has left."""

    question: int


class SendSessionOp(msgspec.Struct, tag=True):
    """A session operation without an answer, which is made even if the engine must be restarted first."""

    key: str
    op: SessionOp


ToHub = Union[ipc.Down, FrontReady, KeysFollow, FrontMetrics, AdaptersSet, RouteCall, RouteCancel, SendSessionOp]

_encode = msgspec.msgpack.Encoder(enc_hook=encode_array).encode
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_hub = msgspec.msgpack.Decoder(ToHub, dec_hook=decode_array)


def encode(message: ToFront | ToHub) -> bytes:
    """A message as sent over the socket."""
    return frame(_encode(message))


def decode_to_front(data: bytes) -> ToFront:
    return _to_front.decode(data)


def decode_to_hub(data: bytes) -> ToHub:
    """A message of a front. A malformed request or session call raises an error that identifies it."""
    try:
        return _to_hub.decode(data)
    except msgspec.ValidationError:
        ipc.decode_down(data)
        raise
