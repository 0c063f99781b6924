"""Fields that say how text is to be made, shared by every route that makes some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from quire.messages.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.server.errors import bad_request
from quire.server.protocol.common import Body, check_depth
from quire.server.protocol.values import (
    AllowedTokens,
    Factor,
    LogitBias,
    ModelName,
    Name,
    Penalty,
    PositiveShare,
    Priority,
    PromptLogprobs,
    RequestId,
    Samples,
    Seconds,
    Seed,
    Share,
    StopStrings,
    Temperature,
    TokenIds,
    TopK,
    Truncation,
    WithinContext,
)

FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    *FROM_GENERATION_CONFIG, "n", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids",
    "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "bad_words", "logit_bias", "allowed_token_ids", "truncate_prompt_tokens",
)  # fmt: skip
"""Fields that mean the same in a body and in `SamplingParams`."""


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    """Usage in a last chunk of its own…"""
    continuous_usage_stats: bool | None = None
    """…and in all the others."""
    include_obfuscation: bool | None = None
    """Accepted, and never done."""


class StructuredOutputs(Body):
    """The form the output must have: exactly one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None


class JsonSchemaFormat(Body):
    """A schema under a name."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationFields(Body):
    """What chat and plain completions have in common."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
    }

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Samples | None = None
    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: WithinContext | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: list[Name] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    priority: Priority | None = None
    """Lower runs first, under the priority policy."""
    timeout: Seconds | None = None
    """Seconds the request may take, queued and running."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None
    """The answer tells how the request went: times, cached tokens, preemptions."""
    vllm_xargs: dict[str, Any] | None = None
    """Parameters of custom logits processors."""

    user: str | None = None
    """Accepted, and without effect; so are the next two."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """The same: what can be shared is found by itself."""

    best_of: int | None = None
    store: bool | None = None
    service_tier: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_fields(self) -> None:
        """What the types alone cannot say."""
        self.check_neutral()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not streamed; leave stream out", "prompt_logprobs")
        if self.timeout is not None and self.timeout <= 0:
            raise bad_request(f"timeout must be above 0 seconds, got {self.timeout}", "timeout")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise bad_request("priority must fit in 32 bits", "priority")
        for name in ("metadata", "vllm_xargs"):
            check_depth(name, getattr(self, name))


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters a body asks for, over the model's own. Raises `ValidationError` for values out of range."""
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {token: min(100.0, max(-100.0, bias)) for token, bias in body.logit_bias.items()}
    params = SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        extra_args=body.vllm_xargs,
    )
    params.structured_outputs = structured_outputs(body)
    return params


def structured_outputs(body: GenerationFields) -> StructuredOutputsParams | None:
    """The form that `response_format` and `structured_outputs` ask for; the first overrides the second."""
    fields: dict[str, Any] = {}
    if body.structured_outputs is not None:
        given = msgspec.structs.asdict(body.structured_outputs)
        fields = {name: value for name, value in given.items() if value is not None}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        fields |= _of_response_format(wanted)
    if not fields:
        if body.structured_outputs is not None:
            raise bad_request("structured_outputs names no form: give one of json, regex, choice, grammar, …")
        return None
    for name in ("json", "structural_tag"):
        check_depth(name, fields.get(name))
    return StructuredOutputsParams(**fields)


def _of_response_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
        return {"json": wanted.json_schema.schema}
    parts = ("format", "structures", "triggers")
    tag = {name: value for name in parts if (value := getattr(wanted, name)) is not None}
    return {"structural_tag": {"type": "structural_tag", **tag}}
