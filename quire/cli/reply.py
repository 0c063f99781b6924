"""One answer in a conversation, wherever it came from, and how fast it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.messages.outputs import RequestOutput


@dataclass
class Reply:
    """One answer, and how it came about."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds_to_first: float = 0.0
    tokens_per_second: float = 0.0
    error: str | None = None
    remark: str = ""
    """What the user should know: why it ended early."""

    def take(self, output: RequestOutput) -> str:
        """Add what is new; returns its text."""
        sample, metrics = output.outputs[0], output.metrics
        self.text += sample.text
        self.tokens += len(sample.token_ids)
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens or 0
        self.error = output.error
        if metrics is not None and self.tokens:
            self.seconds_to_first = metrics.first_token_latency
            elapsed = metrics.last_token_ts - metrics.first_token_ts
            self.tokens_per_second = (self.tokens - 1) / elapsed if elapsed > 0 else 0.0
        return sample.text

    def describe(self) -> str:
        """The speed line under a reply."""
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        rate = f" at {self.tokens_per_second:.1f} tok/s" if self.tokens_per_second else ""
        first = f"first after {self.seconds_to_first:.2f} s"
        return f"[{self.tokens} tokens{rate}; {first}; prompt {self.prompt_tokens}{cached}]"
