"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.chat import Message, Tool
from quire.server.protocol.common import Body, check_depth


class TokenizeRequest(Body):
    """Text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    def check_fields(self) -> None:
        """What the types alone cannot say."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if self.messages == []:
            raise bad_request("messages is empty: at least one is needed", "messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_request("add_generation_prompt and continue_final_message exclude each other")
        check_depth("chat_template_kwargs", self.chat_template_kwargs)
        for tool in self.tools or ():
            check_depth("tools", tool.function.parameters)


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
