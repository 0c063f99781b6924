"""`ServerContext`: everything a route may need."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.api.async_llm import AsyncLLM
from quire.api.inputs import encode_text
from quire.errors import ValidationError
from quire.loading.model_config import read_generation_config
from quire.messages.sampling import FROM_GENERATION_CONFIG
from quire.output.detokenizer import Vocabulary
from quire.server.auth import Keys
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, bad_request, not_found, unavailable
from quire.server.http import Exchange, HungUpError
from quire.server.lifecycle.replicas import supervise
from quire.server.limits import AdmissionLimiter, Bodies
from quire.server.observability.watchers import Observability
from quire.server.tool_prompts import ToolPrompts

if TYPE_CHECKING:
    from quire.api.chat import ChatRenderer

LONG_TEXT = 4096
"""Characters: a text this long is tokenized in a thread, and the event loop goes on."""
TOKENS_OF_QUEUE = 8
"""Prompts that may wait, in sizes of the KV cache, where nothing else is said."""
BODIES_AT_ONCE = 8
"""Bodies that may be held at once, in sizes of the longest, where nothing else is said."""
LOOK_SECONDS = 5.0
"""Clients that stopped reading are looked for so often."""


class ServerContext:
    """An engine, its settings, and what is going on. One for each process; made before the event loop runs."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, tokenizer: Any, renderer: ChatRenderer | None) -> None:
        self.llm = llm
        self.config = config
        self.tokenizer = tokenizer
        """None where the engine takes token ids only."""
        self.renderer = renderer
        """The same."""
        self.offering = None if renderer is None else ToolPrompts(renderer, config.tool_call_parser)
        """How models hear of tools."""
        self.names = config.served_model_name or (llm.config.model,)
        self.created = int(time.time())
        self.version = __version__
        self.keys = Keys(config.api_key)
        self.admin_keys = Keys([config.admin_key] if config.admin_key else [])
        self.supervisor = supervise(llm, config.engine_stall_seconds, config.engine_hang_timeout)
        self.openapi = b"{}"
        """The OpenAPI document; set with the routes."""
        self.is_draining = False
        self.exchanges: set[Exchange] = set()
        """Requests being answered."""
        most_bytes = config.max_open_body_bytes
        self.bodies = Bodies(BODIES_AT_ONCE * config.max_body_bytes if most_bytes is None else most_bytes)
        facts, engines = llm.info, len(llm.replicas)
        max_tokens = config.max_queued_tokens
        self.admission = AdmissionLimiter(
            engines * facts.max_num_seqs,
            engines * config.max_queued_requests,
            engines * (TOKENS_OF_QUEUE * facts.cache_tokens if max_tokens is None else max_tokens),
        )
        self.seeing = Observability(llm, config, self.names[0], self.supervisor, self.admission)
        self.observer = self.seeing.observer
        generation = read_generation_config(facts.files) if llm.config.generation_config == "auto" else {}
        self.sampling_defaults = {
            name: value for name in FROM_GENERATION_CONFIG if (value := generation.get(name)) is not None
        }
        self.max_new_tokens: int | None = generation.get("max_new_tokens") or None
        """The model's own bound on an answer, where a request brings none."""
        self._janitor: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """To be called in the event loop before requests come."""
        self.supervisor.start()
        self._janitor = asyncio.ensure_future(self._let_go_of_the_stalled())

    async def stop(self) -> None:
        """The opposite. The engine is left to whoever made it."""
        if self._janitor is not None:
            self._janitor.cancel()
        await self.supervisor.stop()
        await asyncio.to_thread(self.seeing.close)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, give the open ones so much time, then cut them off."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self.exchanges and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for exchange in list(self.exchanges):
            exchange.interrupt(unavailable("the server is shutting down, and the request was cut off"))
        await asyncio.sleep(0)

    async def _let_go_of_the_stalled(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            latest = time.monotonic() - self.config.stall_timeout
            for exchange in list(self.exchanges):
                if 0.0 < exchange.sending_since < latest:
                    exchange.interrupt(HungUpError())
                    exchange.abort()

    async def metrics_page(self) -> bytes:
        """Figures in Prometheus' text format."""
        return await self.seeing.metrics.page()

    # What requests are checked against

    @property
    def max_model_len(self) -> int:
        return self.llm.info.max_model_len

    @property
    def retry_after(self) -> float:
        """Seconds until a dead engine may be back."""
        return self.supervisor.retry_after

    def check_serving(self) -> None:
        """Raise 503 unless a request can be taken now."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})
        if not self.supervisor.is_serving:
            raise unavailable(f"the engine is not running: {self.supervisor.status}", self.retry_after)

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served here. No name is the one there is."""
        if name is not None and name not in self.names:
            raise not_found(f"the model {name!r} is not served here; there is {', '.join(self.names)}", "model")

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text as token ids."""
        if self.tokenizer is None:
            raise ValidationError(
                "text needs a tokenizer, and the server runs with --skip-tokenizer-init: send token ids", "prompt"
            )
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encode_text(self.tokenizer, text, "prompt", add_special_tokens)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Its tokens as text; None without a tokenizer."""
        return None if self.tokenizer is None else Vocabulary(self.tokenizer)

    def check_text(self, text: str, field: str = "input_text") -> None:
        """Raise if a text cannot fit the model whatever its tokens are: tokenizing megabytes takes seconds."""
        if self.tokenizer is not None and len(text) > self._longest_text:
            raise bad_request(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
                f"{len(text)} characters, and no more than {self._longest_text} can fit. Shorten the prompt",
                field,
            )

    @functools.cached_property
    def _longest_text(self) -> int:
        return self.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def check_length(self, prompt: int, output: int | None, field: str = "max_tokens") -> None:
        """Raise unless a prompt of so many tokens, and so many more, fit the model."""
        longest = self.max_model_len
        if output is not None and output > longest:
            raise bad_request(
                f"{field} is {output}, and this model's maximum context length is {longest} tokens", field
            )
        if prompt + (output or 0) > longest or prompt >= longest:
            asked = f" and {field} asks for {output} more" if output is not None else ""
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, the prompt has {prompt} "
                f"tokens{asked}. Shorten the prompt, or ask for fewer tokens",
                "input_tokens",
            )

    def deadline(self, asked: float | None) -> float | None:
        """Seconds a request may take: its own wish, within the server's bound."""
        bounds = [seconds for seconds in (asked, self.config.request_timeout) if seconds is not None]
        return min(bounds, default=None)
