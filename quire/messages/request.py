"""A request on its way in (`NewRequest`), and its life inside the engine (`Request`)."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from quire.messages.beams import Beam, BeamSearchParams
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks are coming from another tier."""
    COMPILING = "compiling"
    """Its grammar is being compiled."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


MOVES = {
    RequestState.WAITING: {RequestState.LOADING, RequestState.COMPILING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.LOADING: {RequestState.WAITING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.COMPILING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.WAITING, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.LOADING, RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


class NewRequest(msgspec.Struct):
    """A validated request, as the caller's process hands it to the engine."""

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    """The request ends when prompt and output together reach this many tokens."""
    eos_ids: list[int] = []
    bad_words: list[list[int]] = []
    keys: list[bytes] = []
    """Content keys of the prompt's full blocks."""
    salt: str = ""
    """Keeps this request's blocks apart from those of other salts."""
    reads_cache: bool = True
    """False: compute the whole prompt even if its blocks are cached (prompt logprobs need every position)."""
    seed: int = 0
    priority: int = 0
    tenant: str = ""
    arrival: float = 0.0
    pooling: PoolingParams | None = None
    """Given: the request ends when its prompt is computed, and yields a vector instead of tokens."""
    beams: BeamSearchParams | None = None
    """Given: the request is a beam search. `params` then says what its rows report; ends are the search's own."""
    session: str = ""
    """The session whose turn this is: what the request computes stays with it."""

    @property
    def num_sequences(self) -> int:
        """Sequences the request may have at a time."""
        return self.params.n if self.beams is None else self.beams.beam_width

    @property
    def stop_ids(self) -> list[int]:
        """Every token that ends the request on the device."""
        ends_by_itself = self.params.structured_outputs is not None  # where the form is complete, nothing else can come
        eos = self.eos_ids if ends_by_itself or not self.params.ignore_eos else []
        return list(dict.fromkeys([*eos, *(self.params.stop_token_ids or [])]))


class Request:
    """One sequence inside the engine: sample `index` of a `NewRequest`."""

    __slots__ = (
        "arrival_order", "beam", "blocks", "failures", "finish_reason", "first_scheduled", "id", "in_flight", "index",
        "key", "keys", "num_cached", "output", "owned_keys", "preemptions", "prompt", "published", "row", "saved",
        "siblings", "source", "state", "stop_reason",
    )  # fmt: skip

    def __init__(self, source: NewRequest, index: int, arrival_order: int) -> None:
        self.source = source
        self.id = source.id
        self.index = index
        self.key = (source.id, index)
        self.prompt = source.prompt
        self.output: list[int] = []
        self.keys = list(source.keys)
        self.arrival_order = arrival_order
        self.state = RequestState.WAITING
        self.blocks: list[int] = []
        self.published = 0
        """Leading blocks that the prefix index has been told of."""
        self.saved = 0
        """Leading tokens whose KV was put by in the tiers below when it last left its row, the last block's too…"""
        self.owned_keys: list[bytes] = []
        """…and the blocks it owns there meanwhile."""
        self.row = -1
        self.siblings: list[Request] = []
        """Samples of the same prompt that fork from this one when its prompt is computed."""
        self.beam = None if source.beams is None else Beam()
        """What it is in a beam search."""
        self.in_flight = 0
        """Counted when it is preempted: launched draws that are not collected. Their tokens still count."""
        self.failures = 0
        """Failed steps this request was part of."""
        self.num_cached = -1
        self.preemptions = 0
        self.first_scheduled: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: Any = None

    @property
    def known(self) -> int:
        """Tokens the host has: the prompt and what was collected."""
        return len(self.prompt) + len(self.output)

    @property
    def params(self) -> SamplingParams:
        return self.source.params

    @property
    def priority(self) -> int:
        return self.source.priority

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens from `start` up to `stop`."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - split) : stop - split]

    def move(self, state: RequestState) -> None:
        """Go to `state`; a move that is not in the table of moves raises."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"request {self.id}/{self.index} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def __repr__(self) -> str:
        return f"Request({self.id}/{self.index}, {self.state.value}, {len(self.prompt)}+{len(self.output)} tokens)"
