"""An engine whose answers a test writes: what remains is the server as users run it, with all its parsing."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from quire.messages.outputs import CompletionOutput, RequestMetrics, RequestOutput

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('it must be first') }}{% endif %}"
    "[{{ message.role }}] {{ message.reasoning_content }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWER = "It was said."


class Script:
    """An engine that answers with the texts of a test, and remembers the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.answer: Callable[[str], str] = lambda prompt: ANSWER

    async def run(
        self, prompt: Any, params: Any, request_id: str, *rest: Any, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """In place of `AsyncLLM.run`."""
        self.prompts.append(prompt["prompt"])
        text = self.answer(prompt["prompt"])
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            sequence = CompletionOutput(index=0, text=piece, token_ids=[5], finish_reason="stop" if is_last else None)
            yield RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=prompt["prompt_token_ids"], outputs=[sequence],
                finished=is_last, metrics=RequestMetrics(arrival_time=0.0), num_cached_tokens=0,
            )  # fmt: skip

    async def call_sessions(self, operation: Any) -> None:
        """opencode names a session, which is suspended while its tools run."""


def call(name: str, **arguments: str) -> str:
    """A tool call in the notation of the template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
