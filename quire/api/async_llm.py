"""`AsyncLLM`: generation for asyncio programs, the engine in a process of its own. Names and meanings are vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import Any

from quire.api.async_sessions import AsyncSessions, SessionTurn
from quire.api.chat import ChatRenderer
from quire.api.compat import check_call, drop_neutral
from quire.api.engine_group import EngineGroup
from quire.api.fleet_metrics import merged
from quire.api.inputs import InputProcessor, PromptType
from quire.api.output_stream import OutputStream
from quire.api.replica import Replica
from quire.api.session_input import whole_turns_only
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.engine.session_calls import CutSession, RewriteSession, SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import EngineDeadError, ValidationError
from quire.loading.hub import find
from quire.loading.read_config import read_generation_config, read_model_config
from quire.loading.tokenizer import tokenizer_of
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import BeamSearchOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.output.times import TokenTimes
from quire.router import Router
from quire.sessions.log import session_key

LONG_PROMPT = 4096
"""Characters, or token ids: a prompt this long is prepared in a thread, and the event loop goes on."""


class AsyncLLM:
    """A model, ready to generate for many callers at once.

    Takes every field of `EngineConfig` as a keyword. Making one blocks until the engine is ready. Text is made and read
    in this process, tokens in the other. All its methods are for the event loop's thread.
    """

    engine_module = "quire.engine.process"
    """What the engine's process runs. A benchmark puts an engine of its own in its place."""

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        self._open(EngineConfig(model=os.fspath(model), **drop_neutral(settings)))

    @classmethod
    def from_config(cls, config: EngineConfig, *, spares_torch: bool = False) -> AsyncLLM:
        """As the constructor, with settings that are checked already. `spares_torch`: nothing in this process will use
        transformers' models, so torch need not be imported with it."""
        made = cls.__new__(cls)
        made._open(config, spares_torch)
        return made

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """As `from_config`; vLLM's name."""
        return cls.from_config(engine_args)

    def _open(self, config: EngineConfig, spares_torch: bool = False) -> None:
        self.config = config
        self._files = find(config)
        self._model = read_model_config(self._files, config.hf_overrides)
        self._generation = read_generation_config(self._files) if config.generation_config == "auto" else {}
        self._outputs = OutputProcessor()
        self._fleet = EngineGroup(config, self._files, self._model, self.engine_module, self._outputs)
        self._fleet.start()
        try:  # the tokenizer is loaded while the engines are
            self._tokenizer = (
                None if config.skip_tokenizer_init else tokenizer_of(config, self._files, spares_torch=spares_torch)
            )
        except BaseException:
            self._fleet.kill()
            raise
        self._fleet.wait_until_ready()
        self._fleet.on_ready = self._make_inputs
        self._make_inputs()
        if self._tokenizer is not None:
            self._outputs.vocabulary = Vocabulary(self._tokenizer)
        self._streams: dict[str, OutputStream] = {}
        """Open requests by the id the caller knows. Engines know them by another: an id may be used again while outputs
        of its last use are on their way."""
        self._numbers = itertools.count()
        self.is_shut = False
        """Whether it has been shut down: nothing brings it back."""

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
        **of_vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come. Each holds everything so far, or with `output_kind=DELTA` only what is
        new. Who reads slowly gets several steps in one output. Leaving early, or being cancelled, aborts the request.

        `session` (or `session_id`) names a session that the prompt is all of: the session is made, or becomes that,
        and goes on with what is generated. What begins as it did is not computed again.
        """
        check_call(of_vllm, "generate")
        name = session if session_id is None else session_id
        turn = None if name is None else SessionTurn(session_key(tenant, name), rewrites=True)
        async with aclosing(self.run(prompt, sampling_params, request_id, priority, tenant, turn)) as outputs:
            async for output in outputs:
                yield output

    async def run(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        turn: SessionTurn | None = None,
        shares_id: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`; `turn`: of which session it is one; `shares_id`: as in `submit`."""
        if isinstance(sampling_params, PoolingParams):
            raise ValidationError(
                "sampling_params must be SamplingParams, got PoolingParams: `encode` makes vectors", "sampling_params"
            )
        box = await self.submit(prompt, sampling_params, request_id, priority, tenant, turn, shares_id)
        written, is_kept = 0, False
        try:
            while not box.is_finished:
                output: RequestOutput = await box.take()
                if turn is not None:
                    written = len(output.outputs[0].token_ids) + (written if box.is_delta else 0)
                    await self._end_turn(turn.key, output, written)
                    is_kept = output.outputs[0].finish_reason in ("stop", "length")
                yield output
        finally:
            self.leave(box)
            if turn is not None and not is_kept:
                self._undo(turn)

    async def _end_turn(self, key: str, output: RequestOutput, written: int) -> None:
        """Where a stop string was found here, the engine may have gone on meanwhile, and nothing is durable yet."""
        sample = output.outputs[0]
        if sample.finish_reason == "stop" and isinstance(sample.stop_reason, str):
            await self.ask_sessions(CutSession(key, len(output.prompt_token_ids) + written))

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        **of_vllm: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of one prompt: the one output there is. Leaving early, or being cancelled, aborts the request."""
        check_call(of_vllm, "encode")
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise ValidationError(
                f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params", params
            )
        box = await self.submit(prompt, params, request_id, priority, tenant)
        try:
            while not box.is_finished:
                yield await box.take()
        finally:
            self.leave(box)

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, best first. Being cancelled aborts the search."""
        if not isinstance(params, BeamSearchParams):
            raise ValidationError(f"params must be BeamSearchParams, got {type(params).__name__}", "params", params)
        box = await self.submit(prompt, params, request_id, priority, tenant)
        try:
            found: BeamSearchOutput = await box.take()
            return found
        finally:
            self.leave(box)

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        turn: SessionTurn | None = None,
        shares_id: bool = False,
    ) -> OutputStream:
        """Check a request and send it off; what comes of it is read from its box, until `leave`. `shares_id`: other
        open requests may have the same id (an HTTP request with several prompts, or a client that repeats ids)."""
        self._fleet.attach()
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        key = f"{request_id}-{number}"
        request_id = key if shares_id else request_id
        if request_id in self._streams:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        params = self.get_default_sampling_params() if params is None else params
        box = self._streams[request_id] = OutputStream(request_id, key)
        begun: SessionTurn | None = None
        try:
            request, text = await self._prepare(box.key, prompt, params, priority, tenant)
            if turn is not None:
                await self._begin_turn(request, turn)
                begun = turn
            box.is_delta = request.params.output_kind is RequestOutputKind.DELTA
            box.is_streamed = box.awaits_first = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
            message = ipc.encode(ipc.Add(request))
            replica = self._fleet.choose(request)  # which may have died while the prompt was prepared
        except BaseException:
            del self._streams[request_id]
            if begun is not None:
                self._undo(begun)
            raise
        self._outputs.add(request, text)
        self._fleet.launch(replica, box, request, message)
        return box

    def leave(self, box: OutputStream) -> None:
        """Nobody reads this request any more."""
        del self._streams[box.request_id]
        if box.replica is not None:
            box.replica.leave(box)

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests; their readers get a last output with `finish_reason="abort"`. Unknown ids are no error."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if (box := self._streams.get(one)) is not None:
                box.is_aborted = True
                if box.replica is not None:
                    box.replica.abort(box)

    # Sessions

    @property
    def sessions(self) -> AsyncSessions:
        """Conversations by name, which outlive their turns, and with `kv_disk` the engine."""
        return AsyncSessions(self)

    async def ask_sessions(self, op: SessionOp) -> SessionAnswer:
        """Ask the engine something about sessions. What it changed is durable when this returns."""
        return await self._fleet.ask_sessions(op)

    @property
    def inputs(self) -> InputProcessor:
        """What checks requests."""
        return self._inputs

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Writes conversations as the model's chat template does."""
        return ChatRenderer(self._tokenizer, self.config.chat_template)

    # Asking

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is dead; returns when its loop has answered."""
        await self.report_health()

    async def report_health(self) -> ipc.HealthReport:
        """How far the engines' loops have come, in their own words."""
        reports = await self._fleet.ask_all(ipc.Ping)
        return ipc.HealthReport(0, sum(one.unfinished for one in reports), sum(one.steps for one in reports))

    async def wait_until_dead(self) -> str:
        """Returns once no engine lives, with the reason. Until then it costs nothing."""
        return await self._fleet.wait_until_dead()

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine; of several, of all together."""
        return merged([report.metrics for report in await self._fleet.ask_all(ipc.GetStats)])

    async def memory_map(self, replica: int = 0) -> MemoryMap:
        """Who holds what now, on the device and in the tiers below. `replica`: whose memory, of several engines."""
        if not 0 <= replica < len(self.replicas):
            raise ValidationError(
                f"there is no replica {replica}: there are {len(self.replicas)}, counted from 0", "replica", replica
            )
        return await self.replicas[replica].memory_map()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; True if none had to stay with a running request."""
        return await self._fleet.reset_prefix_cache()

    async def rebalance_experts(self) -> Rebalanced:
        """With enable_expert_parallel: move experts to where the load since the last time says they had better be."""
        return await self._fleet.rebalance_experts()

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers knows it."""
        if self._tokenizer is None:
            raise ValidationError(
                "this engine has no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init", True
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the model's own generation config."""
        return self._inputs.default_params()

    @property
    def facts(self) -> EngineInfo:
        """What the engine turned out to be; of several, the smallest."""
        return self._fleet.facts

    @property
    def replicas(self) -> list[Replica]:
        """The engines, of which there are `data_parallel_size`."""
        return self._fleet.replicas

    @property
    def router(self) -> Router | None:
        """What shares requests out among several engines."""
        return self._fleet.router

    @property
    def token_times(self) -> TokenTimes:
        """How many tokens have come, and the gaps between them, over all requests of this object."""
        return self._outputs.times

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, for whatever reason; of several, all of them."""
        return self._fleet.errored

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """What every call raises once the engine is dead."""
        return self._fleet.dead_error

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    # Ending, and beginning again

    async def restart(self, only_if_dead: bool = False) -> None:
        """Make a new engine in place of one that died, or of one that lives: then its requests fail."""
        await self._fleet.restart(only_if_dead)

    def kill_engine(self, reason: str) -> None:
        """End the engine's process at once: it cannot be talked to. Open requests fail with the reason."""
        self._fleet.kill_engines(reason)

    def shutdown(self) -> None:
        """End everything: open requests fail, the processes are gone when this returns. Calling it twice is fine."""
        if not self.is_shut:
            self.is_shut = True
            self._fleet.shut()
            self._fleet.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_shut:
            self.is_shut = True
            self._fleet.shut()
            await self._fleet.stop_aside()

    # How it is done

    def _make_inputs(self) -> None:
        """What checks requests, for the engines that are there now."""
        config = self.config
        self._inputs = InputProcessor(
            self.facts, self._tokenizer, self._generation, config.seed, config.max_logprobs, config.pooling,
            config.isolate_tenants,
        )  # fmt: skip
        self._inputs.hashes_ahead = config.enable_prefix_caching

    async def _begin_turn(self, request: NewRequest, turn: SessionTurn) -> None:
        if request.params.n != 1:  # before anything is written
            raise ValidationError("a turn of a session has one sample: n must be 1", "n", request.params.n)
        request.session = turn.key
        if request.params.truncate_prompt_tokens is not None and not turn.rewrites:
            raise whole_turns_only()
        if turn.rewrites:
            await self.ask_sessions(RewriteSession(turn.key, request.prompt, request.salt))
        elif turn.before is not None:
            try:
                await self.ask_sessions(turn.before)
            except (asyncio.CancelledError, EngineDeadError):  # it is on its way, and will be done, or may have been
                self._undo(turn)
                raise

    def _undo(self, turn: SessionTurn) -> None:
        """Take back what the turn added to its session; nobody waits for that."""
        if turn.undo is not None:
            self._fleet.tell_sessions(turn.key, turn.undo)

    async def _prepare(
        self,
        key: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        priority: int,
        tenant: str,
    ) -> tuple[NewRequest, str | None]:
        arguments = (key, prompt, params, time.monotonic(), priority, tenant)
        if _size(prompt) < LONG_PROMPT:
            return self._inputs.make(*arguments)
        return await asyncio.to_thread(self._inputs.make, *arguments)


AsyncLLMEngine = AsyncLLM
"""What vLLM calls it too."""


def _size(prompt: Any) -> int:
    """How much there is to prepare; what is no prompt at all has no size."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return len(prompt) if hasattr(prompt, "__len__") else 0
