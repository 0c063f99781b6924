"""`ServerContext`: what the routes share."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from msgspec import UNSET

from quire import __version__
from quire.api.adapters import check_uses
from quire.api.async_llm import AsyncLLM
from quire.api.prompt_embeds import longest_embeds
from quire.api.text_encoding import TextEncoder, check_truncation, longest_token
from quire.errors import ValidationError, short_repr
from quire.loading.model_config import read_generation_config
from quire.messages.adapter_use import AdapterUse
from quire.messages.json_limits import JsonLimits
from quire.messages.lora import check_weight
from quire.messages.sampling import FROM_GENERATION_CONFIG
from quire.output.detokenizer import Vocabulary
from quire.output.parsers.reasoning import guess_reasoning_parser
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, bad_request, not_found, unavailable
from quire.server.fronts.counts import FrontCounts
from quire.server.http import ClientDisconnectedError, Exchange
from quire.server.lifecycle.supervisor import Supervisor, supervise
from quire.server.limits import (
    BODY_BYTES,
    BODY_DEPTH,
    BODY_IMAGES,
    BODY_VALUES,
    OPEN_BODY_BYTES,
    OPEN_BODY_SIZES,
    AdmissionLimiter,
    OpenBodies,
    RequestLimits,
)
from quire.server.observability.logs import AccessLog, RequestLog
from quire.server.observability.metrics import ServerMetrics
from quire.server.observability.observer import HttpListener, Observer
from quire.server.observability.tracing import make_traces
from quire.server.page.feed import EngineFeed
from quire.server.protocol.common import Usage
from quire.server.routing import Handler
from quire.server.stored.background import StoredResponses
from quire.server.tool_prompts import ToolPrompts

logger = logging.getLogger(__name__)

QUEUED_CACHE_SIZES = 8
"""Default of max_queued_tokens, in sizes of the KV cache."""
MOST_NAMES = 20
"""Models that an error lists."""
STALL_CHECK_SECONDS = 5.0
"""How often clients that stopped reading are looked for."""


class ServerContext:
    """An engine, its settings and the server's state. One per process, made before the event loop runs."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        counts: FrontCounts | None = None,
        supervisor: Supervisor | None = None,
        hub_handler: Handler | None = None,
    ) -> None:
        """`counts`: of all fronts, if there are several. In a front that is not the hub, `supervisor` reports the
        hub's engines, and `hub_handler` asks the hub to answer."""
        self.llm = llm
        self.config = config
        self.tokenizer: Any = llm.inputs.tokenizer
        """None if the engine takes only token ids."""
        self.tool_prompts = None if self.tokenizer is None else ToolPrompts(llm.renderer, config.tool_call_parser)
        """None without a tokenizer."""
        self.reasoning_parser = config.reasoning_parser or _needed_reasoning_parser(llm, self.tokenizer)
        self.names = config.served_model_name or (llm.config.model,)
        self.adapters = llm.adapters
        """LoRA adapters that requests can name as their model."""
        self.share_adapters: Callable[[], Awaitable[None]] = _nothing
        """Tells other fronts that the adapters have changed; returns when they know."""
        self.created = int(time.time())
        self.version = __version__
        self.keys = ApiKeys(config.api_key)
        self.admin_keys = ApiKeys([config.admin_key] if config.admin_key else [])
        self.hub_handler = hub_handler
        self.supervisor = supervisor or supervise(llm, config.engine_stall_seconds, config.engine_hang_timeout)
        self.openapi = b"{}"
        """The OpenAPI document; set with the routes."""
        self.is_draining = False
        self.exchanges: set[Exchange] = set()
        """Requests being answered."""
        info, engines = llm.info, llm.config.data_parallel_size
        longest_body = config.max_body_bytes or _longest_body(llm)
        most_bytes = config.max_open_body_bytes or max(OPEN_BODY_BYTES, OPEN_BODY_SIZES * longest_body)
        self.bodies = OpenBodies(most_bytes, counts)
        most_values = config.max_body_values or max(BODY_VALUES, 2 * info.max_model_len)
        self.limits = RequestLimits(
            longest_body, config.stall_timeout, self.bodies, JsonLimits(most_values, BODY_DEPTH), llm.work,
            llm.media_work, config.strict_fields,
        )  # fmt: skip
        """Of each request."""
        if self.tokenizer is not None:
            longest_token(self.tokenizer)  # computed before requests come: it takes a while
        max_tokens = config.max_queued_tokens
        self.admission = AdmissionLimiter(
            engines * info.max_num_seqs,
            engines * config.max_queued_requests,
            engines * (QUEUED_CACHE_SIZES * info.cache_tokens if max_tokens is None else max_tokens),
            counts,
        )
        self.stored = StoredResponses(llm, config, is_here=hub_handler is None)
        """Responses and conversations that clients can refer to."""
        self.metrics = ServerMetrics(
            llm, self.names[0], config.vllm_metric_names, self.supervisor, self.admission,
            list(zip(llm.replicas, self.supervisor.each, strict=True)),
            tuple if llm.router is None else llm.router.stats,
            self.stored,
            llm.inputs.media.counts,
        )  # fmt: skip
        endpoint = config.otlp_traces_endpoint
        self._traces = None if endpoint is None else make_traces(endpoint, self.names[0])
        http: list[HttpListener] = [self.metrics, *([AccessLog()] if config.access_log else [])]
        self.observer = Observer(
            self.metrics,
            *([RequestLog(config.max_log_len)] if config.enable_log_requests else []),
            http=http if self._traces is None else [*http, self._traces],
        )
        generation = read_generation_config(info.files, llm.config)
        self.sampling_defaults = {
            name: value for name in FROM_GENERATION_CONFIG if (value := generation.get(name)) is not None
        }
        self.max_new_tokens: int | None = generation.get("max_new_tokens") or None
        """The model's own limit on generated tokens, for requests without one."""
        self.feed = EngineFeed(llm, self.supervisor)
        """What the engine does, for viewers of the page."""
        self._stall_check: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None

    # Start and stop

    async def start(self) -> None:
        """Start supervision; call it in the event loop, before requests come."""
        self.supervisor.start()
        self.stored.start()
        self._stall_check = asyncio.ensure_future(self._disconnect_stalled())

    async def stop(self) -> None:
        """Stop supervision and send remaining traces, which can take seconds. The engine keeps running."""
        for task in (self._stall_check, self._reloading):
            if task is not None:
                task.cancel()
        await self.stored.stop()
        await self.supervisor.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.shutdown)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, wait for the open ones for `seconds`, then interrupt the rest."""
        self.is_draining = True
        self.feed.close()
        deadline = time.monotonic() + seconds
        while (self.exchanges or self.stored.background.running) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for exchange in list(self.exchanges):
            exchange.interrupt(unavailable("the server is shutting down; the request was interrupted"))
        await asyncio.sleep(0)

    def reload(self) -> asyncio.Task[None]:
        """Replace the engines by new ones, one replica after the other, without losing a request. A call during a
        reload joins it."""
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload())
            self._reloading.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is logged
        return self._reloading

    async def _reload(self) -> None:
        begin, before = time.monotonic(), self.llm.num_resumed
        logger.info("reloading: requests have %g seconds to finish at their engine", self.config.reload_timeout)
        try:
            await self.llm.reload(self.config.reload_timeout)
        except Exception as error:  # the supervisor tries again
            logger.error("the reload failed: %s", error)
            raise
        moved = self.llm.num_resumed - before
        logger.info("reloaded in %.1f s; %d requests went on at another engine", time.monotonic() - begin, moved)

    async def _disconnect_stalled(self) -> None:
        while True:
            await asyncio.sleep(STALL_CHECK_SECONDS)
            latest = time.monotonic() - self.config.stall_timeout
            for exchange in list(self.exchanges):
                if 0.0 < exchange.sending_since < latest:
                    exchange.interrupt(ClientDisconnectedError())
                    exchange.abort()

    def shown(self, usage: Usage, is_whole: bool = False) -> Usage:
        """Usage as OpenAI's routes report it. `is_whole`: in a response that is no stream."""
        if not self.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = None if is_whole else UNSET
        return usage

    # Checks of requests

    @property
    def max_model_len(self) -> int:
        return self.llm.info.max_model_len

    @property
    def retry_after(self) -> float:
        """Estimated seconds until a dead engine is back."""
        return self.supervisor.retry_after

    def check_serving(self) -> None:
        """Raise 503 unless a request can be accepted now; it may have to wait for an engine that is restarted."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})
        if not self.llm.is_hopeful:
            self.check_engine()

    def check_engine(self) -> None:
        """Raise 503 unless an engine is running."""
        if not self.supervisor.is_serving:
            raise unavailable(f"the engine is not running: {self.supervisor.status}", self.retry_after)

    def check_model(self, exchange: Exchange, name: str | None, adapters: Mapping[str, float] | None = None) -> None:
        """Choose what the request is computed with. Raises 404 for a model that is not served, unless any name will do;
        None is the served one. A name of an adapter, or weights of several, are the request's adapters."""
        if name is not None and name not in self.names:
            entry = self.adapters.get(name)
            if entry is None and not self.config.accept_any_model_name:
                raise self._no_model(name, "model")
            exchange.adapters = [] if entry is None else [entry.use()]
        if adapters:
            exchange.adapters = check_uses([*exchange.adapters, *self._weighted(adapters)])

    def _weighted(self, adapters: Mapping[str, float]) -> Iterator[AdapterUse]:
        for name, weight in adapters.items():
            entry = self.adapters.get(name)
            if entry is None:
                raise self._no_model(name, "adapters")
            yield entry.use(check_weight(weight))

    def _no_model(self, name: str, parameter: str) -> ApiError:
        known = list(self.names) if parameter == "model" else []
        known += [entry.name for entry in self.adapters]
        shown = ", ".join(known[:MOST_NAMES]) + (", …" if len(known) > MOST_NAMES else "")
        what = "model" if parameter == "model" else "adapter"
        return not_found(f"the {what} {short_repr(name)} is not served here; available: {shown or 'none'}", parameter)

    @property
    def texts(self) -> TextEncoder:
        """Tokenizes; raises without a tokenizer. For text that is not short, use it in `Exchange.work` only."""
        encoder = self.llm.inputs.texts
        if encoder is None:
            raise ValidationError(
                "text needs a tokenizer, and the server runs with --skip-tokenizer-init: send token ids", "prompt"
            )
        return encoder

    def tokenize(
        self,
        text: str,
        add_special_tokens: bool = True,
        keep: int | None = None,
        field: str = "input_text",
        from_start: bool = False,
    ) -> list[int]:
        """Text as token ids. Raises for a text that cannot fit, unless only `keep` tokens are wanted (-1: as many as
        fit): the last ones, or with `from_start` the first."""
        if keep is None:
            return self.texts.encode(text, field, add_special_tokens)
        check_truncation(keep, self.max_model_len)
        keep = self.max_model_len if keep < 0 else keep
        if from_start:
            return self.texts.encode_start(text, keep, field, add_special_tokens)[:keep]
        return self.texts.encode_end(text, keep, field, add_special_tokens)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's tokens as text; None without a tokenizer."""
        return None if self.tokenizer is None else Vocabulary(self.tokenizer)

    def check_length(self, prompt: int, output: int | None, field: str = "max_tokens") -> None:
        """Raise unless a prompt of `prompt` tokens and `output` generated tokens fit the model."""
        longest = self.max_model_len
        if output is not None and output > longest:
            raise bad_request(
                f"{field} is {output}, and this model's maximum context length is {longest} tokens", field
            )
        if prompt + (output or 0) > longest or prompt >= longest:
            requested = f" and {field} requests {output} more" if output is not None else ""
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, the prompt has {prompt} "
                f"tokens{requested}. Shorten the prompt, or request fewer tokens",
                "input_tokens",
            )

    def deadline(self, requested: float | None) -> float | None:
        """Seconds a request may take: its own timeout, limited by the server's."""
        bounds = [seconds for seconds in (requested, self.config.request_timeout) if seconds is not None]
        return min(bounds, default=None)


async def _nothing() -> None:
    """There are no other fronts."""


def _needed_reasoning_parser(llm: AsyncLLM, tokenizer: Any) -> str | None:
    """The parser without which answers could not be read, by the chat template."""
    if tokenizer is None:
        return None
    try:
        return guess_reasoning_parser(llm.renderer.template())
    except ValidationError:  # the model has no template
        return None


def _longest_body(llm: AsyncLLM) -> int:
    """Default of max_body_bytes."""
    longest = BODY_BYTES
    if llm.inputs.media.processor is not None:
        longest += BODY_IMAGES * llm.config.max_image_bytes * 4 // 3
    if llm.config.enable_prompt_embeds:
        longest += longest_embeds(llm.info.max_model_len, llm.info.model.hidden_size) * 4 // 3
    return longest
