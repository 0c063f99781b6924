"""Generation parameters, shared by every route that generates text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import short_repr
from quire.messages.beams import BeamSearchParams
from quire.messages.sampling import SCALARS, RequestOutputKind, SamplingParams, Scalar, StructuredOutputsParams
from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, MAX_SHORT_TEXT, Body, check_free_form, check_salt, check_scheduling
from quire.server.protocol.values import (
    LARGEST_SEED,
    AdapterWeights,
    AllowedTokens,
    Hint,
    LogitBias,
    Metadata,
    ModelName,
    Name,
    Power,
    Priority,
    PromptLogprobs,
    RequestId,
    Samples,
    Seconds,
    Seed,
    SessionName,
    StopStrings,
    TokenIds,
    Truncation,
    WithinContext,
)

MAX_XARGS_VALUES = 4096
MAX_XARGS_CHARACTERS = 1 << 16
"""Of vllm_xargs, which go to the engine with each request."""
SCALAR_NAMES = tuple(scalar.name for scalar in SCALARS)
_PLAIN = (
    *SCALAR_NAMES, "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "bad_words", "logit_bias",
    "allowed_token_ids", "truncate_prompt_tokens", "logprob_token_ids",
)  # fmt: skip
"""Fields that mean the same in a body and in `SamplingParams`."""


GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
"""Older names of the fields of `structured_outputs`."""

AnyBody = TypeVar("AnyBody", bound=Body)

_IN_SEARCHES = ("n", "skip_special_tokens", "spaces_between_special_tokens")
_NOT_IN_SEARCHES: Mapping[str, tuple[Any, ...]] = {
    **{scalar.name: scalar.off for scalar in SCALARS if scalar.off},
    "min_tokens": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stream": (False,),
    **dict.fromkeys(
        (
            "prompt_logprobs",
            "allowed_token_ids",
            "truncate_prompt_tokens",
            "structured_outputs",
            "vllm_xargs",
            "logprob_token_ids",
        ),
        (),
    ),
}
"""Fields that a beam search refuses, and their values without effect, which it accepts."""


def with_scalars(body: type[AnyBody]) -> type[AnyBody]:
    """Class decorator: add the scalar sampling parameters to the fields of a body."""
    fields = [(scalar.name, Annotated[scalar.kind, _describe(scalar)] | None, None) for scalar in SCALARS]
    namespace = {"__doc__": body.__doc__}
    return msgspec.defstruct(  # type: ignore[return-value]
        body.__name__, fields, bases=(body,), module=body.__module__, namespace=namespace, kw_only=True
    )


def given_scalars(body: Body) -> dict[str, Any]:
    """The scalar sampling parameters that a body sets."""
    return {name: value for name in SCALAR_NAMES if (value := getattr(body, name)) is not None}


def _describe(scalar: Scalar) -> msgspec.Meta:
    """A scalar's OpenAPI description; its range is checked by `SamplingParams`."""
    schema = {"exclusiveMinimum" if scalar.excludes_low else "minimum": scalar.low}
    if scalar.high is not None:
        schema["maximum"] = scalar.high
    return msgspec.Meta(description=scalar.help, extra_json_schema=schema)


def check_seed(seed: int | None) -> None:
    """Refuse a seed of more than 64 bits with a sign."""
    if seed is not None and not -LARGEST_SEED - 1 <= seed <= LARGEST_SEED:
        raise bad_request(f"seed must be from {-LARGEST_SEED - 1} to {LARGEST_SEED}, got {short_repr(seed)}", "seed")


class StreamOptions(Body):
    """What a stream reports besides text."""

    include_usage: bool | UnsetType | None = UNSET
    """Usage in a separate last chunk; false or null: not."""
    continuous_usage_stats: bool | UnsetType | None = UNSET
    """Usage in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""


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
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's field for the form of the output."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """Another place of the schema."""
    name: Hint = None
    strict: Hint = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


@with_scalars
class GenerationFields(Body):
    """Fields of both chat completions and completions."""

    hints: ClassVar[Mapping[str, str]] = HINTS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,)}

    model: ModelName | None = None
    """A served name, or the name of a LoRA adapter."""
    adapters: AdapterWeights | None = None
    """LoRA adapters by name, each with its weight: what they change adds up."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Samples | None = None
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
    logprob_token_ids: AllowedTokens | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Which end of the prompt is left out; unset: left, the beginning."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Union[str, dict[str, Any], None] = None
    """An older spelling of `structured_outputs.json`, as are the next three of their fields."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: None = None
    guided_decoding_backend: Hint = None

    priority: Priority | None = None
    """Lower runs first, under the priority policy."""
    timeout: Seconds | None = None
    """Seconds the request may take, queued and running."""
    cache_salt: Name | None = None
    """Only requests with the same salt share cached prefixes."""
    request_id: RequestId | None = None
    session_id: SessionName | None = None
    """A session whose content is the prompt; the answer is appended to it. The header X-Session-Id does the same."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None
    """Return the request's metrics: times, cached tokens, preemptions."""
    vllm_xargs: dict[str, Any] | None = None
    """Parameters of custom logits processors."""

    metadata: Metadata | None = None
    """Accepted without effect."""
    user: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    """Shared prefixes are found automatically."""
    prompt_cache_retention: Hint = None
    store: Hint = None
    """Answers of this route are never stored."""
    service_tier: Hint = None
    stream_interval: Hint = None

    best_of: int | None = None

    use_beam_search: bool | None = None
    """Return the `n` likeliest texts, best first, found by a beam search of that width."""
    length_penalty: Power | None = None
    """How that search weighs length: above 0 favours long texts, below 0 short ones."""

    @property
    def client_names(self) -> Mapping[str, str]:
        return {**({} if self.session_id is None else session_names("session_id")), **self._structured_output_names}

    @property
    def _structured_output_names(self) -> Mapping[str, str]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            guided = next((name for name in GUIDED if getattr(self, name)), None)
            return {} if guided is None else structured_output_names(guided, guided)
        inside = "schema" if wanted.json_schema is None else "json_schema.schema"
        return structured_output_names("response_format", f"response_format.{inside}")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage in (True, UNSET)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        self.check_neutral()
        if not self.stream and self.stream_options is not None and self.stream_options != StreamOptions():
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs:
            raise bad_request("prompt_logprobs are not streamed; leave stream out", "prompt_logprobs")
        if self.logprob_token_ids == []:
            raise bad_request("logprob_token_ids is empty: leave it out, or name tokens", "logprob_token_ids")
        check_scheduling(self.timeout, self.priority)
        check_salt(self.cache_salt)
        check_seed(self.seed)
        check_free_form(
            "vllm_xargs", self.vllm_xargs, most_values=MAX_XARGS_VALUES, most_characters=MAX_XARGS_CHARACTERS
        )
        try:
            msgspec.msgpack.encode(self.vllm_xargs)
        except OverflowError:
            raise bad_request("vllm_xargs holds an integer of more than 64 bits", "vllm_xargs") from None
        if isinstance(self.stop, list) and max(map(len, self.stop), default=0) > MAX_SHORT_TEXT:
            raise bad_request(f"stop holds a text of more than {MAX_SHORT_TEXT} characters", "stop")
        self._check_search()

    def _check_search(self) -> None:
        """A beam search does not sample: refuse sampling parameters."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise bad_request("length_penalty needs use_beam_search=true", "length_penalty")
            return
        for name, neutral in _NOT_IN_SEARCHES.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise bad_request(
                    f"{name}={short_repr(value)} is not supported with use_beam_search: leave it out", name
                )


def session_names(field: str) -> Mapping[str, str]:
    """Maps the internal names of a session's name to the client's `field`."""
    return {"name": field, "session": field}


def structured_output_names(field: str, schema: str) -> Mapping[str, str]:
    """Maps the fields of `structured_outputs` to the client's `field`, and its schema to `schema`."""
    form = "structured_outputs"
    return {form: field, f"{form}.json": schema, f"{form}.structural_tag": field}


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """A body's parameters, with the model's defaults for unset ones. Raises `ValidationError` if out of range."""
    names = _IN_SEARCHES if body.use_beam_search else _PLAIN
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    defaults = {} if body.use_beam_search else defaults
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


def beam_search_params(body: GenerationFields, max_tokens: int) -> BeamSearchParams | None:
    """A body's beam search, or None. Raises `ValidationError` for values out of range."""
    if not body.use_beam_search:
        return None
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request("response_format is not supported with use_beam_search: leave it out", "response_format")
    return BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=given_scalars(body).get("temperature", 0.0),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        stop_token_ids=body.stop_token_ids,
    )


def structured_outputs(body: GenerationFields) -> StructuredOutputsParams | None:
    """The form that `response_format`, or else `structured_outputs` or its older spelling, requires."""
    fields = {inner: value for name, inner in GUIDED.items() if (value := getattr(body, name))}
    if body.structured_outputs is not None:
        given = msgspec.structs.asdict(body.structured_outputs)
        fields |= {name: value for name, value in given.items() if value is not None}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        fields |= _response_format_params(wanted)
    if not fields:
        if body.structured_outputs is not None:
            raise bad_request(
                "structured_outputs is empty: give one of json, regex, choice, grammar, …", "structured_outputs"
            )
        return None
    for name in ("json", "structural_tag"):
        check_free_form(f"structured_outputs.{name}", fields.get(name))
    return StructuredOutputsParams(**fields)


def _response_format_params(wanted: ResponseFormat) -> dict[str, Any]:
    """Fields of `StructuredOutputsParams`."""
    schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    if wanted.type == "json_object":
        return {"json": schema} if schema else {"json_object": True}
    if wanted.type == "json_schema":
        if schema is None:
            raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
        return {"json": schema}
    parts = ("format", "structures", "triggers")
    tag = {name: value for name in parts if (value := getattr(wanted, name)) is not None}
    return {"structural_tag": {"type": "structural_tag", **tag}}
