"""Renders messages that are added to a conversation of which only the tokens are known.

A chat template renders whole conversations. The text of added messages is found by rendering a placeholder
conversation that ends with them, and removing the placeholder part. Templates that render earlier messages differently
once more follow would make that wrong, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import ValidationError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages; with True, also the start of the assistant's next one."""

MARKER = "QuireMarksThisPlace"
_USER: Message = {"role": "user", "content": "x"}
_ASSISTANT: Message = {"role": "assistant", "content": MARKER}
_RESULTS = ("tool", "function", "ipython", "tool_results")
_ANSWERED_ROLES = ("user", *_RESULTS)
"""Roles whose messages an assistant answers."""


class RewritingTemplateError(ValidationError):
    """The chat template cannot render a conversation incrementally."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template renders earlier messages differently once more follow, so messages cannot be appended "
            "to a session: send the whole conversation each time (session_id of a chat), or append text",
            "messages",
        )


class IncrementalRenderer:
    """Renders a conversation in pieces."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def first(self, messages: Sequence[Message]) -> str:
        """The start of a conversation. Raises if later messages could not be rendered incrementally."""
        self._check(messages)
        return self._render(messages, _awaits_answer(messages))

    def following(self, messages: Sequence[Message], tail: str) -> tuple[str, bool]:
        """The text to add to a conversation that ends with `tail`, possibly inside an assistant's message; and whether
        `tail` already contains the start of that text, which means that its last message is closed."""
        if tail.endswith(self._question_end()):
            raise ValidationError(
                "the session's last message has no answer yet: generate one first, or append messages that belong "
                "together in one call",
                "messages",
            )
        whole = self._after_answer(messages)
        added = without_overlap(tail, whole)
        return added, len(added) < len(whole)

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """Everything after the end of an assistant's text."""
        try:
            return self._after_text(messages)
        except ValidationError as error:
            if isinstance(error, RewritingTemplateError):
                raise
            results = [message for message in messages if message.get("role") in _RESULTS]
            if not results or messages[0] is not results[0]:
                raise
            return self._after_calls(messages, results)  # this template requires the calls before their results

    def _after_text(self, messages: Sequence[Message]) -> str:
        whole = self._render([_USER, _ASSISTANT, *messages], _awaits_answer(messages))
        before, mark, after = whole.partition(MARKER)
        if not mark:
            raise _alters_answers()
        if not before.startswith(self._render([_USER], False)):
            raise RewritingTemplateError
        return after

    def _after_calls(self, messages: Sequence[Message], results: Sequence[Message]) -> str:
        calls = [_call(message.get("tool_call_id")) for message in results]
        before: list[Message] = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        start = self._render(before, False)
        whole = self._render([*before, *messages], _awaits_answer(messages))
        if not whole.startswith(start):
            raise RewritingTemplateError
        return self._answer_end() + whole[len(start) :]

    def _answer_end(self) -> str:
        """The text that closes an assistant's message."""
        text = self._render([_USER, _ASSISTANT], False)
        if MARKER not in text:
            raise _alters_answers()
        return text.rpartition(MARKER)[2]

    def _question_end(self) -> str:
        """The text between a user's text and the answer."""
        text = self._render([{"role": "user", "content": MARKER}], True)
        return text.rpartition(MARKER)[2] or MARKER

    def _check(self, messages: Sequence[Message]) -> None:
        """Render the messages with more after them, and compare the pieces with the whole."""
        question = [{"role": "user", "content": "y"}]
        begun = self._render(messages, False)
        try:
            between = [_ASSISTANT] if _awaits_answer(messages) else []
            whole = self._render([*messages, *between, *question], True)
            after = self._after_answer(question)
        except RewritingTemplateError:
            raise
        except ValidationError:
            return  # it cannot be continued this way; an attempt to do so raises
        expected = after if between else begun + without_overlap(begun, after)
        if not whole.startswith(begun) or not whole.endswith(expected):
            raise RewritingTemplateError


def without_overlap(text: str, following: str) -> str:
    """`following` without the start that `text` already ends with."""
    for length in range(min(len(text), len(following)), 0, -1):
        if text.endswith(following[:length]):
            return following[length:]
    return following


def _awaits_answer(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].get("role") in _ANSWERED_ROLES


def _call(call_id: Any) -> dict[str, Any]:
    return {
        "id": call_id if isinstance(call_id, str) and call_id else "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": {}},
    }


def _alters_answers() -> ValidationError:
    return ValidationError(
        "the chat template does not render assistant messages unchanged: append text or token ids instead", "messages"
    )
