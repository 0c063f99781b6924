"""Requests of other front processes: this one sends them to its engines, and passes their outputs on as they come.

The process that owns the engines (the hub) neither detokenizes nor keeps outputs for them. It decides where they run,
as for its own, and it ends them when the front that made them exits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.engine import ipc
from quire.errors import QuireError
from quire.messages.outputs import StepOutputs
from quire.messages.request import NewRequest

if TYPE_CHECKING:
    from quire.api.engine_group import EngineGroup
    from quire.api.replica import Replica

T = TypeVar("T")


class RelayPeer(Protocol):
    """A front process."""

    def send(self, message: ipc.Up) -> None:
        """Send it a message, or buffer it; never waits."""
        ...


class RelayedTokens:
    """The tokens of one sequence so far."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[int] = []


class RelayedRequest:
    """An open request of another front. The router reads it as it reads a `TrackedRequest`."""

    def __init__(self, request: NewRequest, message: bytes, peer: RelayPeer) -> None:
        """`message`: its encoded `Add`."""
        self.request = request
        self.message = message
        self.peer = peer
        self.replica: Replica
        """Where it runs."""
        is_single = request.pooling is not None or request.beams is not None
        self.open = 1 if is_single else request.params.n
        """Sequences that have not ended."""
        self.sequences = [RelayedTokens() for _ in range(self.open)]
        self.num_cached: int | None = None
        self.is_started = False
        """Whether the front has got something of it, so that it cannot start again."""
        self.restarts = 0

    def note(self, sequence: int, tokens: list[int]) -> None:
        """New tokens of a sequence have come."""
        self.is_started = True
        if sequence < len(self.sequences):
            self.sequences[sequence].tokens += tokens


class Relay:
    """All requests of other fronts, by the engine's key."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self._open: dict[str, RelayedRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: NewRequest, message: bytes, peer: RelayPeer) -> None:
        """Send a front's request to an engine; if there is none, the front gets the refusal."""
        relayed = RelayedRequest(request, message, peer)
        try:
            self._group.attach()
            self._group.launch_relayed(self._group.choose(request), relayed)
        except Exception as error:  # a custom policy may fail in any way: that request fails alone
            peer.send(refusal_of(request.id, error))
        else:
            self._open[request.id] = relayed

    def send(self, key: str, message: ipc.Abort | ipc.Finish) -> None:
        """Pass a message about a request to its engine; none if it has ended."""
        if (relayed := self._open.get(key)) is not None:
            relayed.replica.engine.send(message)

    def drop_peer(self, peer: RelayPeer) -> int:
        """The front has exited: abort its requests. Returns how many there were."""
        left = [relayed for relayed in self._open.values() if relayed.peer is peer]
        for relayed in left:
            relayed.replica.engine.send(ipc.Abort(relayed.request.id))
            relayed.replica.end_relayed(relayed.request.id)
        return len(left)

    def forget(self, key: str) -> None:
        """The request has ended."""
        self._open.pop(key, None)


def refusal_of(key: str, error: Exception) -> ipc.RequestRefused:
    """An error as the message that a front gets instead of outputs."""
    kind = type(error).__name__ if isinstance(error, QuireError) else QuireError.__name__
    return ipc.RequestRefused(key, kind, str(error), getattr(error, "parameter", None))


def split_by_owner(outputs: StepOutputs, owner_of: Callable[[str], T]) -> dict[T, StepOutputs]:
    """A step's outputs by the owner of their request; those without outputs are left out."""
    parts: dict[T, StepOutputs] = {}

    def part(request: str) -> StepOutputs:
        owner = owner_of(request)
        found = parts.get(owner)
        if found is None:
            found = parts[owner] = StepOutputs()
            if outputs.counts is not None:
                found.counts = []
            if outputs.drafts is not None:
                found.drafts = []
        return found

    at = 0
    for i, key in enumerate(outputs.keys):
        mine = part(key[0])
        end = at + (1 if outputs.counts is None else outputs.counts[i])
        if outputs.logprobs:
            first = len(mine.tokens) - at
            mine.logprobs.update({first + j: outputs.logprobs[j] for j in range(at, end) if j in outputs.logprobs})
        mine.keys.append(key)
        mine.tokens += outputs.tokens[at:end]
        if mine.counts is not None:
            mine.counts.append(end - at)
        if mine.drafts is not None and outputs.drafts is not None:
            mine.drafts.append(outputs.drafts[i])
        at = end
    for key, prompt_logprobs in outputs.prompt_logprobs:
        part(key[0]).prompt_logprobs.append((key, prompt_logprobs))
    for key, vector in outputs.vectors:
        part(key[0]).vectors.append((key, vector))
    for request, found in outputs.beams:
        part(request).beams.append((request, found))
    for started in outputs.started:
        part(started.key[0]).started.append(started)
    for key in outputs.preempted:
        part(key[0]).preempted.append(key)
    for ended in outputs.finished:
        part(ended.key[0]).finished.append(ended)
    return parts
