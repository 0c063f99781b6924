"""`AsyncLLM`: generation for asyncio programs, with the engine in its own process. Names and semantics are vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import Any

from quire.api.adapters import AdapterCatalog, LoRAChoice
from quire.api.async_sessions import AsyncSessions, SessionTurn, Turn
from quire.api.chat import ChatRenderer
from quire.api.compat import check_call, engine_arguments, no_such_method
from quire.api.engine_group import EngineGroup
from quire.api.inputs import AnyParams, InputProcessor, PromptType, check_params
from quire.api.output_stream import OutputStream
from quire.api.relay import Relay
from quire.api.replica import Replica
from quire.api.session_media import SessionItems
from quire.api.work_pool import WorkPool
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import EngineDeadError, ValidationError
from quire.loading.files import ModelFiles
from quire.loading.hub import find_model
from quire.loading.model_config import ModelConfig, read_generation_config, read_model_config
from quire.loading.tokenizer import tokenizer_of
from quire.messages.adapter_use import AdapterUse
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.lora import LoRARequest
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import BeamSearchOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor, TokenTimes
from quire.output.tracked import TextSink
from quire.router import Router
from quire.sessions.log import session_key

LONG_PROMPT = 4096
"""Characters, or token ids: a prompt this long is prepared in a thread, so that the event loop is not blocked."""
MEDIA_THREADS = 8
"""Of one tenant, at most; most of them wait for other servers, or for memory."""
WORK_SECONDS = 1.0
"""How long a shutdown waits for such threads."""


class AsyncLLM:
    """A model, ready to generate for many callers at once.

    Takes every field of `EngineConfig` as a keyword. The constructor blocks until the engine is ready. Tokenizing and
    detokenizing happen in this process. Not thread-safe: call its methods in the event loop's thread.
    """

    engine_module = "quire.engine.process"
    """The module that the engine's process runs; benchmarks replace it."""

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        self._open(EngineConfig(model=os.fspath(model), **engine_arguments(settings)))

    @classmethod
    def from_config(cls, config: EngineConfig, *, spares_torch: bool = False) -> AsyncLLM:
        """The same as the constructor, with settings that are already checked. `spares_torch`: nothing in this process
        will use transformers' models, so importing it need not import torch."""
        made = cls.__new__(cls)
        made._open(config, spares_torch)
        return made

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """The same as `from_config`; vLLM's name."""
        return cls.from_config(engine_args)

    def _open(self, config: EngineConfig, spares_torch: bool = False) -> None:
        files = find_model(config)
        self._open_model(config, files, read_model_config(files, config.hf_overrides), spares_torch)

    def _make_group(self, files: ModelFiles, model: ModelConfig) -> EngineGroup:
        """The engines, not started."""
        return EngineGroup(self.config, files, model, self.engine_module, self._outputs)

    def _open_model(self, config: EngineConfig, files: ModelFiles, model: ModelConfig, spares_torch: bool) -> None:
        self.config = config
        generation = read_generation_config(files, config)
        self._outputs = OutputProcessor()
        self._group = self._make_group(files, model)
        tokenizer = None
        if config.in_process and not config.skip_tokenizer_init:  # before the engine's thread imports torch
            tokenizer = tokenizer_of(config, files, spares_torch=spares_torch)
        self._group.start()
        try:  # the tokenizer is loaded while the engines start
            if tokenizer is None and not config.skip_tokenizer_init:
                tokenizer = tokenizer_of(config, files, spares_torch=spares_torch)
        except BaseException:
            self._group.kill()
            raise
        self._group.wait_until_ready()

        self.inputs = InputProcessor(
            config, self.info, tokenizer, generation, computes_keys=config.enable_prefix_caching
        )
        self.adapters = AdapterCatalog(config, model)
        """LoRA adapters by name."""
        self._group.on_ready = lambda: self.inputs.use(self.info)  # a restarted engine may have another cache size
        if tokenizer is not None:
            self._outputs.vocabulary = Vocabulary(tokenizer)
        self._streams: dict[str, OutputStream] = {}
        """Open requests by the caller's id. Engines use another: an id may be used again while outputs of its last use
        are still arriving."""
        self._numbers = itertools.count()
        self.work = WorkPool()
        """Threads for long prompts, so that the event loop is not blocked."""
        self.media_work = WorkPool(MEDIA_THREADS)
        """Threads for prompts with images, which are fetched and decoded there."""
        self.session_items = SessionItems()
        """Pixels of the images of sessions."""
        self.is_shut = False
        """Whether it has been shut down for good."""

    # Generating

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        session: str | None = None,
        session_id: str | None = None,
        lora_request: LoRAChoice = None,
        **vllm_arguments: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come. Each holds everything so far, or with `output_kind=DELTA` only what is
        new. A slow reader gets several steps in one output. Leaving early, or being cancelled, aborts the request.

        `session` (or `session_id`) names a session whose whole content is the prompt: the session is created, or
        replaced by the prompt, and the output is appended to it. A common prefix with its old content is not
        recomputed.

        `lora_request`: the adapter, or several whose changes add up, each with its weight.
        """
        check_call(vllm_arguments, "generate")
        adapters = await self.adapters_of(lora_request)
        name = session if session_id is None else session_id
        turn = None if name is None else SessionTurn(session_key(tenant, name), rewrites=True)
        outputs = self.run(prompt, sampling_params, request_id, priority, tenant, turn, adapters=adapters)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def run(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        turn: Turn | None = None,
        shares_id: bool = False,
        sink: TextSink | None = None,
        adapters: Sequence[AdapterUse] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`. `turn`: set if the request is a session's turn. The rest: as for `submit`."""
        if isinstance(sampling_params, PoolingParams):
            check_params(sampling_params, SamplingParams, "sampling_params", ": `encode` returns embeddings")
        stream = await self.submit(
            prompt, sampling_params, request_id, priority, tenant, turn, shares_id, sink, adapters
        )
        written: list[int] = []
        is_kept = False
        try:
            while not stream.is_finished:
                output: RequestOutput = await stream.take()
                if turn is not None:
                    if not stream.is_delta:
                        written.clear()
                    written += output.outputs[0].token_ids
                    await turn.cut_at_stop(self, stream, output, written)
                    is_kept = output.outputs[0].finish_reason in ("stop", "length")
                yield output
        finally:
            self.leave(stream)
            if turn is not None and not is_kept:
                turn.undo(self)

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRAChoice = None,
        **vllm_arguments: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The embedding of one prompt, as a single output. Leaving early, or being cancelled, aborts the request."""
        check_call(vllm_arguments, "encode")
        params = PoolingParams() if pooling_params is None else pooling_params
        check_params(params, PoolingParams, "pooling_params")
        adapters = await self.adapters_of(lora_request)
        stream = await self.submit(prompt, params, request_id, priority, tenant, adapters=adapters)
        try:
            while not stream.is_finished:
                yield await stream.take()
        finally:
            self.leave(stream)

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRAChoice = None,
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, best first. Being cancelled aborts the search."""
        check_params(params, BeamSearchParams, "params")
        adapters = await self.adapters_of(lora_request)
        stream = await self.submit(prompt, params, request_id, priority, tenant, adapters=adapters)
        try:
            found: BeamSearchOutput = await stream.take()
            return found
        finally:
            self.leave(stream)

    async def submit(
        self,
        prompt: PromptType,
        params: AnyParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        turn: Turn | None = None,
        shares_id: bool = False,
        sink: TextSink | None = None,
        adapters: Sequence[AdapterUse] = (),
    ) -> OutputStream:
        """Check a request and send it to an engine; its outputs are read from the stream, until `leave`. `shares_id`:
        other open requests may have the same id (an HTTP request with several prompts, or a client that repeats
        ids). `sink`: while the reader waits, it takes new text; only for deltas of one sequence without logprobs, and
        not for turns. `adapters`: LoRA adapters, whose changes add up."""
        self._group.check_hopeful()
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        key = f"{request_id}-{number}"
        request_id = key if shares_id else request_id
        if request_id in self._streams:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        params = self.get_default_sampling_params() if params is None else params
        stream = self._streams[request_id] = OutputStream(request_id, key, sink)
        begun: Turn | None = None
        try:
            make, arguments = self.inputs.make, (key, prompt, params, time.monotonic(), priority, tenant, adapters)
            if _prompt_size(prompt) < LONG_PROMPT and not _has_media(prompt):
                request, text = make(*arguments)
            else:
                pool = self.media_work if _has_media(prompt) else self.work
                request, text = await pool.run(make, *arguments, tenant=tenant)
            if turn is not None:
                await turn.begin(self, request)
                begun = turn
            kind = request.params.output_kind
            stream.is_delta = kind is RequestOutputKind.DELTA
            stream.is_streamed = stream.awaits_first = kind is not RequestOutputKind.FINAL_ONLY
            message = ipc.encode(ipc.Add(request))
            self._outputs.add(request, text)
            if sink is not None:
                self._outputs.tracked(key).sink = stream
            self._group.submit(stream, request, message)
        except BaseException:
            self._outputs.forget(key)
            del self._streams[request_id]
            if begun is not None:
                begun.undo(self)
            raise
        return stream

    def leave(self, stream: OutputStream) -> None:
        """The request's reader has left: abort it if it is unfinished."""
        del self._streams[stream.request_id]
        self._group.leave(stream)

    async def abort(self, request_id: str | list[str]) -> None:
        """Abort requests; their readers get a last output with `finish_reason="abort"`. Unknown ids are no error."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._streams.get(one)) is not None:
                stream.is_aborted = True
                self._group.abort(stream)

    # Adapters

    async def adapters_of(self, choice: LoRAChoice) -> Sequence[AdapterUse]:
        """The adapters of a request; those that are new here are read in a thread."""
        return () if choice is None else await asyncio.to_thread(self.adapters.uses, choice)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter and list it under its name. Engines read it when a request needs it."""
        await asyncio.to_thread(self.adapters.add, lora_request)
        return True

    async def remove_lora(self, lora_id: int | str) -> bool:
        """Take an adapter off the list, by its number or name; its open requests go on."""
        self.adapters.remove(lora_id)
        return True

    async def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter on the device once it is there, by its number or name, unless no other can make room."""
        self.adapters.pin(lora_id)
        return True

    async def list_loras(self) -> set[int]:
        """The numbers of listed adapters."""
        return {entry.number for entry in self.adapters}

    # Sessions

    @property
    def sessions(self) -> AsyncSessions:
        """Conversations by name. Their KV is kept between turns; with `kv_disk` they also survive the engine."""
        return AsyncSessions(self)

    async def call_sessions(self, op: SessionOp) -> SessionAnswer:
        """Run a session operation in the engine. Its changes are durable when this returns."""
        return await self._group.call_sessions(op)

    def send_session_op(self, key: str, op: SessionOp) -> None:
        """The same for one session, without waiting for the reply."""
        self._group.send_session_op(key, op)

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Renders conversations with the model's chat template."""
        return ChatRenderer(
            self.inputs.tokenizer, self.config.chat_template, placeholders=self.inputs.media.placeholders
        )

    # The engine

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is dead; returns when its loop has replied."""
        await self.report_health()

    async def report_health(self) -> ipc.HealthReport:
        """Open requests and steps so far, as the engines' loops report them."""
        reports = await self._group.call_all(ipc.Ping)
        return ipc.HealthReport(0, sum(one.unfinished for one in reports), sum(one.steps for one in reports))

    async def wait_until_dead(self) -> str:
        """Waits until all engines are dead; returns the reason."""
        return await self._group.wait_until_dead()

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine, or of all engines together."""
        return await self._group.get_metrics()

    async def memory_map(self, replica: int = 0) -> MemoryMap:
        """What holds which blocks now, on all tiers of one replica."""
        if not 0 <= replica < len(self.replicas):
            raise ValidationError(
                f"there is no replica {replica}: there are {len(self.replicas)}, numbered from 0", "replica", replica
            )
        return await self.replicas[replica].memory_map()

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False if running requests still hold some."""
        return await self._group.reset_prefix_cache()

    async def rebalance_experts(self) -> Rebalanced:
        """With enable_expert_parallel: move experts to balance the load measured since the last time."""
        return await self._group.rebalance_experts()

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        if self.inputs.tokenizer is None:
            raise ValidationError(
                "this engine has no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init", True
            )
        return self.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default for `sampling_params=None`: the model's generation config."""
        return self.inputs.default_params()

    @property
    def info(self) -> EngineInfo:
        """What the engine reported; of several, the one with the smallest cache."""
        return self._group.info

    @property
    def replicas(self) -> list[Replica]:
        """The engines; there are `data_parallel_size`."""
        return self._group.replicas

    @property
    def router(self) -> Router | None:
        """Chooses an engine for each request; None for a single engine."""
        return self._group.router

    @property
    def token_times(self) -> TokenTimes:
        """Tokens received and the gaps between them, over all requests of this object."""
        return self._outputs.times

    @property
    def errored(self) -> bool:
        """Whether the engine is dead; of several, all of them."""
        return self._group.errored

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_hopeful(self) -> bool:
        """Whether a request is accepted: an engine is alive, or will be."""
        return self._group.recovery.is_hopeful

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor restarts engines that died, instead of this object."""
        return all(replica.is_supervised for replica in self.replicas)

    @is_supervised.setter
    def is_supervised(self, value: bool) -> None:
        for replica in self.replicas:
            replica.is_supervised = value

    @property
    def is_reloading(self) -> bool:
        """Whether engines are being restarted on request."""
        return any(replica.is_reloading for replica in self.replicas)

    @property
    def num_resumed(self) -> int:
        """How often a request went on at another engine than the one that it was at."""
        return self._group.recovery.resumed

    @property
    def dead_error(self) -> EngineDeadError:
        """The error of every call once the engine is dead."""
        return self._group.dead_error

    @property
    def num_open_requests(self) -> int:
        return len(self._streams) + len(self._group.relay)

    @property
    def relay(self) -> Relay:
        """Requests that other front processes send through this one."""
        return self._group.relay

    # Restart and shutdown

    async def restart(self, only_if_dead: bool = False) -> None:
        """Replace the engine by a new one, where its requests go on."""
        await self._group.restart(only_if_dead)

    async def reload(self, drain_seconds: float = 0.0) -> None:
        """Replace the engines by new ones, one replica after the other, without losing a request. Open requests have
        `drain_seconds` to finish first, then they go on at other replicas or at the new engine. With one engine, new
        requests wait until it is ready."""
        await self._group.reload(drain_seconds)

    def end_engine(self, reason: str) -> None:
        """Kill the engine's process as if it had failed: its requests go on."""
        self._group.end_engines(reason)

    def kill_engine(self, reason: str) -> None:
        """Kill the engine's process. Open requests fail with the reason, and only `restart` starts another."""
        self._group.kill_engines(reason)

    def shutdown(self) -> None:
        """End the processes and wait for them; open requests fail. Calling it twice is fine."""
        if not self.is_shut:
            self.is_shut = True
            self._group.shut()
            self._group.stop()
            self.work.close(WORK_SECONDS)
            self.media_work.close(WORK_SECONDS)

    def __getattr__(self, name: str) -> Any:
        raise no_such_method(self, name)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_shut:
            self.is_shut = True
            self._group.shut()
            self.work.close()
            self.media_work.close()
            await self._group.recovery.close()
            await self._group.stop_in_thread()


AsyncLLMEngine = AsyncLLM
"""vLLM's other name for it."""


def _prompt_size(prompt: Any) -> int:
    """Characters or token ids of a prompt and what comes with it; 0 for anything else."""
    if isinstance(prompt, Mapping):
        parts = (prompt.get("prompt_token_ids", prompt.get("prompt")), prompt.get("suffix"), prompt.get("prediction"))
        return sum(map(_prompt_size, parts))
    return len(prompt) if hasattr(prompt, "__len__") else 0


def _has_media(prompt: Any) -> bool:
    """Whether a prompt has images that must be decoded."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))
