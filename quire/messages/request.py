"""A request as submitted (`NewRequest`), and one of its sequences inside the engine (`Request`)."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from quire.messages.adapter_use import AdapterUse, kv_identity
from quire.messages.beams import Beam, BeamSearchParams
from quire.messages.media import KeySpan, MediaItem, Span, key_spans
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams


class RequestState(enum.Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks are being loaded from a lower tier."""
    COMPILING = "compiling"
    """Its grammar is being compiled."""
    ADAPTING = "adapting"
    """Its adapters are being loaded into a slot of the device."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS = {
    RequestState.WAITING: {
        RequestState.LOADING,
        RequestState.COMPILING,
        RequestState.ADAPTING,
        RequestState.RUNNING,
        RequestState.FINISHED,
    },
    RequestState.LOADING: {RequestState.WAITING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.COMPILING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.ADAPTING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.WAITING, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.LOADING, RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


class NewRequest(msgspec.Struct):
    """A validated request, as the caller's process sends it to the engine."""

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
    """Requests share cached blocks only with requests of the same salt."""
    reads_cache: bool = True
    """False: compute the whole prompt even if its blocks are cached (prompt logprobs need every position)."""
    seed: int = 0
    priority: int = 0
    tenant: str = ""
    arrival: float = 0.0
    pooling: PoolingParams | None = None
    """Set: the request ends when its prompt is computed, and yields a vector instead of tokens."""
    beams: BeamSearchParams | None = None
    """Set: the request is a beam search. `params` then says what its rows report; the search decides when it ends."""
    session: str = ""
    """The session this request is a turn of: the session keeps what the request computes."""
    drawn: list[list[int] | None] = []
    """Set for a request that goes on after its engine died: the output tokens that each sequence has; None: the
    sequence has ended."""
    prediction: list[int] = []
    """What the client expects as the output: drafts, where there are any."""
    media: list[MediaItem] = []
    """Images, videos and embeddings that the prompt has…"""
    spans: list[Span] = []
    """…and the tokens that stand for them, in order."""
    positions: np.ndarray | None = None
    """[3, prompt] int32: positions of the prompt's tokens in a model that has three of each (M-RoPE); None: a token's
    position is its index, in all three."""
    position_delta: int = 0
    """What is added to the index of a token after the prompt to have its position."""
    adapters: list[AdapterUse] = []
    """LoRA adapters, whose changes add up."""

    @property
    def kv_identity(self) -> bytes:
        """Equal for requests in which equal tokens have equal KV (given the salt): its adapters, and from where on they
        act. Empty without adapters, or if they never act."""
        return kv_identity(self.adapters, self.prompt) if self.adapters else b""

    @property
    def num_sequences(self) -> int:
        """Sequences the request may have at the same time."""
        return self.params.n if self.beams is None else self.beams.beam_width

    @property
    def stop_ids(self) -> list[int]:
        """Every token that ends the request on the device."""
        # A complete structured output allows nothing but EOS, so EOS must end it even with ignore_eos.
        is_structured = self.params.structured_outputs is not None
        eos = self.eos_ids if is_structured or not self.params.ignore_eos else []
        return list(dict.fromkeys([*eos, *(self.params.stop_token_ids or [])]))

    @property
    def open_sequences(self) -> list[int]:
        """Numbers of the sequences that have not ended."""
        return [i for i in range(self.num_sequences) if not self.drawn or self.drawn[i] is not None]

    @property
    def key_spans(self) -> list[KeySpan]:
        """What the prompt has in place of token ids, for content keys."""
        return key_spans(self.media, self.spans) if self.spans else []

    def stop_reason(self, token: int) -> int | None:
        """The stop reason of a sequence that this token ended: none for EOS."""
        return None if token in self.eos_ids and not self.params.ignore_eos else token


class Request:
    """One sequence inside the engine: number `index` of a `NewRequest`."""

    __slots__ = (
        "arrival_order", "beam", "blocks", "discards", "first_scheduled", "id", "in_flight", "index", "key", "keys",
        "kv_identity", "output", "owned_keys", "preemptions", "prompt", "published", "row", "saved", "siblings",
        "source", "state", "tables",
    )  # fmt: skip

    def __init__(self, source: NewRequest, index: int, arrival_order: int, saved: int = 0) -> None:
        self.source = source
        self.id = source.id
        self.index = index
        self.key = (source.id, index)
        self.prompt = source.prompt
        self.output: list[int] = list(source.drawn[index] or ()) if source.drawn else []
        self.keys = list(source.keys)
        """Content keys of the full blocks of known tokens, as far as they have been needed."""
        self.kv_identity = source.kv_identity
        self.arrival_order = arrival_order
        self.state = RequestState.WAITING
        self.blocks: list[int] = []
        self.published = 0
        """Leading blocks that are in the prefix cache's index."""
        self.tables: list[Any] = []
        """In a model of several cache groups: its tables in the others (`kvcache.groups.GroupTable`)."""
        self.saved = saved
        """Leading tokens whose KV was offloaded when the sequence last lost its row, a partial last block included…"""
        self.owned_keys: list[bytes] = []
        """…and the blocks it has pinned in host memory since."""
        self.row = -1
        self.siblings: list[Request] = []
        """Sequences of the same prompt that fork from this one when its prompt is computed."""
        self.beam = None if source.beams is None else Beam()
        """Its state in a beam search."""
        self.in_flight = 0
        """Draws that were launched and not collected when it was preempted. Their tokens still count…"""
        self.discards = False
        """…unless what they were drawn from was wrong."""
        self.preemptions = 0
        self.first_scheduled: float | None = None

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
        """Change to `state`; raises if TRANSITIONS does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.id}/{self.index} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def take_siblings(self) -> list[Request]:
        """The unfinished sequences that waited for this one's prompt; from now on none do."""
        siblings, self.siblings = self.siblings, []
        return [sibling for sibling in siblings if not sibling.is_finished]

    def start_like(self, parent: Request) -> None:
        """The sequence forks from `parent`: it has the same content keys and was first scheduled with it."""
        self.keys = list(parent.keys)
        self.first_scheduled = parent.first_scheduled

    def start_beam(self, parent: Request, token: int, logprob: float, rank: int) -> None:
        """The sequence becomes a beam: a copy of `parent`, one token longer."""
        assert parent.beam is not None
        self.start_like(parent)
        self.output = [*parent.output, token]
        self.beam = parent.beam.followed(logprob, rank)

    def extend_beam(self, token: int, logprob: float, rank: int) -> None:
        """The beam continues with the token that the search chose."""
        assert self.beam is not None
        self.output.append(token)
        self.beam.follow(logprob, rank)

    def pin_saved(self, keys: list[bytes], tokens: int) -> None:
        """The KV of the first `tokens` tokens is offloaded, under these keys."""
        self.owned_keys, self.saved = keys, tokens

    def unpin_saved(self) -> list[bytes]:
        """Keys of the offloaded blocks the sequence had pinned; it no longer does."""
        keys, self.owned_keys = self.owned_keys, []
        return keys

    def __repr__(self) -> str:
        return f"Request({self.id}/{self.index}, {self.state.value}, {len(self.prompt)}+{len(self.output)} tokens)"
