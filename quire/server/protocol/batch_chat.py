"""/v1/chat/completions/batch."""

from __future__ import annotations

from typing import Annotated, Any

from quire.server.errors import bad_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.conversation import ChatMessage
from quire.server.protocol.values import NOT_EMPTY

_ONE_ANSWER: dict[str, Any] = {
    "stream": "answers are sent as a whole",
    "tools": "send each conversation to /v1/chat/completions",
    "use_beam_search": "send each conversation to /v1/chat/completions",
    "session_id": "a session has one conversation",
}
"""Fields that this route refuses, and what to do instead."""


class BatchChatRequest(ChatRequest, kw_only=True):
    """The body of /v1/chat/completions/batch: that of a chat, but `messages` is a list of conversations."""

    messages: Annotated[list[Annotated[list[ChatMessage], NOT_EMPTY]], NOT_EMPTY]  # type: ignore[assignment]

    @property
    def chats(self) -> list[ChatRequest]:
        """The same request for each conversation."""
        for name, instead in _ONE_ANSWER.items():
            if getattr(self, name):
                raise bad_request(f"{name} is not supported for several conversations: {instead}", name)
        if self.prompt_logprobs is not None:  # 0 asks for some, too
            raise bad_request(
                "prompt_logprobs is not supported for several conversations: send each conversation to "
                "/v1/chat/completions",
                "prompt_logprobs",
            )
        if (self.n or 1) != 1:
            raise bad_request(f"n must be 1 for several conversations, got {self.n}", "n")
        if not self.messages or not all(self.messages):
            raise bad_request("messages must be a list of conversations, none of them empty", "messages")
        shared = {name: getattr(self, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
        return [ChatRequest(messages=conversation, **shared) for conversation in self.messages]
