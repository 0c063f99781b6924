"""Requests of other front processes: this one sends them to its engines, and passes their outputs on as they come.

The process that owns the engines (the hub) makes neither text nor outputs for them. It keeps their tokens, so that they
go on at another engine when theirs dies, as its own requests do, and ends them when the front that made them exits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.api.output_stream import OutputStream
from quire.engine import ipc
from quire.errors import QuireError
from quire.messages.outputs import Finished, Output, RequestOutput, StepEnergy, StepOutputs
from quire.messages.request import NewRequest

if TYPE_CHECKING:
    from quire.api.engine_group import EngineGroup
    from quire.output.processor import OutputProcessor

T = TypeVar("T")


class RelayPeer(Protocol):
    """A front process."""

    def send(self, message: ipc.Up) -> None:
        """Send it a message, or buffer it; never waits."""
        ...


class RelayedStream(OutputStream):
    """A request of another front. Outputs of engines are passed on before they get here; only an end that no engine has
    reported is sent from here."""

    def __init__(self, key: str, peer: RelayPeer, relay: Relay) -> None:
        super().__init__(key, key)
        self.peer = peer
        self.raises_refusals = False  # the front does that
        self.ended: set[int] = set()
        """Sequences whose end the front knows."""
        self._relay = relay

    def put(self, output: Output) -> None:
        """All sequences have ended."""
        self.is_ended = output.finished
        if isinstance(output, RequestOutput):
            missing = [one for one in output.outputs if one.index not in self.ended]
            if missing:
                ends = [
                    Finished((self.key, one.index), one.finish_reason or "abort", message=output.error)
                    for one in missing
                ]
                self.peer.send(ipc.Outputs(StepOutputs(finished=ends)))
        self._relay.end(self)

    def fail(self, error: QuireError) -> None:
        """Nothing more will come, because of this error."""
        if not self.is_ended:
            self.is_ended = True
            self.peer.send(refusal_of(self.key, error))
            self._relay.end(self)


class Relay:
    """All requests of other fronts, by the engine's key."""

    def __init__(self, group: EngineGroup, outputs: OutputProcessor) -> None:
        self._group = group
        self._outputs = outputs
        self._open: dict[str, RelayedStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: NewRequest, message: bytes, peer: RelayPeer) -> None:
        """Send a front's request to an engine, or let it wait for one; `message` is its encoded `Add`. If it is refused
        the front is told."""
        stream = RelayedStream(request.id, peer, self)
        try:
            self._group.check_hopeful()
            self._outputs.add_relayed(request)
            self._group.submit(stream, request, message)
        except Exception as error:  # a user's routing policy may fail in any way: that request fails alone
            self._outputs.forget(request.id)
            peer.send(refusal_of(request.id, error))
        else:
            self._open[request.id] = stream
            self._listen(self.pass_on)

    def _listen(self, pass_on: Callable[[StepOutputs], None] | None) -> None:
        """Engines' outputs are passed on only while there are such requests: without, a step costs nothing more."""
        for replica in self._group.replicas:
            replica.pass_on = pass_on

    def abort(self, key: str) -> None:
        """Abort a request; its front gets a last output."""
        if (stream := self._open.get(key)) is not None:
            stream.is_aborted = True
            self._group.abort(stream)

    def finish(self, message: ipc.Finish) -> None:
        """Its front has found a stop string: end the sequence here and in the engine."""
        key, sequence = message.key
        if (stream := self._open.get(key)) is not None:
            stream.ended.add(sequence)
            if stream.replica is not None:
                stream.replica.engine.send(message)
            if (last := self._outputs.finish_at(message.key, message.at, message.stop_reason)) is not None:
                stream.put(last)

    def pass_on(self, outputs: StepOutputs) -> None:
        """Send outputs to the fronts that they are for, one message for each."""
        opened = self._open

        def peer_of(key: str) -> RelayPeer | None:
            return None if (stream := opened.get(key)) is None else stream.peer

        for peer, part in split_by_owner(outputs, peer_of).items():
            if peer is not None:
                peer.send(ipc.Outputs(part))
                for end in part.finished:
                    opened[end.key[0]].ended.add(end.key[1])

    def end(self, stream: RelayedStream) -> None:
        """The request has ended, or its front has."""
        if self._open.pop(stream.key, None) is not None:
            self._group.leave(stream)
            if not self._open:
                self._listen(None)

    def drop_peer(self, peer: RelayPeer) -> int:
        """The front has exited: abort its requests. Returns how many there were."""
        left = [stream for stream in self._open.values() if stream.peer is peer]
        for stream in left:
            self.end(stream)
        return len(left)


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
    if (energy := outputs.energy) is not None:
        for request, joules in zip(energy.requests, energy.joules, strict=True):
            if (own := part(request)).energy is None:
                own.energy = StepEnergy([], [], energy.source, energy.is_estimate)
            own.energy.requests.append(request)
            own.energy.joules.append(joules)
    return parts
