"""The messages between the planning and the executing half: `StepPlan`, and `StepResult` back.

A plan carries differences: the rows, blocks and tokens the device does not have yet. Arrays are numpy, so that a plan
of a thousand rows costs no Python loop.

A *cache group* (`messages/caches.py`) is the layers whose caches have the same lifetime; a row has one block table for
each.

A decode's *width* is its entry in `counts`: 1, and one more for each *draft* it verifies, a token that a proposer
expects the row to draw next. Every position of a decode draws: a draw of width w has w *places*, and yields tokens up
to the first that is not the draft after it. What a step yields is counted on the device at once, and on the host when
the result is collected.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.messages.adapter_use import AdapterUse
from quire.messages.media import EncodeItem, Splice, VisibleSpan, decode_array, encode_array
from quire.messages.sampling import SamplingParams

Ints = NDArray[np.int32]
Vector = NDArray[np.float32]

MAX_WIDTH = 8
"""Most tokens that a decode computes: the row's last one, and drafts."""


class NewRow(msgspec.Struct):
    """A sequence takes a row of the device batch."""

    row: int
    request: str
    prompt_len: int
    num_tokens: int
    num_computed: int
    limit: int
    seed: int
    sequence: int
    """Which of the request's sequences this is; part of the random stream's key."""
    params: SamplingParams
    stop_ids: list[int]
    bad_words: list[list[int]]
    pooling: str | None = None
    """How hidden states are pooled into the vector that the row yields; None: it yields tokens."""
    computed: Ints = np.empty(0, np.int32)
    """The `num_computed` tokens, if no cache group keeps every token: the device has them nowhere else."""
    position_delta: int = 0
    """What is added to the index of a generated token to have its position."""
    adapter: int = -1
    """The slot of its adapter; -1: none…"""
    adapter_start: int = 0
    """…which acts on tokens from this position on."""


class Fork(msgspec.Struct):
    """Row `row` becomes a copy of row `source`, drawing from the random stream of sequence `sequence`."""

    source: int
    row: int
    sequence: int
    request: str


class Drafts(msgspec.Struct):
    """Tokens that a row may draw next, proposed on the host: a run that continues what the host knows of the row.

    The row may have drawn more tokens since. Those are dropped from the run; if they differ from it, all of it is.
    """

    row: int
    start: int
    """The position of the first of them among the row's tokens."""
    tokens: list[int]


class PrefixGroup(msgspec.Struct):
    """Rows that begin with the same blocks. Attention finds these in the table of the first row."""

    rows: list[int]
    shared_tokens: int
    """Tokens in the shared blocks, which are all full."""


class Moves(msgspec.Struct):
    """Blocks to copy between the device's cache and host memory while the step computes.

    Copies read what all earlier steps have written. Neither side may be used until a result reports them done.
    """

    out: list[tuple[int, int]] = []
    """(block, slot): from the device to the host."""
    back: list[tuple[int, int]] = []
    """(slot, block): from the host to the device."""
    tokens: Ints = np.empty(0, np.int32)
    """Token ids of the blocks in `back`, block size ids each."""
    awaited: bool = False
    """Rows of this plan read the blocks in `back`: the device computes nothing before they are copied."""


class MovesDone(msgspec.Struct):
    """The moves of a plan are done."""

    step: int
    out_seconds: float
    back_seconds: float


class AdapterLoad(msgspec.Struct):
    """Adapters, whose changes add up, to be read and copied into a slot while steps run. No row uses the slot until a
    result reports it."""

    slot: int
    key: bytes
    """Names the content: adapters and weights."""
    uses: list[AdapterUse]


class AdapterLoaded(msgspec.Struct):
    """The load of a slot has ended."""

    slot: int
    key: bytes
    error: str = ""
    """Why it failed; empty: the slot can be used."""


class StepPlan(msgspec.Struct):
    """One step's work. Steps are numbered without gaps; ranks refuse a gap. A plan without rows waits for moves."""

    step: int
    rows: Ints
    """Rows that compute, decodes first."""
    counts: Ints
    """Tokens each of them computes: a decode's width, a prompt's chunk."""
    num_decodes: int
    """The first `num_decodes` rows compute the token that was drawn for them last, and after it as many drafts as their
    width says; the device has these. Where it has fewer, it computes any tokens instead and accepts none of them."""
    tokens: Ints
    """Tokens of the other rows, concatenated."""
    samples: Ints
    """Indices into `rows` of the entries that draw: a decode at each of its places, a prompt at its last token."""
    sample_rows: Ints
    """The row each draw goes to (a row that forks draws several times)."""
    block_rows: Ints
    block_indices: Ints
    blocks: Ints
    """Changes of block tables: tables[block_groups][block_rows, block_indices] = blocks."""
    max_context: int
    """Upper bound on the tokens of any scheduled row after this step."""
    reset: bool = False
    """Drop every row first: a step failed and the state of the rows is unknown."""
    drop: list[int] = []
    add: list[NewRow] = []
    forks: list[Fork] = []
    """Made after the step's tokens are placed: the new rows draw in this step from what their source computes."""
    branches: list[Fork] = []
    """Made before anything else in the plan: the new rows compute in this step."""
    forced: list[tuple[int, int]] = []
    """(row, token): replaces the row's last token; also for rows that this plan adds."""
    copies: list[tuple[int, int]] = []
    """(from, to) blocks to copy before anything is computed: first writes into shared blocks, and states that rows
    start from."""
    block_groups: Ints = np.empty(0, np.int32)
    """The cache group of each change of a block table; empty: all are of group 0."""
    snapshots: list[tuple[int, int]] = []
    """(from, to) blocks to copy once everything is computed: states that are kept, and those of forked rows."""
    moves: Moves | None = None
    adapters: list[AdapterLoad] = []
    groups: list[PrefixGroup] | None = None
    """All groups of rows that share a prefix; None: unchanged since the last plan that had some."""
    num_drafts: int = 0
    """Drafts that the decodes verify: the sum of their widths, less one each."""
    drafts: list[Drafts] = []
    """Drafts made on the host, instead of those that the device has for these rows."""
    proposals: int = 0
    """Drafts that the proposer on the device makes for each row that draws, once it has drawn; 0: none, and the
    proposer computes nothing."""
    following: Ints = np.empty(0, np.int32)
    """With a proposer that reads them: for each row after the decodes the token after its chunk, -1 if it is drawn."""
    rewound: list[tuple[int, int]] = []
    """(row, number of computed tokens), set before the step is laid out: with pipeline stages, of which only the last
    one knows how many drafts were accepted."""
    encoded: int = 0
    """Of `ENCODE_PARTS`, how much of the image whose encoding takes several steps is done after this one; then no other
    image is in `encode`. All of them: what is in `encode`, and what was begun, is finished before the step computes."""
    encode: list[EncodeItem] = []
    """Items that are encoded before the step computes…"""
    freed: list[int] = []
    """…once what these slots have is dropped."""
    splices: list[Splice] = []
    """Tokens whose embeddings are rows of encoded items."""
    visible: list[VisibleSpan] = []
    """Tokens that see each other both ways, in models where those of an image do."""
    positions: Ints = np.empty(0, np.int32)
    """[3 * prompt tokens]: three positions of each token in `tokens`, the first of all tokens first; -1, or all empty:
    a token's position is its index in its row."""

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_drafts + len(self.tokens)

    @property
    def widths(self) -> Ints:
        """The places of each draw: how many tokens it may yield."""
        if not self.num_drafts:
            return np.ones(len(self.samples), np.int32)
        return np.where(self.samples < self.num_decodes, self.counts[self.samples], 1).astype(np.int32)

    @property
    def place_rows(self) -> Ints:
        """The row of each place of each draw."""
        return np.repeat(self.sample_rows, self.widths) if self.num_drafts else self.sample_rows

    @property
    def place_offsets(self) -> Ints:
        """How far each place is behind the first of its draw."""
        ends = np.cumsum(self.widths)
        return (np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - self.widths, self.widths)).astype(np.int32)

    @property
    def picks(self) -> Ints:
        """The token of the step at which each place draws."""
        last = np.cumsum(self.counts, dtype=np.int32)[self.samples] - 1
        if not self.num_drafts:
            return last
        return np.repeat(last - self.widths + 1, self.widths) + self.place_offsets


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one position: the token itself first, then the most likely ones, or those asked for."""

    ids: list[int]
    values: list[float]
    rank: int
    """The token's own rank, 1 is best."""
    ranks: list[int] = []
    """Of the others, if these were asked for by id (`logprob_token_ids`)."""


class PromptLogprobs(msgspec.Struct):
    """Log-probabilities of consecutive prompt tokens, the first of them at position `start`."""

    start: int
    entries: list[TokenLogprobs]

    def parts(self, most: int) -> Iterator[PromptLogprobs]:
        """The same in parts of about `most` values, in order."""
        step = max(1, most // max((len(entry.ids) for entry in self.entries), default=1))
        for at in range(0, len(self.entries), step):
            yield PromptLogprobs(self.start + at, self.entries[at : at + step])


class StepResult(msgspec.Struct):
    """What a step yielded, in the order of the plan's `sample_rows`."""

    step: int
    tokens: Ints
    """Tokens that the draws yielded, concatenated."""
    counts: Ints
    """Tokens each draw yielded: one, and the drafts that were accepted."""
    stopped: NDArray[np.bool_]
    """The last token is one of the row's stop ids."""
    invalid: NDArray[np.bool_]
    """The row's logits were NaN; its token is meaningless."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By index into `tokens`."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """By index into the plan's `rows`."""
    vectors: dict[int, Vector] = {}
    """By index into `sample_rows`: the vectors of pooled rows. Their tokens are meaningless."""
    drafts: list[list[int]] = []
    """For each draw the drafts that its row has for the next step, if the plan had `proposals`."""
    encode_errors: list[tuple[int, str]] = []
    """(slot, why) of items that could not be encoded; tokens that read them are meaningless."""
    moves_done: list[MovesDone] = []
    """Moves of this and earlier plans that were completed since the last result."""
    adapters_done: list[AdapterLoaded] = []
    """The same of adapters."""


class StepMasks(msgspec.Struct):
    """Which tokens may be drawn at some places of a step. Made while the step runs; only sampling waits for it."""

    step: int
    draws: Ints
    """Indices into the plan's `place_rows`; at other places any token may be drawn."""
    bits: Ints
    """[draws, vocabulary / 32]: one bit per token, set if it may be drawn."""


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=decode_array)
_result_decoder = msgspec.msgpack.Decoder(StepResult, dec_hook=decode_array)
_masks_decoder = msgspec.msgpack.Decoder(StepMasks, dec_hook=decode_array)


def encode(message: StepPlan | StepResult | StepMasks) -> bytes:
    """A message as bytes, for another process."""
    return _encoder.encode(message)


def decode_plan(data: bytes) -> StepPlan:
    return _plan_decoder.decode(data)


def decode_result(data: bytes) -> StepResult:
    return _result_decoder.decode(data)


def decode_masks(data: bytes) -> StepMasks:
    masks = _masks_decoder.decode(data)
    count = len(masks.draws)  # 0 if every mask was late
    masks.bits = masks.bits.reshape(count, masks.bits.size // max(count, 1))
    return masks
