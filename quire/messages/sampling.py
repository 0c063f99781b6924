"""`SamplingParams`: how a request wants its tokens drawn. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import ValidationError
from quire.messages.structured import StructuredOutputsParams as StructuredOutputsParams

MAX_N = 16384
MAX_STOP_STRINGS = 64
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 2**18
"""In one list: as many as the largest vocabularies have. Each is looked at, by whoever makes the request."""
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
REPETITION_PENALTY = 0.01, 100.0
"""Logits are divided and multiplied by it: far beyond, they are no numbers any more."""


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """Nothing until the request is done."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=False):
    """How tokens are drawn, when a request ends, and what is reported about it."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    """The form the output must have. `min_tokens` and `ignore_eos` yield to it: where it is complete, output ends."""

    def __post_init__(self) -> None:
        self.stop = _strings("stop", self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        self.seed = None if self.seed == -1 else self.seed
        self._check_numbers()
        self._check_lists()
        self._check_together()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        else:
            self.temperature = max(self.temperature, LOWEST_TEMPERATURE)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """As the constructor, with None standing for a field's default and biases clamped to [-100, 100]."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if given.get("logit_bias"):
            given["logit_bias"] = _clamped(given["logit_bias"])
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy that can be changed without touching this one; checked like a new one."""
        flat = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
        mutable = {name: copy.copy(value) for name in flat if (value := getattr(self, name)) is not None}
        if self.extra_args is not None:
            mutable["extra_args"] = copy.deepcopy(self.extra_args)
        return msgspec.structs.replace(self, **mutable)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> list[str]:
        return self.stop or []  # type: ignore[return-value]

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_N)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTY)
        check_number("temperature", self.temperature, 0.0, 2.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            check_integer("prompt_logprobs", self.prompt_logprobs, -1)
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise ValidationError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens", 0
                )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValidationError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}", "output_kind")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise ValidationError(
                f"structured_outputs must be a StructuredOutputsParams, got {self.structured_outputs!r}",
                "structured_outputs",
                self.structured_outputs,
            )

    def _check_lists(self) -> None:
        self.stop_token_ids = list(dict.fromkeys(check_token_ids("stop_token_ids", self.stop_token_ids) or [])) or None
        self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValidationError("allowed_token_ids is empty: no token could ever be drawn", "allowed_token_ids", [])
        if self.logit_bias:
            if not isinstance(self.logit_bias, Mapping):
                raise ValidationError(f"logit_bias must map token ids to biases, got {self.logit_bias!r}", "logit_bias")
            check_count("logit_bias", self.logit_bias)
            _check_ids("logit_bias", self.logit_bias)
            for token, bias in self.logit_bias.items():
                if not _is_finite(bias):
                    raise ValidationError(
                        f"logit_bias of token {token} must be a finite number, got {bias!r}", "logit_bias"
                    )
        if self.stop is not None and len(self.stop) > MAX_STOP_STRINGS:
            raise ValidationError(
                f"{len(self.stop)} stop strings given; at most {MAX_STOP_STRINGS}", "stop", len(self.stop)
            )

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens", self.min_tokens
            )
        if self.stop and not self.detokenize:
            raise ValidationError("stop strings need detokenize=True: they are found in the text", "stop", self.stop)
        if self.n > 1 and self.is_greedy:
            raise ValidationError(
                f"n must be 1 with temperature 0, got {self.n}: all greedy samples are the same", "n", self.n
            )


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def check_number(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    """Raise unless it is a number in these bounds."""
    inside = _is_finite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValidationError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}", name, value)


def check_integer(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise unless it is an integer in these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValidationError(f"{name} must be an integer {wanted}, got {value!r}", name, value)
    if value.bit_length() > 64:
        raise ValidationError(f"{name} must be an integer of 64 bits", name, value)


def _strings(name: str, value: Sequence[str] | str | None) -> list[str] | None:
    values = [value] if isinstance(value, str) else list(_listed(name, value) or [])
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{name} must hold non-empty strings, got {text!r}", name, value)
    return values or None


def check_count(name: str, value: Collection[object]) -> None:
    """Raise for more token ids than anybody needs."""
    if len(value) > MAX_TOKEN_IDS:
        raise ValidationError(f"{name} holds {len(value)} token ids; at most {MAX_TOKEN_IDS}", name, len(value))


def check_token_ids(name: str, value: Sequence[int] | None) -> list[int] | None:
    """The ids as a list; raises unless they may be some."""
    check_count(name, _listed(name, value) or [])
    if value:
        _check_ids(name, value)
    return None if value is None else list(value)


def _check_ids(name: str, ids: Collection[int]) -> None:
    """There may be many thousand, and they are checked more than once: those that are right, all together."""
    if set(map(type, ids)) <= {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return
    for token in ids:
        check_integer(name, token, 0, MAX_TOKEN_ID)


def _listed(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
        raise ValidationError(f"{name} must be a list, got {value!r}", name, value)
    return value


def _clamped(bias: Any) -> dict[int, float]:
    try:
        return {int(token): min(100.0, max(-100.0, float(value))) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValidationError(f"logit_bias must map token ids to numbers, got {bias!r}", "logit_bias", bias) from error
