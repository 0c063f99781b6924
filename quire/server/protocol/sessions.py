"""/v1/sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import Body, check_free_form
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.conversation import ChatMessage, ChatTool, NamedTool
from quire.server.protocol.sampling import GenerationFields, session_names
from quire.server.protocol.values import (
    NOT_EMPTY,
    Logprobs,
    ModelName,
    OutputLimit,
    Seconds,
    SessionName,
    TemplateVariables,
    TokenId,
    ToolChoice,
    schema,
)

LARGEST_PAGE = 1000
_AS_INPUT: Mapping[str, str] = dict.fromkeys(("prompt", "prompt_token_ids", "messages"), "input")

Input = Union[
    str,
    Annotated[
        list[Union[TokenId, ChatMessage]],
        schema(minItems=1, anyOf=[{"items": {"type": kind}} for kind in ("integer", "object")]),
    ],
]
"""Text, token ids or messages."""
Tools = Annotated[list[ChatTool], NOT_EMPTY]
SessionMetadata = Annotated[dict[str, str], schema(maxProperties=64)]


class AppendFields(Body):
    """Fields for appending to a session."""

    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    """Tools the model may call; only with messages."""

    @property
    def client_names(self) -> Mapping[str, str]:
        return _AS_INPUT

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_free_form("tools", *(tool.function.parameters for tool in self.tools or ()))
        if not all(tool.function.name for tool in self.tools or ()):
            raise bad_request("a tool has an empty name", "tools")


class SessionCreateRequest(AppendFields):
    """The body of POST /v1/sessions."""

    id: SessionName | None = None
    name: SessionName | None = None
    """Another name of `id`."""
    input: Input | None = None
    ttl: Seconds | None = None
    """Seconds without use after which the session is deleted."""
    metadata: SessionMetadata | None = None
    model: ModelName | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        names = {} if self.id is None and self.name is None else session_names("name" if self.id is None else "id")
        return {**super().client_names, **names, "meta": "metadata"}

    @property
    def requested_name(self) -> str | None:
        """The requested name, if any."""
        if self.id is not None and self.name is not None and self.id != self.name:
            raise bad_request("id and name mean the same and differ: give one of them", "name")
        return self.name if self.id is None else self.id


class SessionAppendRequest(AppendFields, kw_only=True):
    """The body of POST /v1/sessions/{session}/append."""

    input: Input


class SessionUpdateRequest(Body):
    """The body of PATCH /v1/sessions/{session}."""

    ttl: Seconds | msgspec.UnsetType | None = msgspec.UNSET
    """Null: the session does not expire."""
    metadata: SessionMetadata | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"meta": "metadata"}


class SessionForkRequest(Body, kw_only=True):
    """The body of POST /v1/sessions/{session}/fork."""

    id: SessionName
    at: Annotated[int, schema(minimum=0)] | None = None
    """Tokens that the fork shares; unset: all."""

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"name": "id"}


class SessionGenerateRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/sessions/{session}/generate: the input to append, and generation parameters."""

    input: Input | None = None
    answer: Literal["chat", "text"] | None = None
    """Respond as /v1/chat/completions or as /v1/completions; unset: chat if the input is messages."""
    max_tokens: OutputLimit | None = None
    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | Logprobs | None = None
    """With messages true or false, otherwise a number."""
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Union[ToolChoice, NamedTool, None] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {**super().client_names, **_AS_INPUT, **limit}

    @property
    def is_chat(self) -> bool:
        """Whether to respond as a chat completion."""
        return has_messages(self.input) if self.answer is None else self.answer == "chat"

    def as_chat(self) -> ChatRequest:
        """The same request for the chat route."""
        if isinstance(self.logprobs, int) and not isinstance(self.logprobs, bool):
            raise bad_request("with messages logprobs is true or false; top_logprobs sets the number", "logprobs")
        fields = _shared(self, ChatRequest)
        messages = _as_messages(self.input) if has_messages(self.input) else [ChatMessage(role="user", content="-")]
        return ChatRequest(messages=messages, **fields)

    def as_completion(self) -> CompletionRequest:
        """The same request for the completions route."""
        for name in ("top_logprobs", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"):
            if getattr(self, name) is not None:
                raise bad_request(f"{name} needs messages, or answer=chat", name)
        if isinstance(self.logprobs, bool):
            raise bad_request("logprobs must be a number here: alternatives per token", "logprobs")
        fields = _shared(self, CompletionRequest)
        fields["max_tokens"] = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return CompletionRequest(prompt="-", **fields)


def has_messages(given: Any) -> bool:
    """Whether an input consists of messages."""
    return isinstance(given, list) and bool(given) and isinstance(given[0], ChatMessage)


def plain_input(given: Input) -> Any:
    """An input as the session API takes it: text, token ids, or messages as dicts."""
    if isinstance(given, str):
        return given
    if not given:
        raise bad_request("input is an empty list", "input")
    if len({isinstance(item, ChatMessage) for item in given}) > 1:
        raise bad_request("input must be text, token ids or messages, not a mix", "input")
    return [item.as_dict() for item in _as_messages(given)] if has_messages(given) else given


def _as_messages(given: Any) -> list[ChatMessage]:
    return [item for item in given if isinstance(item, ChatMessage)]


def _shared(body: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__ if name in kind.__struct_fields__}


# Responses


class SessionObject(msgspec.Struct, kw_only=True):
    """A session."""

    id: str
    object: str = "session"
    status: str
    """live: a turn is running; idle: on the device; asleep: in lower tiers, or to be recomputed."""
    created_at: int
    last_used_at: int
    expires_at: int | None
    num_tokens: int
    device_tokens: int
    """Tokens whose KV is on the device."""
    saved_tokens: int
    """Tokens whose KV was saved when it was last suspended."""
    parent: str | None
    forked_at: int
    metadata: dict[str, str]
    lost: str | None
    """Why its tokens are lost; null if they are not."""


class SessionUsage(msgspec.Struct, kw_only=True):
    """What all sessions of the API key use, of what max_tenant_sessions and its relatives allow."""

    sessions: int
    tokens: int
    """A fork counts in full."""
    bytes: int
    """In the session log, a fork counted in full."""


class SessionList(msgspec.Struct, kw_only=True):
    """A page of sessions, in the order they were created. Pass `last_id` as `after` for the next page."""

    object: str = "list"
    data: list[SessionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    usage: SessionUsage


class SessionDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "session.deleted"
    deleted: bool = True
