"""What the request and response bodies of all routes share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import short_repr
from quire.messages.outputs import RequestMetrics, RequestOutput
from quire.server.errors import bad_request
from quire.server.protocol.values import Prompt

MAX_JSON_DEPTH = 64
"""Nesting levels allowed in free-form JSON (schemas, tool parameters)…"""
MAX_FREE_VALUES = 1 << 15
"""…its values…"""
MAX_FREE_CHARACTERS = 1 << 20
"""…and the characters of its texts."""
MAX_SHORT_TEXT = 4096
"""Characters of names, ids and other texts that no model reads."""
MAX_METADATA_ENTRIES = 64
MAX_METADATA_CHARACTERS = 1 << 15
FEW_PROMPTS = 16

HINTS: Mapping[str, str] = {
    "best_of": "request n sequences and choose among them",
    "logits_processors": "they are configured with --logits-processors, and read vllm_xargs",
    "guided_whitespace_pattern": "use structured_outputs with disable_any_whitespace",
    "audio": "answers are text",
    "modalities": "answers are text",
    "web_search_options": "the server does not access the web; give a search tool in tools",
    "thinking_token_budget": "leave it out",
    "mm_processor_kwargs": "they belong to chats with images",
    "media_io_kwargs": "send a video as frames",
    "prompt_embeds": "they belong to /v1/completions",
    "repetition_detection": "use repetition_penalty or stop",
    "kv_transfer_params": "KV transfer between servers is not supported",
    "ec_transfer_params": "KV transfer between servers is not supported",
}
"""What to use instead of fields that would change the answer and are not supported."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request's body, or an object in it, read by the rule of `quire.server.protocol.fields`. Null always means the
    default; a field of type None would change the answer and is refused."""

    hints: ClassVar[Mapping[str, str]] = {}
    """Refused fields, and what to use instead of each."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted only with these values, which have no effect."""
    long_texts: ClassVar[frozenset[str]] = frozenset(
        {"prompt", "prompt_embeds", "input", "instructions", "system", "chat_template"}
    )
    """Fields whose text may be long."""

    @property
    def client_names(self) -> Mapping[str, str]:
        """Maps internal field names to the client's, which errors use."""
        return {}

    def check_sizes(self) -> None:
        """Refuse long texts where names are expected, and much metadata."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and len(value) > MAX_SHORT_TEXT and name not in self.long_texts:
                raise bad_request(f"{name} has {len(value)} characters; at most {MAX_SHORT_TEXT}", name)
            if name == "metadata" and isinstance(value, dict):
                _check_metadata(value)

    def check_neutral(self) -> None:
        """Refuse values of `neutral` fields that would have an effect."""
        for name, values in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                wanted = " or ".join(repr(accepted) for accepted in values)
                hint = self.hints.get(name, f"leave it out, or give {wanted}")
                raise bad_request(f"{name}={short_repr(value)} is not supported: {hint}", name)


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType | None = msgspec.UNSET
    """With `--enable-prompt-tokens-details`; otherwise null in a whole response, and left out of events."""
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    energy: UsedEnergy | msgspec.UnsetType = msgspec.UNSET


class UsedEnergy(msgspec.Struct):
    """Energy of a request (an extension, with `--report-energy`)."""

    joules: float
    joules_per_token: float
    """Over the tokens that were generated; of requests that generate none, those of the prompt."""
    estimated: bool
    """Whether joules come from a model instead of a meter."""
    source: str
    """rapl, nvml, estimate, …"""


def used_energy(metered: Iterable[RequestMetrics | None], tokens: int) -> UsedEnergy | UnsetType:
    """The energy of requests together; UNSET if it was not metered."""
    known = [metrics for metrics in metered if metrics is not None and metrics.energy_source is not None]
    if not known:
        return UNSET
    joules = sum(metrics.joules for metrics in known)
    return UsedEnergy(
        joules=round(joules, 6),
        joules_per_token=round(joules / max(1, tokens), 9),
        estimated=any(metrics.energy_is_estimate for metrics in known),
        source=known[-1].energy_source or "",
    )


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Prompt tokens that stand for images and videos; left out without any."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the request's prediction that the answer has, if the prediction is used for drafts…"""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """…and those that it does not have."""


def check_salt(salt: str | None) -> None:
    """Refuse an empty salt: it would separate nothing."""
    if salt == "":
        raise bad_request("cache_salt is empty, and separates nothing: leave it out, or give a text", "cache_salt")


class RequestTimings(msgspec.Struct):
    """Timings of one request."""

    time_to_first_token_ms: float | None
    queue_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    cached_tokens: int
    preemptions: int
    draft_tokens: int | UnsetType = UNSET
    """Drafts that were verified, and of these…"""
    accepted_tokens: int | UnsetType = UNSET
    """…accepted; left out if there were no drafts."""


def request_timings(output: RequestOutput) -> RequestTimings:
    """The timings of a request that has ended."""
    metrics = output.metrics or RequestMetrics(arrival_time=0.0)
    first, last, count = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    longest = metrics.max_num_generation_tokens or count  # sequences of one prompt are generated in parallel
    generating = last - first
    return RequestTimings(
        time_to_first_token_ms=_milliseconds(metrics.first_token_latency) if first else None,
        queue_time_ms=_milliseconds(max(0.0, metrics.queue_time)) if metrics.scheduled_ts else None,
        generation_time_ms=_milliseconds(generating) if first else None,
        mean_itl_ms=_milliseconds(generating / (longest - 1)) if longest > 1 else None,
        tokens_per_second=round((count - 1) / generating, 2) if count > 1 and generating > 0 else None,
        cached_tokens=output.num_cached_tokens or 0,
        preemptions=metrics.preemptions,
        draft_tokens=metrics.num_draft_tokens or UNSET,
        accepted_tokens=metrics.num_accepted_tokens if metrics.num_draft_tokens else UNSET,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def check_free_form(
    name: str, *given: Any, most_values: int = MAX_FREE_VALUES, most_characters: int = MAX_FREE_CHARACTERS
) -> None:
    """Refuse free-form JSON that is nested too deep for recursive code, or too large."""
    level: list[Any] = list(given)
    depth = values = characters = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH + 1:
            raise bad_request(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", name)
        values += len(level)
        if values > most_values:
            raise bad_request(f"{name} holds more than {most_values} values", name)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                characters += sum(map(len, item))
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if characters > most_characters:
            raise bad_request(f"{name} holds texts of more than {most_characters} characters", name)
        level = inner


def check_conversation(name: str, *given: Any) -> None:
    """The same for what the model reads: only the body's own size limits it."""
    check_free_form(name, *given, most_values=sys.maxsize, most_characters=sys.maxsize)


def _check_metadata(given: Mapping[str, str]) -> None:
    size = sum(len(text) for pair in given.items() for text in pair if isinstance(text, str))
    if len(given) > MAX_METADATA_ENTRIES or size > MAX_METADATA_CHARACTERS:
        raise bad_request(
            f"metadata has {len(given)} entries of {size} characters; at most {MAX_METADATA_ENTRIES} and "
            f"{MAX_METADATA_CHARACTERS}",
            "metadata",
        )


def check_scheduling(timeout: float | None, priority: int | None) -> None:
    """Raise 400 for a timeout or a priority out of range."""
    if timeout is not None and timeout <= 0:
        raise bad_request(f"timeout must be above 0 seconds, got {timeout}", "timeout")
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise bad_request("priority must fit in 32 bits", "priority")


def has_many_prompts(given: Prompt | None) -> bool:
    """Whether there are so many prompts that even short ones take long."""
    return isinstance(given, list) and len(given) > FEW_PROMPTS and not isinstance(given[0], int)


def prompt_list(given: Prompt, field: str) -> list[str | list[int]]:
    """One or several prompts as a list; `field` is named in errors."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{field} is an empty list", field)
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        return given  # type: ignore[return-value]
    raise bad_request(f"{field} must be text, token ids, or a list of one of the two", field)
