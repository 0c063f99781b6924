"""`LLMEngine`: the engine in this process, request by request and step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.inputs import InputProcessor, PromptType
from quire.api.interrupts import deferred_interrupts
from quire.config import EngineConfig
from quire.engine.setup import EngineFacts, make_engine
from quire.engine.stats import Metric
from quire.errors import SHUT, ConfigError, EngineDeadError, QuireError, ValidationError
from quire.loading.hub import find
from quire.loading.model_config import read_generation_config, read_model_config
from quire.loading.tokenizer import tokenizer_of
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Output
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.sessions.keeper import SessionKeeper


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The end of a request that failed while others go on."""

    request_id: str
    error: QuireError


class LLMEngine:
    """Text in, text out, over one `EngineCore`."""

    def __init__(self, config: EngineConfig) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size is {config.data_parallel_size}, and this is one engine: use LLM, AsyncLLM or the "
                "server",
                "data_parallel_size",
                config.data_parallel_size,
            )
        self.config = config
        files = find(config)
        model = read_model_config(files, config.hf_overrides)
        generation = read_generation_config(files) if config.generation_config == "auto" else {}
        tokenizer = None if config.skip_tokenizer_init else tokenizer_of(config, files)
        self.core, self.facts = make_engine(config, files, model)
        self.inputs = InputProcessor(
            self.facts, tokenizer, generation, config.seed, config.max_logprobs, config.pooling, config.isolate_tenants
        )
        self._outputs = OutputProcessor(None if tokenizer is None else Vocabulary(tokenizer))
        self._closed = False
        self._queued_tokens = 0
        """Of prompts that came since the last step."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        """As the constructor; vLLM's name."""
        return cls(engine_args)

    @property
    def tokenizer(self) -> Any:
        if self.inputs.tokenizer is None:
            raise ValidationError(
                "this engine has no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init", True
            )
        return self.inputs.tokenizer

    @property
    def sessions(self) -> SessionKeeper:
        """Keeps conversations by name, for as long as the engine is there."""
        if self._closed:
            raise EngineDeadError(SHUT)
        return self.core.sessions

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        *,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
    ) -> None:
        """Check a request and queue it. `PoolingParams` ask for a vector, `BeamSearchParams` for the best sequences.
        `session`: what the session goes by whose turn this is."""
        if self._closed:
            raise EngineDeadError(SHUT)
        if request_id in self._outputs:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        request, text = self.inputs.make(request_id, prompt, params, time.monotonic(), priority, tenant)
        request.session = session
        self.core.add(request)
        self._outputs.add(request, text)
        self._queued_tokens += len(request.prompt)

    def begin_when_full(self) -> None:
        """If a step's worth of tokens is queued, let an idle device start on it; nothing is waited for."""
        if self._queued_tokens >= self.facts.max_num_batched_tokens:
            self._queued_tokens = 0
            with deferred_interrupts():
                self.core.begin()

    def step(self) -> list[Output]:
        """One step; what it brought for requests that are to be told."""
        self._queued_tokens = 0
        with deferred_interrupts():
            views, stops = self._outputs.process(self.core.step())
            for key, at, string in stops:
                self.core.finish(key, at, string)
        return views

    def arrivals(self, patience: float | None = None) -> Sequence[Output | FailedRequest]:
        """As `step`, where each request's failure is its own. `patience`: seconds after which nothing is an answer, for
        an engine that only waits."""
        return self.step()

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; their outputs are not shown any more."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.core.abort(request_id)
            self._outputs.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to do."""
        return self.core.has_work

    def get_num_unfinished_requests(self) -> int:
        return self.core.scheduler.unfinished

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; True if none had to stay with a running request."""
        return self.core.scheduler.reset_prefix_cache()

    def rebalance_experts(self) -> Rebalanced:
        """Move experts to where the load since the last time says they had better be."""
        outcome = self.core.rebalance_experts()
        assert outcome is not None, "engines that step together are in processes of their own"
        return outcome

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of this engine."""
        return self.core.metrics()

    def memory_map(self) -> MemoryMap:
        """Who holds what now, on the device and in the tiers below."""
        return self.core.memory_map(self.facts.block_bytes)

    def check_idle(self) -> None:
        """Raise unless every block and row has come back."""
        while self.core.has_work and not self.core.scheduler.unfinished:  # a step was in flight at the last abort
            self.step()
        self.core.scheduler.check_idle()

    def shutdown(self) -> None:
        """End everything and give the memory back. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self.core.shutdown()


__all__ = ["EngineFacts", "FailedRequest", "LLMEngine"]
