"""`SamplingParams`: how a request's tokens are sampled. Names, defaults and meanings are vLLM's.

The class is also the table of sampling parameters: a field's annotation holds its help text and, for the numbers the
sampler reads on the device (`Scalar`), its range. From it come validation, the columns of the device batch and their
packing, the fields of HTTP bodies, the flags of the command line and docs/configuration.md. To add such a number is to
add a field here and its effect to `worker/sampler.py` and `kernels/triton/filtering.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import msgspec

from quire.errors import ValidationError
from quire.messages.structured import StructuredOutputsParams as StructuredOutputsParams
from quire.vllm_arguments import SAMPLING, ForeignArgument, check_argument

MAX_N = 16384
MAX_STOP_STRINGS = 64
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 2**18
"""Most ids in one list: the size of the largest vocabularies. Each is checked in the caller's process."""
MAX_LOGPROB_TOKEN_IDS = 128
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
XTC_STREAM = 2**32
"""Added to a sequence's number: the random stream that decides whether XTC applies, apart from that of its tokens."""
DRAFT_STREAM, ACCEPT_STREAM = 2 * 2**32, 3 * 2**32
"""Likewise: streams that drafts are drawn from, and that decide whether one is accepted, where that is not decided by
the token drawn (`rejection_sample_method`)."""


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A sampling parameter that is one number for each row of the device batch; annotates its field."""

    help: str
    low: float
    high: float | None
    """None: no upper limit (integers only)."""
    excludes_low: bool = False
    """`low` itself is refused."""
    off: tuple[float, ...] = ()
    """Values without effect, the default first."""
    role: Literal["filter", "penalty", "other"] = "other"
    """filter: restricts which tokens may be sampled; greedy requests ignore it. penalty: changes logits by the tokens
    so far. A row with neither pays for neither."""
    in_generation_config: bool = False
    """A model's generation_config.json may set the default."""

    # From the field it annotates.
    name: str = ""
    kind: type = float
    default: float = 0.0

    def check(self, value: Any) -> None:
        """Raise unless the value is in range."""
        remedy = f"; {self.off[0]:g} turns it off" if self.off else f"; the default is {self.default:g}"
        if self.kind is int:
            check_integer(self.name, value, int(self.low), None if self.high is None else int(self.high), remedy)
        else:
            assert self.high is not None
            check_number(self.name, value, self.low, self.high, self.excludes_low, remedy)


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """Nothing until the request is done."""


class VllmFields(msgspec.StructMeta):
    """Makes a struct whose constructor also takes vLLM's fields that have no effect here; `foreign` lists them."""

    foreign: Mapping[str, ForeignArgument]

    def __call__(self, *values: Any, **fields: Any) -> Any:
        for name in self.foreign.keys() & fields.keys():
            check_argument(self.foreign[name], fields.pop(name))
        return super().__call__(*values, **fields)


class SamplingParams(msgspec.Struct, metaclass=VllmFields, omit_defaults=True, kw_only=False):
    """How tokens are sampled, when a request ends, and what is reported about it.

    Scalars apply in this order: penalties (after `logit_bias` and lists), `temperature`, then the filters:
    `top_n_sigma`, `min_p`, `top_k`, `top_p` among what `top_k` leaves, XTC by the probabilities of what these leave.
    `top_n_sigma` keeps the same tokens at every temperature, because the deviation scales with it ("Top-nσ: Not All
    Logits Are You Need"); the deviation is over all logits that are not masked.
    """

    foreign: ClassVar[Mapping[str, ForeignArgument]] = SAMPLING

    n: Annotated[int, "Sequences generated for one prompt. They share its computation and its cache blocks"] = 1
    presence_penalty: Annotated[
        float,
        Scalar(
            "Lowers the logit of every token that is in the output already; from -2 to 2", -2.0, 2.0,
            off=(0.0,), role="penalty",
        ),
    ] = 0.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        Scalar(
            "The same, once for each time the token is in the output; from -2 to 2", -2.0, 2.0,
            off=(0.0,), role="penalty",
        ),
    ] = 0.0  # fmt: skip
    repetition_penalty: Annotated[
        float,
        Scalar(  # logits are divided and multiplied by it: outside of this range they would overflow
            "Divides the logits of tokens in prompt or output (multiplies negative ones); 1 is off", 0.01, 100.0,
            off=(1.0,), role="penalty", in_generation_config=True,
        ),
    ] = 1.0  # fmt: skip
    temperature: Annotated[
        float,
        Scalar(
            "0 takes the most likely token; higher is more varied; at most 100", 0.0, 100.0, in_generation_config=True
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Scalar(
            "Sample from the most likely tokens whose probabilities add up to this; 1 is off", 0.0, 1.0,
            excludes_low=True, off=(1.0,), role="filter", in_generation_config=True,
        ),
    ] = 1.0  # fmt: skip
    top_k: Annotated[
        int,
        Scalar(
            "Sample from this many of the most likely tokens; 0 or -1 is off", -1, None,
            off=(0, -1), role="filter", in_generation_config=True,
        ),
    ] = 0  # fmt: skip
    min_p: Annotated[
        float,
        Scalar(
            "Sample from tokens with at least this probability relative to the most likely one; 0 is off", 0.0, 1.0,
            off=(0.0,), role="filter", in_generation_config=True,
        ),
    ] = 0.0  # fmt: skip
    seed: Annotated[
        int | None,
        "Makes the random numbers repeatable in any batch; 16-bit logits may still differ without --batch-invariant",
    ] = None
    stop: Annotated[list[str] | str | None, "Text that ends the output"] = None
    stop_token_ids: Annotated[list[int] | None, "Tokens that end the output"] = None
    ignore_eos: Annotated[bool, "Continue after the model's own end token"] = False
    max_tokens: Annotated[int | None, "Longest output in tokens; None is up to the model's length"] = 16
    min_tokens: Annotated[int, "The output does not end before this many tokens"] = 0
    logprobs: Annotated[
        int | None, "Report the log-probability of each sampled token and of this many of the likeliest; -1 is all"
    ] = None
    prompt_logprobs: Annotated[int | None, "The same for the prompt's tokens"] = None
    logprob_token_ids: Annotated[
        list[int] | None, "Report the log-probabilities of these tokens, at most 128, instead of the likeliest"
    ] = None
    detokenize: Annotated[bool, "Turn tokens into text"] = True
    skip_special_tokens: Annotated[bool, "Leave special tokens out of the text"] = True
    spaces_between_special_tokens: Annotated[bool, "Put spaces between special tokens in the text"] = True
    include_stop_str_in_output: Annotated[bool, "Keep the stop text at the end of the output"] = False
    bad_words: Annotated[list[str] | None, "Words that are never generated"] = None
    logit_bias: Annotated[dict[int, float] | None, "Added to the logits of tokens, by token id"] = None
    allowed_token_ids: Annotated[list[int] | None, "Sample from these tokens only"] = None
    truncate_prompt_tokens: Annotated[
        int | None, "Keep this many of the prompt's last tokens; -1 is as many as fit"
    ] = None
    output_kind: Annotated[
        RequestOutputKind,
        "What each output of a stream holds: all so far, what is new, or nothing until the end",
    ] = RequestOutputKind.CUMULATIVE
    extra_args: Annotated[dict[str, Any] | None, "Parameters of custom logits processors"] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, "A form the output must have: a JSON schema, regex, choice or grammar"
    ] = None
    """`min_tokens` and `ignore_eos` yield to it: where the form is complete, the output ends."""
    flat_logprobs: Annotated[bool, "Report logprobs in columns (`FlatLogprobs`) instead of lists of dicts"] = False
    xtc_probability: Annotated[
        float,
        Scalar(
            "Probability that a token is sampled without the top choices (XTC): all tokens with a probability of at "
            "least xtc_threshold, except the least likely of them; 0 is off", 0.0, 1.0,
            off=(0.0,), role="filter",
        ),
    ] = 0.0  # fmt: skip
    xtc_threshold: Annotated[
        float,
        Scalar(
            "Probability from which on a token is a top choice for XTC, after temperature and the other filters; "
            "above 0.5 there is never more than one", 0.0, 1.0,
        ),
    ] = 0.1  # fmt: skip
    top_n_sigma: Annotated[
        float,
        Scalar(
            "Sample from tokens whose logit is at most this many standard deviations of all logits below the largest; "
            "0 is off", 0.0, 100.0,
            off=(0.0,), role="filter",
        ),
    ] = 0.0  # fmt: skip

    def __post_init__(self) -> None:
        self.stop = _string_list("stop", self.stop)
        self.bad_words = _string_list("bad_words", self.bad_words)
        self.seed = None if self.seed == -1 else self.seed
        self._check_numbers()
        self._check_lists()
        self._check_together()
        if self.is_greedy:
            for scalar in FILTERS:
                setattr(self, scalar.name, scalar.default)
        else:
            self.temperature = max(self.temperature, LOWEST_TEMPERATURE)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Like the constructor, but None means a field's default and biases are clamped to [-100, 100]."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if given.get("logit_bias"):
            given["logit_bias"] = _clamped_bias(given["logit_bias"])
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy that can be changed without touching this one; checked like a new one."""
        flat = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logprob_token_ids")
        mutable = {name: copy.copy(value) for name in flat if (value := getattr(self, name)) is not None}
        if self.extra_args is not None:
            mutable["extra_args"] = copy.deepcopy(self.extra_args)
        return msgspec.structs.replace(self, **mutable)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return any(getattr(self, scalar.name) not in scalar.off for scalar in PENALTIES)

    @property
    def has_filters(self) -> bool:
        return any(getattr(self, scalar.name) not in scalar.off for scalar in FILTERS)

    @property
    def stop_strings(self) -> list[str]:
        return self.stop or []  # type: ignore[return-value]

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_N)
        for scalar, value in zip(SCALARS, scalar_values(self), strict=True):
            scalar.check(value)
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
            raise ValidationError("allowed_token_ids is empty: no token could ever be sampled", "allowed_token_ids", [])
        self._check_logprob_ids()
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

    def _check_logprob_ids(self) -> None:
        ids = self.logprob_token_ids = check_token_ids("logprob_token_ids", self.logprob_token_ids) or None
        if ids is None:
            return
        if len(ids) > MAX_LOGPROB_TOKEN_IDS or len(set(ids)) < len(ids):
            raise ValidationError(
                f"logprob_token_ids are at most {MAX_LOGPROB_TOKEN_IDS} different ids, got {len(ids)}, of which "
                f"{len(set(ids))} differ", "logprob_token_ids", len(ids),
            )  # fmt: skip
        self.logprobs = len(ids)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens", self.min_tokens
            )
        if self.stop and not self.detokenize:
            raise ValidationError("stop strings need detokenize=True: they are found in the text", "stop", self.stop)
        if self.n > 1 and self.is_greedy:
            raise ValidationError(
                f"n must be 1 with temperature 0, got {self.n}: all greedy sequences are the same", "n", self.n
            )


def _read_table() -> tuple[tuple[Scalar, ...], dict[str, str]]:
    """(the scalar fields, each field's help text)."""
    scalars, meanings = [], {}
    hints = get_type_hints(SamplingParams, include_extras=True)
    for field in msgspec.structs.fields(SamplingParams):
        kind, note = get_args(hints[field.name])
        meanings[field.name] = note.help if isinstance(note, Scalar) else note
        if isinstance(note, Scalar):
            scalars.append(dataclasses.replace(note, name=field.name, kind=kind, default=field.default))
    return tuple(scalars), meanings


SCALARS, HELP = _read_table()
"""The scalars in the order of the device batch's columns; the help text of every field."""
COLUMN = {scalar.name: column for column, scalar in enumerate(SCALARS)}
FILTERS = tuple(scalar for scalar in SCALARS if scalar.role == "filter")
PENALTIES = tuple(scalar for scalar in SCALARS if scalar.role == "penalty")
FROM_GENERATION_CONFIG = tuple(scalar.name for scalar in SCALARS if scalar.in_generation_config)

scalar_values = operator.attrgetter(*COLUMN)
"""Of a `SamplingParams`: its scalars in that order."""


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def check_number(
    name: str, value: float, low: float, high: float, excludes_low: bool = False, remedy: str = ""
) -> None:
    """Raise unless it is a number in these bounds."""
    inside = _is_finite(value) and (low < value if excludes_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if excludes_low else "["
        raise ValidationError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}{remedy}", name, value)


def check_integer(name: str, value: int, low: int, high: int | None = None, remedy: str = "") -> None:
    """Raise unless it is an integer in these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValidationError(f"{name} must be an integer {wanted}, got {value!r}{remedy}", name, value)
    if value.bit_length() > 64:
        raise ValidationError(f"{name} must be an integer of 64 bits", name, value)


def _string_list(name: str, value: Sequence[str] | str | None) -> list[str] | None:
    values = [value] if isinstance(value, str) else list(_require_list(name, value) or [])
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{name} must hold non-empty strings, got {text!r}", name, value)
    return values or None


def check_count(name: str, value: Collection[object]) -> None:
    """Raise for more token ids than a list may hold."""
    if len(value) > MAX_TOKEN_IDS:
        raise ValidationError(f"{name} holds {len(value)} token ids; at most {MAX_TOKEN_IDS}", name, len(value))


def check_token_ids(name: str, value: Sequence[int] | None) -> list[int] | None:
    """The ids as a list; raises unless each is a valid id."""
    check_count(name, _require_list(name, value) or [])
    if value:
        _check_ids(name, value)
    return None if value is None else list(value)


def _check_ids(name: str, ids: Collection[int]) -> None:
    """Valid ids are checked all at once: there may be many thousand, checked more than once."""
    if set(map(type, ids)) <= {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return
    for token in ids:
        check_integer(name, token, 0, MAX_TOKEN_ID)


def _require_list(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
        raise ValidationError(f"{name} must be a list, got {value!r}", name, value)
    return value


def _clamped_bias(bias: Any) -> dict[int, float]:
    try:
        return {int(token): min(100.0, max(-100.0, float(value))) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValidationError(f"logit_bias must map token ids to numbers, got {bias!r}", "logit_bias", bias) from error
