"""What is added to a session, as tokens: text, token ids, or messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

from quire.api.conversation import IncrementalRenderer, Message
from quire.api.inputs import InputProcessor
from quire.errors import ValidationError

TAIL_TOKENS = 64
"""So many of a session's last tokens tell whether its last message is closed."""

SessionInput = Union[str, Sequence[int], Sequence[Message]]
RenderText = Callable[..., str]
"""As `ChatRenderer.render_text`."""


class Addition(NamedTuple):
    """What is to be done to a session."""

    drop: int
    """So many of its last tokens go…"""
    tokens: list[int]
    """…and these come."""


class SessionReader:
    """Turns what users give into tokens that follow those a session has."""

    def __init__(self, inputs: InputProcessor, render: RenderText | None) -> None:
        """`render`: how messages are written; None where there is no tokenizer."""
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
        """`tail`: the session's last tokens (`TAIL_TOKENS` of them, if it has as many). `first_render`: what writes a
        session's first messages, if something else is to."""
        if is_messages(given):
            render = self._render if tail or first_render is None else first_render
            return self._read_messages(given, tail, tools, chat_template_kwargs, render)  # type: ignore[arg-type]
        if tools is not None or chat_template_kwargs is not None:
            raise ValidationError("tools and chat_template_kwargs belong to messages", "tools")
        tokens = self._inputs.first_text(given) if isinstance(given, str) and not tail else self._plain(given)
        return self._checked(Addition(0, tokens))

    def check_room(self, length: int, addition: Addition) -> None:
        """Raise if a session of so many tokens would outgrow the model: what is appended cannot be taken back."""
        self._inputs.check_room(length - addition.drop + len(addition.tokens))

    def _plain(self, given: Any) -> list[int]:
        if isinstance(given, str):
            return self._inputs.encode(given, add_special_tokens=False)
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

        def write(conversation: Sequence[Message], opens: bool) -> str:
            return render(conversation, tools=tools, add_generation_prompt=opens, chat_template_kwargs=kwargs)

        conversation, listed = IncrementalRenderer(write), as_messages(messages)
        if not tail:
            return self._checked(Addition(0, self._plain(conversation.first(listed))))
        text = self._inputs.tokenizer.decode(list(tail), skip_special_tokens=False)
        added, is_closed = conversation.following(listed, text)
        # An answer may have ended with a token that ends answers, but not these: the template's own takes its place.
        drop = int(tail[-1] in self._inputs.eos_ids and not is_closed)
        return self._checked(Addition(drop, self._plain(added)))

    def _checked(self, addition: Addition) -> Addition:
        if addition.tokens:
            self._inputs.check_vocabulary(addition.tokens)
        return addition


def whole_turns_only() -> ValidationError:
    """A session is not cut short for a turn."""
    return ValidationError(
        "truncate_prompt_tokens is not for sessions: fork one where it is to begin, or start another",
        "truncate_prompt_tokens",
    )


def is_messages(given: object) -> bool:
    """Whether these are messages, and not text or token ids."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, (str, bytes))
        and bool(given)
        and (isinstance(given[0], Mapping) or hasattr(given[0], "model_dump"))
    )


def as_messages(given: Sequence[Any]) -> list[Message]:
    """Messages as plain dicts, as far as their roles must be read."""
    return [message if isinstance(message, dict) else _dumped(message) for message in given]


def _dumped(message: Any) -> Message:
    if isinstance(message, Mapping):
        return dict(message)
    dumped: Message = message.model_dump(exclude_none=True)
    return dumped
