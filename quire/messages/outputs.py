"""What comes out: of a step (`StepOutputs`, to the caller's process), and to the user (`RequestOutput`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.messages.plan import PromptLogprobs, TokenLogprobs

Key = tuple[str, int]
"""A request's id and which of its samples is meant."""


class Started(msgspec.Struct):
    """A request was scheduled for the first time."""

    key: Key
    at: float
    num_cached: int


class Finished(msgspec.Struct):
    """A sample has ended."""

    key: Key
    reason: str
    stop_reason: Any = None
    preemptions: int = 0
    message: str | None = None
    """What went wrong, when the reason is "error"."""


class StepOutputs(msgspec.Struct):
    """Everything one step told about requests. Columns, not objects: a thousand rows cost no thousand structs."""

    keys: list[Key] = []
    tokens: list[int] = []
    counts: list[int] | None = None
    """Tokens of each key; None: one each."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By index into `keys`."""
    prompt_logprobs: list[tuple[Key, PromptLogprobs]] = []
    started: list[Started] = []
    finished: list[Finished] = []


@dataclass
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """When things happened to a request. `arrival_time` is wall-clock; the rest are monotonic seconds."""

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    preemptions: int = 0

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
    """One sample of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its samples, in index order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    lora_request: Any = None
    error: str | None = field(default=None)
    """What went wrong, when a sample's finish_reason is "error"."""
