"""A step as attention sees it, what a backend implements, and the backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quire.kernels.base import Ops
from quire.kernels.kv import LayerKV
from quire.kernels.states import StateReplay
from quire.registry import resolve

_KNOWN = {
    "torch": "quire.layers.attention.torch_paged.TorchPagedAttention",
    "triton": "quire.layers.attention.triton.TritonPagedAttention",
    "cpu": "quire.layers.attention.cpu.CpuPagedAttention",
}


@dataclass(frozen=True)
class KVSpec:
    """The cache a model needs on this rank and stage."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class GroupInputs:
    """Prefix groups: rows whose first blocks are the same, by their rows of the block tables; int32, on the device.

    Group i's members are members[starts[i]] to members[starts[i + 1]], its blocks those of the first member. Not all
    members need be in the step.
    """

    shared: torch.Tensor
    """[batch rows]: tokens of the full blocks a row shares with its group, fewer than it has; 0: it is in no group."""
    members: torch.Tensor
    starts: torch.Tensor


@dataclass
class AttentionInputs:
    """One step as attention over one cache group sees it: S rows, T query tokens, packed row after row.

    The first `num_decodes` rows have exactly one query token each. The integer bounds are known on the host, so that
    no backend has to read them from the device.

    In a step that verifies drafts `num_decodes` is 0: the first `num_verifying` rows are decodes of 1 to `width`
    queries each, which a backend without a kernel for them treats like prompts.
    """

    slots: torch.Tensor
    """[T] int64: block * block_size + offset, where each token's K and V are written."""
    query_starts: torch.Tensor
    """[S + 1] int32: row i's queries are tokens query_starts[i] to query_starts[i + 1]."""
    context_lens: torch.Tensor
    """[S] int32: tokens of the row that are in the cache once this step's are written."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32; or the whole batch's tables, indexed by `rows`."""
    num_rows: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_context_len: int
    rows: torch.Tensor | None = None
    """[S]: row i's table is block_tables[rows[i]]. None: block_tables[i]."""
    groups: GroupInputs | None = None
    """With `rows`: the prefix groups, for a backend that can read shared blocks once (`PrefixGroupBackend`)."""
    last: LastTokens | None = None
    """Set if only some hidden states are needed: a model with `supports_last_tokens` stops computing the other tokens
    once the keys and values of its last layer are written."""
    num_verifying: int = 0
    """Rows that verify drafts; 0: `num_decodes` is the number of decodes."""
    width: int = 1
    """Most query tokens of a row that verifies drafts."""
    num_verified: int = 0
    """Query tokens of all rows that verify drafts, padding included."""
    replay: StateReplay | None = None
    """In a step that verifies drafts: where recurrent layers leave what is to be done to their states once it is known
    which tokens count. All cache groups have the same. None: the states stay as they are."""
    features: FeatureRequest | None = None
    """What a proposer reads inside the model. A model with `supports_features` fills it, given the first group's."""
    deepstack: Deepstack | None = None
    """What is added to the residual stream after the first layers, at tokens of images. The first group has it."""
    visible: Sequence[tuple[int, int, int]] = ()
    """(row of the step, first position, position after the last): tokens that see each other both ways, all of them in
    the step: another way to say `ahead`, for callers that know positions."""
    ahead: torch.Tensor | None = None
    """[T] int32: how many of the tokens after it each query also sees, in layers with `AttentionSpec.sees_spans`: the
    rest of its span. All cache groups have the same. None: attention is causal."""
    contexts: Sequence[int] | None = None
    """Tokens that were cached before this step, of each row after the decodes, where the host knows them."""
    query_lens: Sequence[int] | None = None
    """Query tokens of each row after the decodes, where the host knows them."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What a backend computed for this step and needs again in the next layer."""
    common: dict[Any, Any] = field(default_factory=dict)
    """The same for what does not depend on block tables: all cache groups have one."""
    siblings: tuple[AttentionInputs, ...] = ()
    """The same step over each cache group, this one included; empty if the model has one group."""

    def of(self, group: int) -> AttentionInputs:
        """The same step as seen by the layers of a cache group."""
        return self.siblings[group] if self.siblings else self

    def seen_ahead(self, spec: AttentionSpec) -> torch.Tensor | None:
        """`ahead` as a layer sees it."""
        if not spec.sees_spans or (self.ahead is None and not self.visible):
            return None
        if self.ahead is None:
            ahead = torch.zeros(self.num_tokens, dtype=torch.int32)
            for row, start, stop in self.visible:
                first, end = self.query_starts[row : row + 2].tolist()
                position = int(self.context_lens[row]) - (end - first)
                at = first + start - position
                if first <= at < end:
                    ahead[at : at + stop - start] = torch.arange(stop - start - 1, -1, -1, dtype=torch.int32)
            self.ahead = ahead.to(self.query_starts.device)
        return self.ahead

    def own_tables(self, width: int) -> torch.Tensor:
        """[S, width]: the rows' tables, gathered if needed."""
        if self.rows is None:
            return self.block_tables[:, :width]
        if ("tables", width) not in self.plans:
            self.plans["tables", width] = self.block_tables[:, :width][self.rows.long()]
        return self.plans["tables", width]


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a layer's attention computes: softmax(capped(q·k * scale) + bias where visible [, sink]) · v."""

    scale: float
    window: int | None = None
    """A query sees itself and the window - 1 tokens before it; None: every token before it."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    sinks: torch.Tensor | None = None
    """[heads]: a logit of each head that joins the softmax's denominator, and has no value."""
    slopes: torch.Tensor | None = None
    """[heads] float32 (ALiBi, arXiv 2108.12409): the bias of a key is the slope * (its position - the query's)."""
    sees_spans: bool = True
    """Queries also see the later tokens of the span they are in (`AttentionInputs.ahead`), however far away."""


@dataclass
class Deepstack:
    """Features of an image encoder for the first layers: added to the residual stream at the image's tokens."""

    places: torch.Tensor
    """[S]: which of the step's tokens."""
    layers: Sequence[torch.Tensor]
    """For each of the first layers: [S, hidden size]."""

    def add(self, layer: int, hidden: torch.Tensor | None, residual: torch.Tensor | None) -> None:
        """Add the layer's features to the stream that left it, hidden + residual, either of which may be None."""
        if layer < len(self.layers):
            stream = hidden if residual is None else residual
            assert stream is not None
            stream.index_add_(0, self.places, self.layers[layer])


@dataclass
class LastTokens:
    """The tokens of a step whose hidden states are needed, each the last of its row."""

    tokens: torch.Tensor
    """[P]: their indices among the step's tokens."""
    inputs: AttentionInputs
    """The step as if it had only these tokens."""


@dataclass
class FeatureRequest:
    """The residual stream of all tokens of a step as it enters some layers, kept for a proposer (EAGLE-3).

    Layer i's is the output of the first i layers; the number of layers names the output of the last one. With
    `AttentionInputs.last` that one would have only the last tokens: both must not be asked for together.
    """

    layers: tuple[int, ...]
    """In the order in which their streams are joined."""
    joined: torch.Tensor | None = None
    """[T, len(layers) * hidden size], filled by the forward pass."""

    def take(self, ops: Ops, layer: int, hidden: torch.Tensor | None, residual: torch.Tensor | None) -> None:
        """Copy the stream that enters a layer, hidden + residual, either of which may be None."""
        for place, wanted in enumerate(self.layers):
            if wanted != layer:
                continue
            stream = hidden if residual is None else residual
            assert stream is not None
            size = stream.shape[1]
            if self.joined is None or len(self.joined) != len(stream):
                self.joined = stream.new_empty(len(stream), len(self.layers) * size)
            ops.copy_stream(hidden, residual, self.joined[:, place * size : (place + 1) * size])

    @property
    def streams(self) -> Sequence[torch.Tensor]:
        """Each layer's [T, hidden size]: views of `joined`."""
        return [] if self.joined is None else self.joined.chunk(len(self.layers), dim=1)


class AttentionBackend(Protocol):
    """Attention over the paged cache."""

    graph_safe: bool
    """Whether its kernels can be captured once and replayed for rows of other lengths."""

    def prepare(self, heads: int, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> None:
        """Called in each layer before its keys are written: the place to compute what is needed once per step."""
        ...

    def attend(self, q: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        """Causal attention of q [T, heads, head_dim] over the rows' cached tokens; returns [T, heads * head_dim].

        kv is one layer's cache [blocks, 2, kv_heads, block_size, head_dim] and already holds this step's tokens.
        Query j of a row (counted from its last) sits at position context_len - query_len + j. With a window, blocks
        that lie wholly before the window of a row's first query are not read: their entries in the table are stale.
        """
        ...


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention."""

    rank: int
    """Values of the latent: of a token's vector without its rotated key."""
    rope: int
    nope: int
    """Key dimensions that are not rotated."""
    value: int

    @property
    def width(self) -> int:
        """Values a token in the cache."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.nope + self.rope


class LatentBackend(Protocol):
    """Latent attention (MLA) over the paged cache: keys and values of all heads come from one vector a token."""

    def prepare(self, kv: torch.Tensor, inputs: AttentionInputs) -> None:
        """Called in each layer before its latents are written: the place to compute what is needed once per step."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv: torch.Tensor,
        up: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, nope + rope], rotated; returns [T, heads * value].

        kv is one layer's cache [blocks, block_size, rank + rope] and already holds this step's tokens; latent
        [T, rank + rope] is what was stored for the T tokens of q. up [heads, nope + value, rank]: a head's keys are
        (up[:nope] @ latent, the rotated rest), its values up[nope:] @ latent.
        """
        ...


class PrefixGroupBackend:
    """Base class of backends that read the blocks a prefix group shares once for all its rows."""


def attention_backend(name: str) -> type[AttentionBackend]:
    """The backend class called `name`, or found at that dotted path."""
    return resolve("attention backend", name, _KNOWN)
