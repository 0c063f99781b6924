"""The LoRA adapters of a request."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec


class AdapterUse(msgspec.Struct, frozen=True):
    """A LoRA adapter that a request is computed with."""

    name: str
    path: str
    """The folder it is read from."""
    digest: bytes
    """Of its content (`Adapter.digest`): what is read must have it."""
    weight: float = 1.0
    """Factor on what it adds."""
    invocation: list[int] | None = None
    """aLoRA: it acts from the last occurrence of these tokens in the prompt on, and not at all without one. None: it
    acts on every token."""
    number: int = 0
    """The caller's number of it, as vLLM has them; nothing here depends on it."""
    pinned: bool = False
    """It leaves the device only if no other adapter can make room."""


def kv_identity(adapters: Sequence[AdapterUse], prompt: Sequence[int]) -> bytes:
    """Equal where equal tokens have equal KV (given the salt): the first position that the adapters act on, then the
    adapters. Empty if there are none, or they never act."""
    start = _start(adapters, prompt) if adapters else None
    return b"" if start is None else start.to_bytes(8, "little") + adapter_identity(adapters)


def identity_start(identity: bytes) -> int:
    """The first position that the adapters of a `kv_identity` act on."""
    return int.from_bytes(identity[:8], "little")


def adapter_identity(adapters: Sequence[AdapterUse]) -> bytes:
    """Equal for lists of adapters that compute the same."""
    return b"".join(use.digest + struct.pack("<d", use.weight) for use in adapters)


def _start(adapters: Sequence[AdapterUse], prompt: Sequence[int]) -> int | None:
    """The first position that these adapters act on; None if they never do. All of them have the same invocation."""
    invocation = adapters[0].invocation
    if not invocation:
        return 0
    length = len(invocation)
    places = range(len(prompt) - length, -1, -1)
    return next((at for at in places if prompt[at] == invocation[0] and prompt[at : at + length] == invocation), None)
