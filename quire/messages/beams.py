"""Beam search: its parameters, the state of a running beam, and the sequences found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from quire.errors import ValidationError
from quire.messages.plan import TokenLogprobs
from quire.messages.sampling import VllmFields, check_integer, check_number, check_token_ids
from quire.vllm_arguments import BEAMS, ForeignArgument

MAX_WIDTH = 1024
STEEPEST_PENALTY = 50.0
"""Beyond this, a power of a long context overflows."""


class BeamSearchParams(msgspec.Struct, metaclass=VllmFields, omit_defaults=True):
    """How wide a beam search is, how it ranks sequences, and when it ends. Names are vLLM's and transformers'."""

    foreign: ClassVar[Mapping[str, ForeignArgument]] = BEAMS

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Only 0: beams are ranked by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by (generated tokens ** length_penalty)."""
    include_stop_str_in_output: bool = False
    """Whether the end token is one of a sequence's tokens."""
    early_stopping: bool | str = False
    """When `beam_width` sequences have ended. True: the search is over. False: it continues while the best open beam,
    at its present length, beats the worst of them. "never": while an open beam could beat it at any length."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a sequence, besides the model's own."""

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1)
        check_number("length_penalty", self.length_penalty, -STEEPEST_PENALTY, STEEPEST_PENALTY)
        self.stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids) or None
        if self.temperature != 0:
            raise ValidationError(
                f"temperature must be 0 in a beam search, got {self.temperature!r}: beams are ranked by the model's "
                "own log-probabilities",
                "temperature",
                self.temperature,
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValidationError(
                f'early_stopping must be False, True or "never", got {self.early_stopping!r}',
                "early_stopping",
                self.early_stopping,
            )

    def clone(self) -> BeamSearchParams:
        """A copy that can be changed without touching this one; checked like a new one."""
        return msgspec.structs.replace(self)


class Hypothesis(msgspec.Struct):
    """A finished sequence, its end token included."""

    tokens: list[int]
    """Generated tokens."""
    logprobs: list[float]
    ranks: list[int]
    """Each token's rank among all tokens (1 is best)."""
    total: float
    """Sum of the log-probabilities."""
    score: float
    """The sum normalized by length: sequences are ranked by it."""
    reason: str
    stop_reason: int | None = None
    """The token that ended it, unless it is the model's own end token."""


@dataclass
class Beam:
    """State of a running beam besides its tokens."""

    total: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    candidates: TokenLogprobs | None = None
    """The tokens that may follow. Set: the beam waits for the choice among them."""

    def follow(self, logprob: float, rank: int) -> None:
        """Append a token to the beam."""
        self.total += logprob
        self.logprobs.append(logprob)
        self.ranks.append(rank)
        self.candidates = None

    def followed(self, logprob: float, rank: int) -> Beam:
        """A copy of the beam with one more token."""
        beam = Beam(self.total, list(self.logprobs), list(self.ranks))
        beam.follow(logprob, rank)
        return beam
