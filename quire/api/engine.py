"""`LLMEngine`: an engine in this process, driven request by request and step by step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

from quire.api.adapters import AdapterCatalog, LoRAChoice
from quire.api.death_watch import DeathWatch
from quire.api.inputs import AnyParams, InputProcessor, PromptType
from quire.config import EngineConfig
from quire.engine.setup import make_engine
from quire.engine.stats import Metric
from quire.errors import SHUT_DOWN, ConfigError, EngineDeadError, QuireError, ValidationError
from quire.loading.hub import find_model
from quire.loading.model_config import read_generation_config, read_model_config
from quire.loading.tokenizer import tokenizer_of
from quire.messages.adapter_use import AdapterUse
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Output
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed while others continue."""

    request_id: str
    error: QuireError


@dataclass(frozen=True)
class ModelSummary:
    """What scripts read of the model that an engine runs; names are vLLM's."""

    model: str
    tokenizer: str
    max_model_len: int
    dtype: str
    seed: int
    embedding_size: int
    vocab_size: int
    hf_config: SimpleNamespace
    """The fields of config.json."""

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_hidden_size(self) -> int:
        return self.embedding_size


class HeldRequests:
    """Requests that wait because another, which may have lost the engine's ranks, runs alone."""

    def __init__(self) -> None:
        self.watch = DeathWatch()
        self.trial: str | None = None
        """The request that runs alone."""
        self.waiting: list[str] = []
        self.views: list[Output] = []
        """Outputs of requests that ended between two steps."""

    @property
    def is_active(self) -> bool:
        """Whether a request runs alone, or an output was not returned yet."""
        return self.trial is not None or bool(self.views)

    def take_views(self) -> list[Output]:
        """Outputs that were not returned yet."""
        views, self.views = self.views, []
        return views

    def forget(self, request_id: str) -> None:
        """The request was aborted."""
        self.watch.forget(request_id)
        self.waiting = [one for one in self.waiting if one != request_id]
        self.views = [view for view in self.views if view.request_id != request_id]


class LLMEngine:
    """Text in, text out, over one `EngineCore`."""

    def __init__(self, config: EngineConfig) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"LLMEngine is a single engine, and data_parallel_size is {config.data_parallel_size}: use LLM, "
                "AsyncLLM or the server",
                "data_parallel_size",
                config.data_parallel_size,
            )
        self.config = config
        files = find_model(config)
        model = read_model_config(files, config.hf_overrides)
        generation = read_generation_config(files, config)
        tokenizer = None if config.skip_tokenizer_init else tokenizer_of(config, files)
        self._files, self._model = files, model
        self.core, self.info = make_engine(config, files, model)
        self.inputs = InputProcessor(config, self.info, tokenizer, generation)
        self.adapters = AdapterCatalog(config, model)
        self._outputs = OutputProcessor(None if tokenizer is None else Vocabulary(tokenizer))
        self._closed = False
        self._queued_tokens = 0
        """Prompt tokens added since the last step."""
        self._held = HeldRequests()
        self._failures = 0
        """How often ranks were lost since a token came."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        """The same as the constructor; vLLM's name."""
        return cls(engine_args)

    @property
    def tokenizer(self) -> Any:
        if self.inputs.tokenizer is None:
            raise ValidationError(
                "this engine has no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init", True
            )
        return self.inputs.tokenizer

    @property
    def model_config(self) -> ModelSummary:
        """The model and its limits."""
        config, info = self.config, self.info
        return ModelSummary(
            model=config.model,
            tokenizer=config.tokenizer or config.model,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            seed=config.seed,
            embedding_size=info.model.hidden_size,
            vocab_size=info.model.vocab_size,
            hf_config=SimpleNamespace(**info.model.raw),
        )

    def get_model_config(self) -> ModelSummary:
        """The same as `model_config`."""
        return self.model_config

    @property
    def sessions(self) -> SessionKeeper:
        """Sessions of the engine, by key."""
        if self._closed:
            raise EngineDeadError(SHUT_DOWN)
        return self.core.sessions

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
        *,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
        lora_request: LoRAChoice = None,
        adapters: Sequence[AdapterUse] = (),
    ) -> None:
        """Check a request and queue it. `PoolingParams` request a vector, `BeamSearchParams` the best sequences.
        `session`: key of the session whose turn this is. `adapters`: those of `lora_request`, if they are known."""
        if self._closed:
            raise EngineDeadError(SHUT_DOWN)
        if request_id in self._outputs:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        uses = [*adapters, *self.adapters.uses(lora_request)]
        request, text = self.inputs.make(request_id, prompt, params, time.monotonic(), priority, tenant, uses)
        request.session = session
        if self.core.has_lost_ranks:
            self._recover(EngineDeadError(self.core.death))
        if self._held.trial is None:
            self.core.add(request)
        else:
            self._held.waiting.append(request_id)
        self._outputs.add(request, text)
        self._queued_tokens += len(request.prompt)

    def begin_when_full(self) -> None:
        """Launch a step if the device is idle and a step's worth of tokens is queued; does not wait for it."""
        if self._queued_tokens >= self.info.max_num_batched_tokens:
            self._queued_tokens = 0
            with deferred_interrupts(), suppress(EngineDeadError):  # the next step raises it, or goes on without
                self.core.begin()

    def step(self) -> list[Output]:
        """Make one step; returns the outputs of requests that have new ones."""
        self._queued_tokens = 0
        with deferred_interrupts():
            try:
                outputs = self.core.step()
            except EngineDeadError as error:
                self._recover(error)
                return self._held.take_views()
            views, stops = self._outputs.process(outputs)
            for key, at, string in stops:
                self.core.finish(key, at, string)
            if outputs.keys:
                self._failures = 0
            if self._held.is_active:
                self._readmit()
                views = self._held.take_views() + views
        return views

    # Ranks that are lost

    def _recover(self, error: EngineDeadError) -> None:
        """Make another engine, with new ranks, where open requests go on from the tokens they have. Raises the error if
        the engine is dead for another reason, or for too many times in a row."""
        self._failures += 1
        if not self.core.has_lost_ranks or self._failures > self.config.max_engine_restarts:
            raise error
        logger.warning("%s; its requests go on with new ranks", error)
        held, outputs = self._held, self._outputs
        held.views += outputs.process(self.core.scheduler.take_outputs())[0]
        ids = [request.id for request in outputs.open_requests()]
        held.watch.keep(ids)
        tokens = {one: outputs.num_tokens(one) for one in ids if one not in held.waiting}
        for request_id, message in held.watch.engine_died(tokens, str(error)).items():
            logger.error("request %s: %s", request_id, message)
            held.views += outputs.process(outputs.ends(request_id, "error", message))[0]
        kept = self._scratch_sessions()
        self.core.shutdown()
        ends = self.core.grammar_ends
        self.core, self.info = make_engine(self.config, self._files, self._model, grammar_ends=ends)
        self.inputs.use(self.info)
        for session, content in kept:
            ttl = None if session.expires is None else session.expires - session.used
            self.core.sessions.create(session.name, content, salt=session.salt, ttl=ttl, meta=session.meta)
        held.trial, held.waiting = None, [one for one in ids if one in outputs]
        self._readmit()

    def _scratch_sessions(self) -> list[tuple[Session, list[int]]]:
        """Sessions that have no durable folder, with their tokens."""
        keeper = self.core.scheduler.sessions
        if self.config.kv_disk is not None or not isinstance(keeper, SessionKeeper):
            return []
        sessions = keeper.store.page(limit=max(1, len(keeper.store))).sessions
        return [(one, keeper.tokens(one.name)) for one in sessions if one.lost is None]

    def _readmit(self) -> None:
        """Queue requests that went on; if one of them may have lost the ranks, each such request alone first."""
        held, outputs = self._held, self._outputs
        trial = held.trial
        if trial is not None and trial in outputs and not held.watch.passes(trial, outputs.num_tokens(trial)):
            return
        held.trial = next(iter(held.watch.suspects), None)
        if held.trial is not None:
            held.watch.begin_trial(held.trial)
        admitted = held.waiting if held.trial is None else [held.trial]
        held.waiting = [one for one in held.waiting if one not in admitted]
        for request_id in admitted:
            held.watch.sent(request_id, outputs.num_tokens(request_id))
            try:
                self.core.add(outputs.continued(request_id))
            except QuireError as error:
                held.views += outputs.process(outputs.ends(request_id, "error", str(error)))[0]

    def collect(self, timeout: float | None = None) -> Sequence[Output | FailedRequest]:
        """As `step`, with failed requests among the outputs. `timeout`: seconds to wait for engines in other
        processes."""
        return self.step()

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; they have no further outputs."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.core.abort(request_id)
            self._outputs.forget(request_id)
            if self._held.is_active:
                self._held.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether another step has work."""
        return self.core.has_work or self._held.is_active

    def get_num_unfinished_requests(self) -> int:
        return self.core.scheduler.unfinished + len(self._held.waiting)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False if running requests still hold some."""
        return self.core.scheduler.reset_prefix_cache()

    def rebalance_experts(self) -> Rebalanced:
        """Move experts to balance the load measured since the last time."""
        outcome = self.core.rebalance_experts()
        assert outcome is not None, "engines of a lockstep group run in their own processes"
        return outcome

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of this engine."""
        return self.core.metrics()

    def memory_map(self) -> MemoryMap:
        """What holds which blocks now, on the device and in the tiers below."""
        return self.core.memory_map(self.info.block_bytes)

    def check_idle(self) -> None:
        """Raise unless every block and row is free."""
        while self.core.has_work and not self.core.scheduler.unfinished:  # a step was in flight at the last abort
            self.step()
        self.core.scheduler.check_idle()

    def shutdown(self) -> None:
        """Abort everything and free the memory. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self.core.shutdown()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the block is done: a step cut in half would leave scheduler and device out of sync. Does
    nothing outside the main thread."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(*pending[0])
