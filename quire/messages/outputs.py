"""Outputs of a step (`StepOutputs`, sent to the caller's process) and of a request (`RequestOutput`, for the user)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.messages.beams import Hypothesis
from quire.messages.plan import PromptLogprobs, TokenLogprobs

PIECE_LOGPROBS = 4096
"""Logprobs of prompts in one piece of a step's outputs: a few milliseconds."""
Key = tuple[str, int]
"""A request's id and the number of its sequence."""


class Started(msgspec.Struct):
    """A request was scheduled for the first time."""

    key: Key
    at: float
    num_cached: int


class Finished(msgspec.Struct):
    """A sequence has ended."""

    key: Key
    reason: str
    stop_reason: Any = None
    preemptions: int = 0
    message: str | None = None
    """What went wrong, when the reason is "error"."""
    error: str = ""
    """…and the class of error it is for the caller, where the request itself is at fault."""
    parameter: str | None = None
    """…and the field of the request that caused it, where it was one."""


class StepEnergy(msgspec.Struct):
    """Joules that requests were charged since the last outputs."""

    requests: list[str]
    joules: list[float]
    source: str
    """Which meter: rapl, nvml, estimate, …"""
    is_estimate: bool


class StepOutputs(msgspec.Struct):
    """Everything a step yields for requests. Columns, not objects: a thousand rows do not cost a thousand structs."""

    keys: list[Key] = []
    tokens: list[int] = []
    counts: list[int] | None = None
    """Tokens of each key; None: one each."""
    drafts: list[int] | None = None
    """Drafts that were verified for the tokens of each key; None: none for any. Those that were accepted are all of its
    tokens but the last. Reported at once, because a request may end outside the engine."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By index into `tokens`."""
    prompt_logprobs: list[tuple[Key, PromptLogprobs]] = []
    vectors: list[tuple[Key, bytes]] = []
    """Vectors of pooling requests, as float32 bytes."""
    beams: list[tuple[str, list[Hypothesis]]] = []
    """Sequences that beam searches found, best first, by request."""
    started: list[Started] = []
    preempted: list[Key] = []
    """Sequences that were preempted in this step; reported at once, because a request may end outside the engine."""
    finished: list[Finished] = []
    energy: StepEnergy | None = None
    """With `report_energy`."""

    def add_one_each(self, keys: list[Key], tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> None:
        """One token for each key; `logprobs` by index into these tokens."""
        self._add_logprobs(logprobs)
        if self.counts is not None:
            self.counts += [1] * len(tokens)
        if self.drafts is not None:
            self.drafts += [0] * len(tokens)
        self.keys += keys
        self.tokens += tokens

    def add_runs(
        self,
        keys: list[Key],
        tokens: list[int],
        counts: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        drafts: list[int] | None = None,
    ) -> None:
        """`counts` tokens for each key, with `drafts` drafts or none; `logprobs` by index into these tokens."""
        if self.counts is None:
            self.counts = [1] * len(self.keys)
        if drafts is not None and self.drafts is None:
            self.drafts = [0] * len(self.keys)
        if self.drafts is not None:
            self.drafts += drafts or [0] * len(keys)
        self._add_logprobs(logprobs)
        self.keys += keys
        self.counts += counts
        self.tokens += tokens

    def add(self, key: Key, tokens: list[int], logprobs: Mapping[int, TokenLogprobs], drafts: int = 0) -> None:
        """Any number of tokens for one key."""
        self.add_runs([key], tokens, [len(tokens)], logprobs, [drafts] if drafts else None)

    def _add_logprobs(self, logprobs: Mapping[int, TokenLogprobs]) -> None:
        if logprobs:
            self.logprobs.update({len(self.tokens) + i: entry for i, entry in logprobs.items()})

    def pieces(self) -> Iterator[StepOutputs]:
        """The same outputs with few logprobs of prompts in each piece: the process that reads them has other work."""
        few: list[tuple[Key, PromptLogprobs]] = []
        count = 0
        for key, found in self.prompt_logprobs:
            for part in found.parts(PIECE_LOGPROBS):
                size = sum(len(entry.ids) for entry in part.entries)
                if count and count + size > PIECE_LOGPROBS:
                    yield StepOutputs(prompt_logprobs=few)
                    few, count = [], 0
                few.append((key, part))
                count += size
        self.prompt_logprobs = few
        yield self

    @property
    def is_empty(self) -> bool:
        """Nothing happened. Vectors and beams never come without a finished request."""
        return not (self.keys or self.finished or self.started or self.preempted or self.prompt_logprobs)


class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability at one position. Small and not garbage-collected: there may be 100,000s."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


# So that `dataclasses.asdict` works on whole outputs.
Logprob.__dataclass_fields__ = {one.name: one for one in fields(make_dataclass("Logprob", Logprob.__struct_fields__))}


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob]]):
    """Log-probabilities of many positions in columns (`flat_logprobs`): reads as a list of dicts, and can only grow."""

    start_indices: list[int] = field(default_factory=list)
    """Where each position begins in the columns below, and where it ends."""
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[Mapping[int, Logprob] | None]) -> FlatLogprobs:
        """The same in columns; a position without any is empty."""
        flat = cls()
        flat.extend(positions)  # type: ignore[arg-type]
        return flat

    def append(self, value: Mapping[int, Logprob] | None) -> None:
        """Add a position."""
        self.start_indices.append(len(self.token_ids))
        for token, entry in (value or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[i] for i in range(*index.indices(len(self))))
        columns = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in columns}

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to")

    def insert(self, index: int, value: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to")


@dataclass
class RequestMetrics:
    """Times and counts of a request. `arrival_time` is wall-clock, other times are monotonic; all in seconds."""

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    """Of all sequences."""
    max_num_generation_tokens: int = 0
    """Of the longest finished sequence."""
    preemptions: int = 0
    """How often its sequences were preempted."""
    num_draft_tokens: int = 0
    """Drafts that were verified for it, and of these…"""
    num_accepted_tokens: int = 0
    """…accepted."""
    joules: float = 0.0
    """Energy that it took, with `report_energy`…"""
    energy_source: str | None = None
    """…by which meter (rapl, nvml, estimate); None: it was not metered…"""
    energy_is_estimate: bool = False
    """…and whether any of it is an estimate."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token_ts - self.queued_ts

    @property
    def queue_time(self) -> float:
        """Seconds from arrival to the first scheduling."""
        return self.scheduled_ts - self.queued_ts


@dataclass
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    # What vLLM reports of features that quire lacks.
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its sequences, in index order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    lora_request: Any = None
    error: str | None = field(default=None)
    """What went wrong, when a sequence's finish_reason is "error"."""

    # What vLLM reports of features that quire lacks.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None


@dataclass
class PoolingOutput:
    """The vector of a prompt, float32: an embedding, or a number for each class. Empty if there is none because the
    request was aborted or failed."""

    data: NDArray[np.float32]


@dataclass
class PoolingRequestOutput:
    """A request for a vector, and the vector."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None
    finished: bool
    finish_reason: str | None = "stop"
    """How it ended: "stop", "abort" or "error"."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""
    metrics: RequestMetrics | None = None


@dataclass
class EmbeddingOutput:
    """The vector of a prompt, as Python floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """As `PoolingRequestOutput`, with the vector as a list."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None
    finished: bool
    finish_reason: str | None = "stop"
    error: str | None = None
    metrics: RequestMetrics | None = None

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The same with the vector as a list."""
        fields = vars(output) | {"outputs": EmbeddingOutput(output.outputs.data.tolist())}
        return cls(**fields)


@dataclass
class ClassificationOutput:
    """The probability of each class, as Python floats; the model's own numbers with `use_activation=False`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    """As `PoolingRequestOutput`, with the probabilities of classes."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None
    finished: bool
    finish_reason: str | None = "stop"
    error: str | None = None
    metrics: RequestMetrics | None = None

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> ClassificationRequestOutput:
        """The same with the vector as probabilities."""
        fields = vars(output) | {"outputs": ClassificationOutput(output.outputs.data.tolist())}
        return cls(**fields)


@dataclass
class ScoringOutput:
    """How similar two prompts are, or what a classifier of pairs says of them."""

    score: float


@dataclass
class ScoringRequestOutput:
    """Two prompts and their score; ids and tokens are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> ScoringRequestOutput:
        """What a classifier of pairs answered; 0 if it did not."""
        data = output.outputs.data
        return cls(
            request_id=output.request_id,
            outputs=ScoringOutput(float(data[0]) if len(data) else 0.0),
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens or 0,
            finished=output.finished,
        )


@dataclass
class BeamSearchSequence:
    """A sequence that a beam search found."""

    tokens: list[int]
    """The prompt's tokens, then the generated ones."""
    logprobs: list[dict[int, Logprob]]
    """Of each generated token, only its own."""
    cum_logprob: float = 0.0
    score: float = 0.0
    """`cum_logprob` normalized by length: sequences are ranked by it."""
    text: str | None = None
    """Of all tokens, the prompt's too; None without a tokenizer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass
class BeamSearchOutput:
    """A beam search and what it found, best first; nothing if it was aborted or failed."""

    sequences: list[BeamSearchSequence]
    request_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finished: bool = True
    finish_reason: str | None = "stop"
    """How the search ended: "stop", "abort" or "error"."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""
    metrics: RequestMetrics | None = None


Output = RequestOutput | PoolingRequestOutput | BeamSearchOutput
"""What a request yields: sequences, a vector, or a beam search's sequences."""
