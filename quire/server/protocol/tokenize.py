"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.common import Body, check_free_form
from quire.server.protocol.conversation import ChatMessage, ChatTool
from quire.server.protocol.values import NOT_EMPTY, ModelName, ProcessorSettings, TemplateVariables, TokenIds

_MESSAGE_FIELDS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools",
    "mm_processor_kwargs",
)  # fmt: skip


class TokenizeRequest(Body):
    """Text, or a conversation to render with the chat template."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], NOT_EMPTY] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: ProcessorSettings = None
    tools: list[ChatTool] | None = None

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if self.prompt is not None:
            for name in _MESSAGE_FIELDS:
                if getattr(self, name):
                    raise bad_request(f"{name} needs messages instead of a prompt", name)
        if self.messages == []:
            raise bad_request("messages is empty: at least one is needed", "messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_request("add_generation_prompt and continue_final_message cannot be combined")
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_free_form("tools", *(tool.function.parameters for tool in self.tools or ()))


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    tokens: TokenIds
    model: ModelName | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
