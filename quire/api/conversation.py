"""Messages added to a conversation whose earlier messages are known as tokens only.

A chat template writes whole conversations. What it would write of new messages is found by letting it write a made-up
conversation that ends with them, and taking what follows the made-up part. Templates for which that would not be the
truth, because they write earlier messages otherwise once more follow, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import ValidationError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Writes messages; with True, also what begins the assistant's next one."""

MARK = "QuireMarksThisPlace"
_USER: Message = {"role": "user", "content": "x"}
_ASSISTANT: Message = {"role": "assistant", "content": MARK}
_RESULTS = ("tool", "function", "ipython", "tool_results")
_WAITING = ("user", *_RESULTS)
"""Roles whose messages an assistant answers."""


class RewritingTemplateError(ValidationError):
    """The chat template does not let a conversation go on piece by piece."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template writes earlier messages otherwise once more follow, so a session cannot go on message "
            "by message: send the whole conversation each time (session_id of a chat), or append text",
            "messages",
        )


class IncrementalRenderer:
    """What a template writes, piece by piece."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def first(self, messages: Sequence[Message]) -> str:
        """The beginning. Raises if what follows later could not be told from the messages that follow."""
        self._check(messages)
        return self._render(messages, _is_waiting(messages))

    def following(self, messages: Sequence[Message], tail: str) -> tuple[str, bool]:
        """What comes after a conversation that ends with `tail`, which may be within an assistant's message.

        Also whether `tail` has begun it already: then the last message there is closed.
        """
        if tail.endswith(self._question_end()):
            raise ValidationError(
                "the session ends with a message that waits for its answer: generate one first, or append messages "
                "that belong together in one call",
                "messages",
            )
        whole = self._after_answer(messages)
        added = without_overlap(tail, whole)
        return added, len(added) < len(whole)

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """From the end of an assistant's text on."""
        try:
            return self._after_text(messages)
        except ValidationError as error:
            if isinstance(error, RewritingTemplateError):
                raise
            results = [message for message in messages if message.get("role") in _RESULTS]
            if not results or messages[0] is not results[0]:
                raise
            return self._after_calls(messages, results)  # this template wants to see the calls

    def _after_text(self, messages: Sequence[Message]) -> str:
        whole = self._render([_USER, _ASSISTANT, *messages], _is_waiting(messages))
        before, mark, after = whole.partition(MARK)
        if not mark:
            raise _hides()
        if not before.startswith(self._render([_USER], False)):
            raise RewritingTemplateError
        return after

    def _after_calls(self, messages: Sequence[Message], results: Sequence[Message]) -> str:
        calls = [_call(message.get("tool_call_id")) for message in results]
        before: list[Message] = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        start = self._render(before, False)
        whole = self._render([*before, *messages], _is_waiting(messages))
        if not whole.startswith(start):
            raise RewritingTemplateError
        return self._answer_end() + whole[len(start) :]

    def _answer_end(self) -> str:
        """What closes an assistant's message."""
        text = self._render([_USER, _ASSISTANT], False)
        if MARK not in text:
            raise _hides()
        return text.rpartition(MARK)[2]

    def _question_end(self) -> str:
        """What follows a user's text when an answer is to come."""
        text = self._render([{"role": "user", "content": MARK}], True)
        return text.rpartition(MARK)[2] or MARK

    def _check(self, messages: Sequence[Message]) -> None:
        """Write the messages and some more after them, and see whether the pieces are those of the whole."""
        question = [{"role": "user", "content": "y"}]
        begun = self._render(messages, False)
        try:
            between = [_ASSISTANT] if _is_waiting(messages) else []
            whole = self._render([*messages, *between, *question], True)
            after = self._after_answer(question)
        except RewritingTemplateError:
            raise
        except ValidationError:
            return  # such a conversation cannot go on like that, and whoever tries is told so
        expected = after if between else begun + without_overlap(begun, after)
        if not whole.startswith(begun) or not whole.endswith(expected):
            raise RewritingTemplateError


def without_overlap(text: str, following: str) -> str:
    """What is left of `following` where its beginning is the end of `text` already."""
    for length in range(min(len(text), len(following)), 0, -1):
        if text.endswith(following[:length]):
            return following[length:]
    return following


def _is_waiting(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].get("role") in _WAITING


def _call(call_id: Any) -> dict[str, Any]:
    return {
        "id": call_id if isinstance(call_id, str) and call_id else "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": {}},
    }


def _hides() -> ValidationError:
    return ValidationError(
        "the chat template does not write assistants' messages as they are: append text, or token ids", "messages"
    )
