"""A session's input and output: text, token ids or messages as tokens to append; tool calls in an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

from quire.api.chat import ChatRenderer
from quire.api.chat_media import take_media
from quire.api.conversation import IncrementalRenderer, Message
from quire.api.inputs import InputProcessor
from quire.errors import ValidationError
from quire.media.loading import MediaSource
from quire.messages.sampling import SamplingParams
from quire.output.parsers.toolcalls import guess_parser
from quire.output.parsers.tools.base import make_tool_parser
from quire.vision.processor import Prepared

TAIL_TOKENS = 64
"""Number of a session's last tokens that are decoded to see whether its last message is closed."""

SessionInput = Union[str, Sequence[int], Sequence[Message]]
RenderText = Callable[..., str]
"""A function with the signature of `ChatRenderer.render_text`."""


class Addition(NamedTuple):
    """A change at the end of a session."""

    drop: int
    """Number of last tokens to remove…"""
    tokens: list[int]
    """…before these are appended."""
    media: Prepared | None = None
    """What they have in place of token ids: images."""


class SessionReader:
    """Converts user input to tokens that continue a session."""

    def __init__(self, inputs: InputProcessor, render: RenderText | None) -> None:
        """`render`: renders messages; None without a tokenizer."""
        self._inputs = inputs
        self._render = render

    def read(
        self,
        given: SessionInput,
        tail: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_render: RenderText | None = None,
    ) -> Addition:
        """`tail`: the session's last tokens (`TAIL_TOKENS`, or all it has). `first_render`: renders a session's first
        messages instead."""
        if is_messages(given):
            render = self._render if tail or first_render is None else first_render
            return self._read_messages(given, tail, tools, chat_template_kwargs, render)  # type: ignore[arg-type]
        if tools is not None or chat_template_kwargs is not None:
            raise ValidationError("tools and chat_template_kwargs belong to messages", "tools")
        tokens = self._inputs.first_text(given) if isinstance(given, str) and not tail else self._plain(given)
        return self._checked(Addition(0, tokens))

    def check_room(self, length: int, addition: Addition) -> None:
        """Raise if a session of `length` tokens would exceed max_model_len: an append cannot be undone."""
        self._inputs.check_room(length - addition.drop + len(addition.tokens))

    def _plain(self, given: Any) -> list[int]:
        if isinstance(given, str):
            return self._inputs.encode_bounded(given, add_special_tokens=False)
        return self._inputs.token_ids(given)

    def _read_messages(
        self,
        messages: Sequence[Message],
        tail: Sequence[int],
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        render: RenderText | None,
    ) -> Addition:
        if render is None or self._inputs.tokenizer is None:
            raise ValidationError("messages need a tokenizer, and skip_tokenizer_init is set: give token ids", "input")

        def render_messages(conversation: Sequence[Message], opens: bool) -> str:
            return render(conversation, tools=tools, add_generation_prompt=opens, chat_template_kwargs=kwargs)

        conversation = IncrementalRenderer(render_messages)
        taken, sources = take_media(as_messages(messages), self._inputs.media.check_kind)
        listed = list(taken)
        if not tail:
            return self._checked(self._encoded(0, conversation.first(listed), sources))
        text = self._inputs.tokenizer.decode(list(tail), skip_special_tokens=False)
        added, is_closed = conversation.following(listed, text)
        # The answer's end token is not the one this template writes after messages: the template's replaces it.
        drop = int(tail[-1] in self._inputs.eos_ids and not is_closed)
        return self._checked(self._encoded(drop, added, sources))

    def _encoded(self, drop: int, text: str, sources: Sequence[MediaSource]) -> Addition:
        if not sources:
            return Addition(drop, self._plain(text))
        media = self._inputs.prepare_chat(text, sources, encode=self._plain)
        return Addition(drop, media.tokens, media)

    def _checked(self, addition: Addition) -> Addition:
        if addition.tokens:
            self._inputs.check_vocabulary(addition.tokens)
        return addition


def check_turn(params: SamplingParams, *, rewrites: bool = False) -> None:
    """Raise unless a request with these parameters can be a turn. `rewrites`: the session becomes the prompt."""
    if params.n != 1:
        raise ValidationError("a turn of a session has one sequence: n must be 1", "n", params.n)
    if params.truncate_prompt_tokens is not None and not rewrites:
        raise ValidationError(
            "truncate_prompt_tokens does not apply to sessions: fork the session, or start another",
            "truncate_prompt_tokens",
        )


def is_messages(given: object) -> bool:
    """Whether the input is messages, and not text or token ids."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, (str, bytes))
        and bool(given)
        and (isinstance(given[0], Mapping) or hasattr(given[0], "model_dump"))
    )


def as_messages(given: Sequence[Any]) -> list[Message]:
    """Messages as dicts; their contents stay as they are."""
    return [message if isinstance(message, dict) else _dumped(message) for message in given]


def _dumped(message: Any) -> Message:
    if isinstance(message, Mapping):
        return dict(message)
    dumped: Message = message.model_dump(exclude_none=True)
    return dumped


def calls_tools(answer: Sequence[int], tools: Sequence[Any], renderer: ChatRenderer) -> bool:
    """Whether these tokens contain tool calls, in the format of the chat template."""
    parser = make_tool_parser(guess_parser(renderer.template(tools)), {_tool_name(tool) for tool in tools})
    skips = not parser.needs_special_tokens
    text = renderer.tokenizer.decode(list(answer), skip_special_tokens=skips)
    return bool(parser.parse(text).calls)


def _tool_name(tool: Any) -> str:
    """The name of a tool, which is a schema or a Python function."""
    if not isinstance(tool, Mapping):
        return str(getattr(tool, "__name__", ""))
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
