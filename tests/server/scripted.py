"""An engine whose answers a test writes: what remains is the server as users run it, with all its parsing."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from quire.api.inputs import InputProcessor
from quire.messages.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.messages.sampling import RequestOutputKind

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('it must be first') }}{% endif %}"
    "[{{ message.role }}] {{ message.reasoning_content }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWER = "It was said."


def _likely(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-0.5, 1, "x")}


class Script:
    """An engine that answers with the texts of a test, and remembers the prompts."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self.prompts: list[str] = []
        self.answer: Callable[[str], str] = lambda prompt: ANSWER

    async def run(
        self, prompt: Any, params: Any, request_id: str, *rest: Any, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """In place of `AsyncLLM.run`."""
        self._inputs.make(request_id, prompt, params, 0.0)  # refuses what the engine would refuse
        self.prompts.append(prompt.get("prompt", ""))
        text = self.answer(self.prompts[-1])
        is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        pieces = [text] if is_whole else [text[at : at + 3] for at in range(0, len(text), 3)]
        for number, piece in enumerate(pieces):
            is_last, position = number == len(pieces) - 1, _likely(5)
            tokens = prompt["prompt_token_ids"]
            sequences = [
                CompletionOutput(
                    index=index, text=piece, token_ids=[5], finish_reason="stop" if is_last else None,
                    logprobs=None if params.logprobs is None else [position],
                )
                for index in range(params.n)
            ]  # fmt: skip
            yield RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=sequences, finished=is_last,
                metrics=RequestMetrics(arrival_time=0.0), num_cached_tokens=0,
                prompt_logprobs=None if params.prompt_logprobs is None else [None, *[_likely(t) for t in tokens[1:]]],
            )  # fmt: skip

    async def call_sessions(self, operation: Any) -> None:
        """opencode names a session, which is suspended while its tools run."""


def call(name: str, **arguments: str) -> str:
    """A tool call in the notation of the template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
