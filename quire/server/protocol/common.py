"""What the bodies of all routes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from quire.messages.outputs import RequestMetrics, RequestOutput
from quire.server.errors import bad_request

DEEPEST_JSON = 64
"""Levels of free JSON (schemas, tool parameters) that are looked at; what comes after a body's own structs."""

_INSTEAD = "use structured_outputs or response_format"
HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
         "guided_whitespace_pattern"), _INSTEAD,
    ),
    "best_of": "ask for n samples and choose among them",
    "logits_processors": "they are set up with the engine (--logits-processors), and read vllm_xargs",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "the model completes at the end only",
    "audio": "answers are text",
    "modalities": "answers are text",
    "prediction": "leave it out",
    "web_search_options": "the server fetches nothing; offer a search tool of your own",
    "store": "nothing is stored; send false or leave it out",
    "thinking_token_budget": "leave it out",
    "mm_processor_kwargs": "the model reads text only",
    "media_io_kwargs": "the model reads text only",
    "prompt_embeds": "send text or token ids",
    "max_tokens_per_doc": "leave it out",
    "reasoning": "set the template's own switch in chat_template_kwargs, such as enable_thinking",
    "echo": "only /v1/completions can echo",
    "logprob_token_ids": "ask for logprobs of the likeliest",
    "repetition_detection": "use repetition_penalty or stop",
    "stream_interval": "each token has an event, but for readers that are slow",
    "return_prompt_text": "ask for return_token_ids, and /detokenize those of the prompt",
    "kv_transfer_params": "servers do not send each other KV",
    "ec_transfer_params": "servers do not send each other KV",
}  # fmt: skip
"""What to do instead, of fields that other servers know and this one refuses."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request's body. A field it does not name is refused, null is always the default, and a field of type null is
    one that clients know and this server refuses."""

    hints: ClassVar[Mapping[str, str]] = HINTS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that may be given as long as they ask for nothing: the values that do not."""

    @property
    def client_names(self) -> Mapping[str, str]:
        """What is called otherwise inside, and what the client calls it: refusals are told in the client's words."""
        return {}

    def check_neutral(self) -> None:
        """Refuse what asks for something that is not done here."""
        for name, values in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                wanted = " or ".join(repr(accepted) for accepted in values)
                hint = self.hints.get(name, f"leave it out, or give {wanted}")
                raise bad_request(f"{name}={value!r} is not supported: {hint}", name)


class Usage(msgspec.Struct, omit_defaults=True):
    """Tokens read and written."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Tokens of the prompt whose computation was found in the cache."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class RequestTimings(msgspec.Struct):
    """How one request went, in milliseconds where nothing else is said."""

    time_to_first_token_ms: float | None
    queue_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    cached_tokens: int
    preemptions: int


def request_timings(output: RequestOutput) -> RequestTimings:
    """The figures of a request that has ended."""
    metrics = output.metrics or RequestMetrics(arrival_time=0.0)
    first, last, count = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    longest = metrics.max_num_generation_tokens or count  # samples of one prompt are generated side by side
    generating = last - first
    return RequestTimings(
        time_to_first_token_ms=_milliseconds(metrics.first_token_latency) if first else None,
        queue_time_ms=_milliseconds(max(0.0, metrics.queue_time)) if metrics.scheduled_ts else None,
        generation_time_ms=_milliseconds(generating) if first else None,
        mean_itl_ms=_milliseconds(generating / (longest - 1)) if longest > 1 else None,
        tokens_per_second=round((count - 1) / generating, 2) if count > 1 and generating > 0 else None,
        cached_tokens=output.num_cached_tokens or 0,
        preemptions=metrics.preemptions,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def check_depth(name: str, value: Any) -> None:
    """Refuse free JSON that is nested so deep that whoever walks through it would fall."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST_JSON:
            raise bad_request(f"{name} is nested more than {DEEPEST_JSON} levels deep", name)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(child for child in item.values() if isinstance(child, (dict, list)))
            elif isinstance(item, list):
                inner.extend(child for child in item if isinstance(child, (dict, list)))
        level = inner
