"""`LLMEngine`: an engine in this process, driven request by request and step by step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

from quire.api.inputs import AnyParams, InputProcessor, PromptType
from quire.config import EngineConfig
from quire.engine.setup import make_engine
from quire.engine.stats import Metric
from quire.errors import SHUT_DOWN, ConfigError, EngineDeadError, QuireError, ValidationError
from quire.loading.hub import find_model
from quire.loading.model_config import read_generation_config, read_model_config
from quire.loading.tokenizer import tokenizer_of
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Output
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.sessions.keeper import SessionKeeper


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
        self.core, self.info = make_engine(config, files, model)
        self.inputs = InputProcessor(config, self.info, tokenizer, generation)
        self._outputs = OutputProcessor(None if tokenizer is None else Vocabulary(tokenizer))
        self._closed = False
        self._queued_tokens = 0
        """Prompt tokens added since the last step."""

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
    ) -> None:
        """Check a request and queue it. `PoolingParams` request a vector, `BeamSearchParams` the best sequences.
        `session`: key of the session whose turn this is."""
        if self._closed:
            raise EngineDeadError(SHUT_DOWN)
        if request_id in self._outputs:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        request, text = self.inputs.make(request_id, prompt, params, time.monotonic(), priority, tenant)
        request.session = session
        self.core.add(request)
        self._outputs.add(request, text)
        self._queued_tokens += len(request.prompt)

    def begin_when_full(self) -> None:
        """Launch a step if the device is idle and a step's worth of tokens is queued; does not wait for it."""
        if self._queued_tokens >= self.info.max_num_batched_tokens:
            self._queued_tokens = 0
            with deferred_interrupts():
                self.core.begin()

    def step(self) -> list[Output]:
        """Make one step; returns the outputs of requests that have new ones."""
        self._queued_tokens = 0
        with deferred_interrupts():
            views, stops = self._outputs.process(self.core.step())
            for key, at, string in stops:
                self.core.finish(key, at, string)
        return views

    def collect(self, timeout: float | None = None) -> Sequence[Output | FailedRequest]:
        """As `step`, with failed requests among the outputs. `timeout`: seconds to wait for engines in other
        processes."""
        return self.step()

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; they have no further outputs."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.core.abort(request_id)
            self._outputs.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether another step has work."""
        return self.core.has_work

    def get_num_unfinished_requests(self) -> int:
        return self.core.scheduler.unfinished

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
