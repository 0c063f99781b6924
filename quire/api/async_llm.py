"""`AsyncLLM`: generation for asyncio programs, the engine in a process of its own. Names and meanings are vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import Any

from quire.api.async_sessions import AsyncSessions, Turn
from quire.api.chat import ChatRenderer
from quire.api.compat import drop_neutral
from quire.api.first_tokens import apart
from quire.api.inputs import InputProcessor, PromptType
from quire.api.mailbox import Mailbox
from quire.api.session_input import whole_turns_only
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.facts import Facts
from quire.engine.remote import RemoteEngine, error_of
from quire.engine.session_calls import CutSession, RewriteSession, SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import EngineDeadError, QuireError, ValidationError
from quire.loading.hub import find
from quire.loading.read_config import read_generation_config, read_model_config
from quire.loading.tokenizer import load_tokenizer
from quire.memory.disk.sessions import session_key
from quire.messages.beams import BeamSearchParams
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import BeamSearchOutput, PoolingRequestOutput, RequestOutput, StepOutputs
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.output.times import TokenTimes

logger = logging.getLogger(__name__)

LONG_PROMPT = 4096
"""Characters, or token ids: a prompt this long is prepared in a thread, and the event loop goes on."""

MANY = 8
"""Outputs that first tokens do not wait for."""

SHUT = "the engine has been shut down; make a new one"


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
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """As the constructor, with settings that are checked already."""
        made = cls.__new__(cls)
        made._open(config)
        return made

    def _open(self, config: EngineConfig) -> None:
        self.config = config
        self._files = find(config)
        self._model = read_model_config(self._files, config.hf_overrides)
        self._generation = read_generation_config(self._files) if config.generation_config == "auto" else {}
        engine = self._start_engine()
        try:  # the tokenizer is loaded while the engine is
            self._tokenizer = None if config.skip_tokenizer_init else self._load_tokenizer()
        except BaseException:
            engine.kill()
            raise
        engine.wait_until_ready()
        self._outputs = OutputProcessor(None if self._tokenizer is None else Vocabulary(self._tokenizer))
        self._streams: dict[str, Mailbox] = {}
        """Open requests by the id the caller knows…"""
        self._by_key: dict[str, Mailbox] = {}
        """…and by the one the engine knows: an id may be used again while outputs of its last use are on their way."""
        self._rest: StepOutputs | None = None
        """What came with first tokens, and waits until those are with their readers."""
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._restarting = asyncio.Lock()
        self._coming: RemoteEngine | None = None
        """The engine that a restart is making."""
        self.is_shut = False
        """Whether it has been shut down: nothing brings it back."""
        self._adopt(engine)

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come. Each holds everything so far, or with `output_kind=DELTA` only what is
        new. Who reads slowly gets several steps in one output. Leaving early, or being cancelled, aborts the request.

        `session` (or `session_id`) names a session that the prompt is all of: the session is made, or becomes that,
        and goes on with what is generated. What begins as it did is not computed again.
        """
        name = session if session_id is None else session_id
        turn = None if name is None else Turn(session_key(tenant, name), rewrites=True)
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
        turn: Turn | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`; `turn`: of which session it is one."""
        if isinstance(sampling_params, PoolingParams):
            raise ValidationError(
                "sampling_params must be SamplingParams, got PoolingParams: `encode` makes vectors", "sampling_params"
            )
        box = await self._submit(prompt, sampling_params, request_id, priority, tenant, turn)
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
            self._leave(box)
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
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of one prompt: the one output there is. Leaving early, or being cancelled, aborts the request."""
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise ValidationError(
                f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params", params
            )
        box = await self._submit(prompt, params, request_id, priority, tenant)
        try:
            while not box.is_finished:
                yield await box.take()
        finally:
            self._leave(box)

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
        box = await self._submit(prompt, params, request_id, priority, tenant)
        try:
            found: BeamSearchOutput = await box.take()
            return found
        finally:
            self._leave(box)

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests; their readers get a last output with `finish_reason="abort"`. Unknown ids are no error."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if (box := self._streams.get(one)) is not None:
                box.is_aborted = True
                if box.key in self._by_key:
                    self._engine.send(ipc.Abort(box.key))

    # Sessions

    @property
    def sessions(self) -> AsyncSessions:
        """Conversations by name, which outlive their turns, and with `kv_disk` the engine."""
        return AsyncSessions(self)

    async def ask_sessions(self, op: SessionOp) -> SessionAnswer:
        """Ask the engine something about sessions. What it changed is durable when this returns."""
        reply: ipc.SessionReply = await self._ask(lambda question: ipc.SessionCall(question, op))
        if reply.refused is not None:
            raise error_of(reply.refused)
        assert reply.answer is not None
        return reply.answer

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
        """How far the engine's loop has come, in its own words."""
        report: ipc.HealthReport = await self._ask(ipc.Ping)
        return report

    async def wait_until_dead(self) -> str:
        """Returns once the engine is dead, with the reason. Until then it costs nothing."""
        try:
            self._attach()
            await self._answer_to(next(self._numbers))
        except EngineDeadError as error:
            return str(error)
        raise AssertionError("nobody answers what was not asked")

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine."""
        metrics: list[Metric] = (await self._ask(ipc.GetStats)).metrics
        return metrics

    async def memory_map(self) -> MemoryMap:
        """Who holds what now, on the device and in the tiers below."""
        block_bytes = self.facts.block_bytes
        report: ipc.MemoryReport = await self._ask(lambda question: ipc.GetMemoryMap(question, block_bytes))
        if report.map is None:
            raise QuireError(f"the engine's memory could not be mapped: {report.error}")
        return report.map

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; True if none had to stay with a running request."""
        return bool((await self._ask(ipc.ResetPrefixCache)).is_empty)

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
    def facts(self) -> Facts:
        """What the engine turned out to be."""
        return self._engine.facts

    @property
    def token_times(self) -> TokenTimes:
        """How many tokens have come, and the gaps between them, over all requests of this object."""
        return self._outputs.times

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, for whatever reason."""
        return bool(self._engine.death)

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """What every call raises once the engine is dead."""
        return EngineDeadError(self._engine.death)

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    # Ending, and beginning again

    async def restart(self, only_if_dead: bool = False) -> None:
        """Make a new engine in place of one that died, or of one that lives: then its requests fail."""
        async with self._restarting:
            if self.is_shut:
                raise EngineDeadError(SHUT)
            if only_if_dead and not self.errored:
                return  # someone else was quicker
            self._close("the engine is being restarted")
            await _aside(self._engine.stop)
            self._adopt(await self._make_engine())

    def kill_engine(self, reason: str) -> None:
        """End the engine's process at once: it cannot be talked to. Open requests fail with the reason."""
        self._engine.end(reason)

    def shutdown(self) -> None:
        """End everything: open requests fail, the process is gone when this returns. Calling it twice is fine."""
        if not self.is_shut:
            self._shut()
            self._engine.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_shut:
            self._shut()
            await _aside(self._engine.stop)

    # How it is done

    def _load_tokenizer(self) -> Any:
        config = self.config
        source = self._files if config.tokenizer is None else config.tokenizer
        return load_tokenizer(source, trust_remote_code=config.trust_remote_code, revision=config.tokenizer_revision)

    def _start_engine(self) -> RemoteEngine:
        return RemoteEngine(self.config, self._files, self._model, self.engine_module)

    async def _make_engine(self) -> RemoteEngine:
        """A new one, ready. Nothing of it is left if nobody wants it any more."""
        if self.is_shut:
            raise EngineDeadError(SHUT)
        engine = self._coming = self._start_engine()
        try:
            await _aside(engine.wait_until_ready)
        except BaseException as error:
            engine.kill()  # also ends the thread's wait
            if self.is_shut and isinstance(error, Exception):
                raise EngineDeadError(SHUT) from error
            raise
        finally:
            self._coming = None
        if self.is_shut:
            engine.kill()
            raise EngineDeadError(SHUT)
        return engine

    def _adopt(self, engine: RemoteEngine) -> None:
        self._engine = engine
        engine.on_message, engine.on_death = self._take, self._fail_all
        config = self.config
        self._inputs = InputProcessor(
            engine.facts, self._tokenizer, self._generation, config.seed, config.max_logprobs, config.pooling,
            config.isolate_tenants,
        )  # fmt: skip
        self._inputs.hashes_ahead = config.enable_prefix_caching

    def _attach(self) -> None:
        """Whoever asks something must be able to get an answer."""
        if self._engine.death:
            raise self.dead_error
        self._engine.attach()

    async def _submit(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        turn: Turn | None = None,
    ) -> Mailbox:
        """Check a request and send it off."""
        self._attach()
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        if request_id in self._streams:
            raise ValidationError(f"request id {request_id!r} is in use", "request_id", request_id)
        params = self.get_default_sampling_params() if params is None else params
        box = self._streams[request_id] = Mailbox(request_id, f"{request_id}-{number}")
        begun: Turn | None = None
        try:
            request, text = await self._prepare(box.key, prompt, params, priority, tenant)
            if turn is not None:
                await self._begin_turn(request, turn)
                begun = turn
            box.is_delta = request.params.output_kind is RequestOutputKind.DELTA
            box.awaits_first = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
            message = ipc.encode(ipc.Add(request))
            self._attach()  # it may have died while the prompt was prepared
        except BaseException:
            del self._streams[request_id]
            if begun is not None:
                self._undo(begun)
            raise
        self._by_key[box.key] = box
        self._outputs.add(request, text)
        self._engine.send(message)
        if box.is_aborted:
            self._engine.send(ipc.Abort(box.key))
        return box

    async def _begin_turn(self, request: NewRequest, turn: Turn) -> None:
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
            except asyncio.CancelledError:  # it is on its way, and will be done
                self._undo(turn)
                raise

    def _undo(self, turn: Turn) -> None:
        """Take back what the turn added to its session; nobody waits for that."""
        if turn.undo is not None and not self._engine.death:
            self._engine.send(ipc.SessionCall(next(self._numbers), turn.undo))

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

    def _leave(self, box: Mailbox) -> None:
        """Nobody reads this request any more."""
        del self._streams[box.request_id]
        if self._by_key.pop(box.key, None) is not None:
            self._outputs.forget(box.key)
            if not box.is_ended:
                self._engine.send(ipc.Abort(box.key))

    async def _ask(self, question: Callable[[int], ipc.Down]) -> Any:
        self._attach()
        number = next(self._numbers)
        self._engine.send(question(number))
        return await self._answer_to(number)

    async def _answer_to(self, number: int) -> Any:
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._questions[number]

    def _take(self, message: ipc.Up) -> None:
        """Something came from the engine."""
        match message:
            case ipc.Outputs(outputs=outputs):
                self._take_outputs(outputs)
            case ipc.Refused(id=key):
                self._fail(key, error_of(message))
            case ipc.HealthReport() | ipc.StatsReport() | ipc.ResetReport() | ipc.SessionReply() | ipc.MemoryReport():
                answer = self._questions.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take_outputs(self, outputs: StepOutputs) -> None:
        self._show_rest()
        boxes = self._by_key
        new = {key[0] for key in outputs.keys if (box := boxes.get(key[0])) is not None and box.awaits_first}
        if not new or outputs.counts is not None or len(outputs.keys) - len(new) < MANY:
            self._show(outputs)
            return
        first, self._rest = apart(outputs, new)
        self._show(first)
        asyncio.get_running_loop().call_soon(self._show_rest)  # after the readers who have just been woken

    def _show_rest(self) -> None:
        """What a step told about all others, if that is still to be shown."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._show(rest)

    def _show(self, outputs: StepOutputs) -> None:
        for end in outputs.finished:
            if end.error:  # the request is at fault, and only the engine could know
                self._fail(end.key[0], error_of(ipc.Refused(end.key[0], end.error, end.message or "")))
        try:
            views, stops = self._outputs.process(outputs)
        except Exception as error:  # what cannot be shown must not be waited for
            logger.exception("the outputs of a step cannot be shown")
            for request in {key[0] for key in (*outputs.keys, *(key for key, _ in outputs.vectors))}:
                self._engine.send(ipc.Abort(request))
                self._fail(request, QuireError(f"the output cannot be shown: {type(error).__name__}: {error}"))
            return
        for key, at, string in stops:
            self._engine.send(ipc.Finish(key, at, string))
        for view in views:
            if (box := self._by_key.get(view.request_id)) is not None:
                view.request_id = box.request_id
                box.put(view)

    def _fail(self, key: str, error: QuireError) -> None:
        if (box := self._by_key.get(key)) is not None:
            self._outputs.forget(key)
            box.fail(error)

    def _fail_all(self, reason: str) -> None:
        """The engine is dead: nobody waits for it any longer."""
        self._show_rest()
        for key in list(self._by_key):
            self._fail(key, EngineDeadError(reason))
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _shut(self) -> None:
        self.is_shut = True
        if self._coming is not None:
            self._coming.kill()
        self._close(SHUT)

    def _close(self, reason: str) -> None:
        self._engine.close(reason)
        self._fail_all(self._engine.death)


async def _aside(wait: Callable[[], None]) -> None:
    """In a thread of its own: those of the pool may all be busy with prompts."""
    pool = ThreadPoolExecutor(1)
    try:
        await asyncio.get_running_loop().run_in_executor(pool, wait)
    finally:
        pool.shutdown(wait=False)


def _size(prompt: Any) -> int:
    """How much there is to prepare; what is no prompt at all has no size."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return len(prompt) if hasattr(prompt, "__len__") else 0
