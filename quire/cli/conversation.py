"""A conversation with a local model: its messages, and streaming a reply that Ctrl-C can stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.images import with_images
from quire.cli.terminal import table
from quire.errors import CacheTooSmallError, ValidationError

if TYPE_CHECKING:  # `quire chat --url` needs no engine, and so no torch
    from quire.api.llm import LLM, Message
    from quire.messages.lora import LoRARequest
    from quire.messages.outputs import RequestOutput
    from quire.messages.sampling import SamplingParams


class LocalConversation:
    """The messages so far. Each question submits all of them; the prefix cache makes the old ones cheap."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        adapters: Sequence[LoRARequest] | None = None,
    ) -> None:
        self.system = system
        self._adapters = adapters
        self._llm = llm
        self._params = params
        self._messages: list[Message] = []
        self.images: list[Message] = []
        """Parts of the next question."""

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self._messages, self.images = [], []

    def ask(self, question: str) -> Reply:
        """Print the reply as it arrives. A question without a reply is not kept."""
        message: Message = {"role": "user", "content": with_images(question, self.images)}
        self.images = []
        try:
            stream = self._llm.chat_stream(
                [*self._opening(), *self._messages, message], self._params, lora_request=[self._adapters]
            )
        except (CacheTooSmallError, ValidationError) as error:
            if isinstance(error, CacheTooSmallError) or error.parameter == "prompt":
                raise CacheTooSmallError(f"the conversation is too long: {error}. /reset starts a new one") from error
            raise
        reply = self._follow(stream)
        if reply.text:
            self._messages += [message, {"role": "assistant", "content": reply.text}]
        return reply

    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _follow(self, stream: Iterator[RequestOutput]) -> Reply:
        reply = Reply()
        try:
            for output in stream:
                print(reply.take(output), end="", flush=True)
                if output.finished:
                    reply.note = self._note(output, reply)
        except KeyboardInterrupt:  # raised between steps, never within one
            reply.note = "(stopped)"
        finally:
            stream.close()  # type: ignore[attr-defined]  # aborts the request if it still runs, which frees its blocks
            print(flush=True)
        return reply

    def _note(self, output: RequestOutput, reply: Reply) -> str:
        if output.error is not None:
            return f"quire: error: {output.error}"
        if output.outputs[0].finish_reason != "length":
            return ""
        if reply.tokens == self._params.max_tokens:
            return f"(cut at max_tokens, {reply.tokens})"
        longest = self._llm.llm_engine.info.max_model_len
        return f"(the context of {longest} tokens is full; /reset starts a new conversation)"

    def engine_stats(self) -> str:
        """The engine's metrics, for `/stats`."""
        values = {metric.name.removeprefix("quire:"): metric.value for metric in self._llm.get_metrics()}
        return table([(name.replace("_", " "), f"{value:.4g}") for name, value in values.items()])


@dataclass
class Reply:
    """One reply, and its metrics."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds_to_first: float = 0.0
    tokens_per_second: float = 0.0
    error: str | None = None
    note: str = ""
    """Shown after the reply: why it ended early."""

    def take(self, output: RequestOutput) -> str:
        """Add new output; returns its text."""
        sequence, metrics = output.outputs[0], output.metrics
        self.text += sequence.text
        self.tokens += len(sequence.token_ids)
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens or 0
        self.error = output.error
        if metrics is not None and self.tokens:
            self.seconds_to_first = metrics.first_token_latency
            elapsed = metrics.last_token_ts - metrics.first_token_ts
            self.tokens_per_second = (self.tokens - 1) / elapsed if elapsed > 0 else 0.0
        return sequence.text

    def describe(self) -> str:
        """The speed line under a reply."""
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        rate = f" at {self.tokens_per_second:.1f} tok/s" if self.tokens_per_second else ""
        first = f"first after {self.seconds_to_first:.2f} s"
        return f"[{self.tokens} tokens{rate}; {first}; prompt {self.prompt_tokens}{cached}]"
