"""What the page shows of an engine: its state at one moment, a request's timeline, and one block."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.messages.memory_map import DiskBlocks, HostBlocks, Pressure, TransferCounts, WaitingRequest

StepFigures = tuple[int, float, float, int, int, int, int]
"""A step: its number, when it was launched and collected, decodes, prompts, prompt tokens, drafts."""

HolderKind = Literal["decode", "prompt", "loading", "session", "states", "swapped", "asleep"]
"""What a holder is. On the device: a request with a row that decodes or computes its prompt, one that loads, a session
between its turns, or recurrent states. In host memory: a request that was swapped out, or a session that sleeps."""

Tier = Literal["device", "host"]


class BlockHolder(msgspec.Struct, frozen=True, array_like=True):
    """A request or session that holds blocks."""

    kind: HolderKind
    name: str
    tenant: str
    """Of a session: its tenant's key in the store."""
    session: str
    row: int
    sequence: int
    computed: int
    """Tokens whose KV is computed, with those in flight."""
    known: int
    prompt: int
    limit: int
    blocks: int
    """How many entries of `EngineView.table`, or of `host_table`, are its own, in the order of holders."""
    adapter: str = ""
    """Names of its adapters."""
    place: str = ""
    """Of a sleeping session: the highest tier with blocks of it, host or disk, or nowhere."""


class AdapterView(msgspec.Struct, frozen=True, array_like=True):
    """Adapters on the device. Names of several in one slot are joined by `+`."""

    slots: int
    loaded: list[str]
    held: list[str]
    """Those that requests use…"""
    awaited: list[str]
    """…and those that requests wait for."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine at one moment. Times are those of its monotonic clock."""

    at: float
    offset: float
    """What to add to such a time for seconds since 1970."""
    seconds: float
    """How long the engine took to make this view."""
    block_size: int
    rows: int
    """How many there are."""
    budget: int
    """Most tokens of a step."""
    counters: dict[str, float]
    steps: list[StepFigures]
    """The last ones, oldest first."""
    holders: list[BlockHolder]
    queue: list[WaitingRequest]
    waiting: int
    """Requests without a row; only the first are in `queue`."""
    loading: int
    compiling: int
    table: bytes
    """The block tables of all holders, as 32-bit integers."""
    content: bytes
    """By block: 1 if its content is cached, held or not. Block 0 is reserved."""
    moving: list[int]
    """Blocks in transfer."""
    is_one_table: bool
    """Whether the n-th block of a holder has its n-th tokens: the model has one cache group, which keeps all tokens."""
    first_tokens: list[float]
    """Of recent requests: seconds from arrival to the first token…"""
    token_times: list[float]
    """…and seconds a token after it."""
    transfers: TransferCounts
    pressure: Pressure
    host: HostBlocks | None = None
    disk: DiskBlocks | None = None
    host_content: bytes = b""
    """By slot of host memory: 0 empty, 1 cached, 2 pinned by a request or session, 3 arriving."""
    host_holders: list[BlockHolder] = []
    """Swapped requests, and the sessions that fell asleep last."""
    host_table: bytes = b""
    """The slots of all host holders, as 32-bit integers."""
    adapters: AdapterView | None = None
    """None: the engine serves none."""


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a sequence's state."""

    at: float
    step: int
    """The number of the next step."""
    kind: str
    """waiting, compiling, loading, admitted, drawn (the first token since it has its row), swapped (its
    blocks move to host memory, and it is preempted), preempted, restarted, awaits mask, finished."""
    sequence: int = 0
    row: int = -1
    value: int = 0
    """waiting: known tokens; admitted: cached tokens; swapped: tokens; finished: output tokens."""


class TimelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the sequence was in, and what else it computed."""

    step: int
    start: float
    end: float
    sequence: int = 0
    row: int
    is_prompt: bool
    """A chunk of known tokens; otherwise a decode."""
    computed: int
    """Tokens of this sequence that were computed."""
    drew: int
    """Tokens that a decode yielded. A prompt's last chunk draws one too: see the event `drawn`."""
    decodes: int
    prompts: int
    prompt_tokens: int
    drafts: int


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What happened to a request. Times are those of the engine's monotonic clock."""

    id: str
    tenant: str
    prompt_tokens: int
    arrival: float
    now: float
    """When this was told."""
    offset: float
    """What to add to a time for seconds since 1970."""
    finish_reason: str
    events: list[TimelineEvent]
    steps: list[TimelineStep]
    is_whole: bool
    """False: its first steps are no longer kept."""


class BlockUser(msgspec.Struct, frozen=True, kw_only=True):
    """A holder of one block."""

    name: str
    tenant: str
    kind: HolderKind
    row: int
    first_token: int
    """Of its tokens, the first in the block; -1: the block is not one of consecutive tokens."""
    tokens: list[int]
    """The token ids in the block."""


class BlockDetail(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One block on the device, or in host memory: `block` is then a slot."""

    block: int
    references: int
    is_cached: bool
    users: list[BlockUser]
