"""`LLM`: offline generation with the engine in this process. Names and meanings are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from quire.api.chat import ChatRenderer, template_text
from quire.api.compat import check_call, drop_neutral
from quire.api.engine import LLMEngine
from quire.api.inbox import Box, Inbox
from quire.api.inputs import PromptType
from quire.api.progress import Progress
from quire.api.sessions import Sessions
from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.errors import ConfigError, ValidationError
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import BeamSearchOutput, EmbeddingRequestOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import RequestOutputKind, SamplingParams

Message = dict[str, Any]
Kind = TypeVar("Kind", RequestOutput, PoolingRequestOutput, BeamSearchOutput)
Params = TypeVar("Params")


class LLM:
    """A model, ready to generate.

    Takes every field of `EngineConfig` as a keyword. As a context manager it gives its memory back at the end.
    Safe to use from many threads, whose requests then run together.
    """

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._open(EngineConfig(model=name, **drop_neutral(settings)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """As the constructor, with settings that are checked already."""
        made = cls.__new__(cls)
        made._open(engine_args)
        return made

    def _open(self, config: EngineConfig) -> None:
        self.llm_engine = _make_engine(config)
        self._inbox = Inbox(self.llm_engine)
        self._requests = 0
        self._queued: list[list[str]] = []
        """Requests of each `enqueue` that nobody has waited for yet."""

    # Generating

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs come in the prompts' order. `priority` and `tenant` are for all, or one
        for each."""
        check_call(of_vllm, "generate")
        ids = self._ask(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY, tenant)
        return self._gather(ids, RequestOutput, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        **of_vllm: Any,
    ) -> list[str]:
        """As `generate`, without waiting: `wait_for_completion` does that. Returns the requests' ids."""
        check_call(of_vllm, "enqueue")
        ids = self._ask(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY, tenant)
        self._queued.append(list(ids))  # what is returned is the caller's
        return ids

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Outputs of everything that was queued, in that order."""
        queued, self._queued = self._queued, []
        try:
            return [output for ids in queued for output in self._gather(ids, RequestOutput, use_tqdm)]
        except BaseException:
            for ids in queued:
                self._inbox.leave(ids)
            raise

    def stream(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
    ) -> Iterator[RequestOutput]:
        """Outputs as they come, in the order steps bring them. Each holds everything so far, or with
        `output_kind=DELTA` only what is new. Leaving the loop early aborts what is unfinished."""
        ids = self._ask(prompts, sampling_params, priority, None, tenant)
        stream = self._stream(ids)
        next(stream)  # it is inside its `with` now: a stream that is dropped unread aborts its requests too
        return stream

    def _stream(self, ids: list[str]) -> Iterator[RequestOutput]:
        unfinished = set(ids)
        with self._inbox.waiting(ids) as outputs:
            yield None  # type: ignore[misc]
            while unfinished:
                for output in outputs():
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output  # type: ignore[misc]  # these requests have samples, not vectors

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many."""
        check_call(of_vllm, "chat")
        prompts = self._render(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, tenant=tenant)

    def chat_stream(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, as it comes. Options are those of `chat`."""
        options = {
            "chat_template": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
        } | template_options
        return self.stream(self._render(messages, **options), sampling_params)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        tenant: str = "",
        **of_vllm: Any,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one prompt or of each of many, best first: what transformers' beam search
        finds. `concurrency_limit`: so many prompts are searched from at a time."""
        check_call(of_vllm, "beam_search")
        if not isinstance(params, BeamSearchParams):
            raise ValidationError(f"params must be BeamSearchParams, got {type(params).__name__}", "params", params)
        if concurrency_limit is not None and not (isinstance(concurrency_limit, int) and concurrency_limit > 0):
            raise ValidationError(
                f"concurrency_limit must be None or an integer above 0, got {concurrency_limit!r}", "concurrency_limit"
            )
        listed = _as_list(prompts)
        at_once = concurrency_limit or max(1, len(listed))
        outputs: list[BeamSearchOutput] = []
        for start in range(0, len(listed), at_once):
            part = listed[start : start + at_once]
            ids = self._enqueue(part, [params] * len(part), None, None, tenant)
            outputs += self._gather(ids, BeamSearchOutput, use_tqdm)
        return outputs

    # Vectors

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tenant: str | Sequence[str] = "",
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for one prompt or for each of many, in their order. It has length 1 unless asked otherwise."""
        check_call(of_vllm, "embed")
        pooled = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="embed", tenant=tenant)
        return [EmbeddingRequestOutput.from_base(output) for output in pooled]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: str = "embed",
        tenant: str | Sequence[str] = "",
        **of_vllm: Any,
    ) -> list[PoolingRequestOutput]:
        """As `embed`, with the vectors as arrays. "embed" is the only task there is."""
        check_call(of_vllm, "encode")
        listed = _as_list(prompts)
        params = _for_each("pooling_params", PoolingParams() if pooling_params is None else pooling_params, len(listed))
        PoolingParams(task=pooling_task)  # which refuses any other
        for one in params:
            if not isinstance(one, PoolingParams):
                raise ValidationError(
                    f"pooling_params must be PoolingParams, got {type(one).__name__}", "pooling_params", one
                )
        return self._gather(self._enqueue(listed, params, None, None, tenant), PoolingRequestOutput, use_tqdm)

    # Asking and tidying up

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers knows it."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the model's own generation config."""
        return self.llm_engine.inputs.default_params()

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine."""
        with self._inbox.turns:
            return self.llm_engine.get_metrics()

    def memory_map(self) -> MemoryMap:
        """Who holds what now, on the device and in the tiers below. `quire inspect --snapshot` draws its `to_json`."""
        with self._inbox.turns:
            return self.llm_engine.memory_map()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks."""
        with self._inbox.turns:
            return self.llm_engine.reset_prefix_cache()

    def rebalance_experts(self) -> Rebalanced:
        """With enable_expert_parallel: move experts to where the load since the last time says they had better be."""
        with self._inbox.turns:
            return self.llm_engine.rebalance_experts()

    @property
    def model_path(self) -> Path:
        """The file or folder the model was loaded from."""
        return self.llm_engine.facts.files.path

    def shutdown(self) -> None:
        """Give the memory back; the object is of no use afterwards."""
        with self._inbox.turns:
            self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @cached_property
    def sessions(self) -> Sessions:
        """Conversations by name, which outlive their turns, and with `kv_disk` this process."""
        if (size := self.llm_engine.config.data_parallel_size) > 1:
            raise ConfigError(
                f"LLM has sessions with one engine, and data_parallel_size is {size}: use AsyncLLM or the server",
                "data_parallel_size",
                size,
            )
        return Sessions(self.llm_engine, self._inbox, self._next_id, lambda: self._renderer)

    # How it is done

    def _next_id(self) -> str:
        self._requests += 1
        return str(self._requests - 1)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.llm_engine.tokenizer, self.llm_engine.config.chat_template)

    def _ask(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        kind: RequestOutputKind | None,
        tenant: str | Sequence[str],
    ) -> list[str]:
        """Queue one prompt or many; the requests' ids."""
        listed = _as_list(prompts)
        return self._enqueue(listed, self._each_params(sampling_params, len(listed)), priority, kind, tenant)

    def _enqueue(
        self,
        prompts: list[PromptType],
        params: Sequence[SamplingParams | PoolingParams | BeamSearchParams],
        priority: int | Sequence[int] | None,
        kind: RequestOutputKind | None,
        tenant: str | Sequence[str] = "",
    ) -> list[str]:
        """Queue all or none."""
        tenants: list[Any] = list(tenant) if isinstance(tenant, (list, tuple)) else [tenant] * len(prompts)
        if len(tenants) != len(prompts):
            raise ValidationError(f"{len(prompts)} prompts, but {len(tenants)} tenants", "tenant", len(tenants))
        levels = priority or 0
        priorities: list[Any] = list(levels) if isinstance(levels, (list, tuple)) else [levels] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValidationError(
                f"{len(prompts)} prompts, but {len(priorities)} priorities", "priority", len(priorities)
            )
        ids: list[str] = []
        box: Box = []
        try:
            for prompt, asked, level, owner in zip(prompts, params, priorities, tenants, strict=True):
                if kind is not None and isinstance(asked, SamplingParams):
                    asked = asked.clone()
                    asked.output_kind = kind
                with self._inbox.turns:
                    request_id = self._next_id()
                    self.llm_engine.add_request(request_id, prompt, asked, priority=level, tenant=owner)
                    ids.append(request_id)
                    self._inbox.expect(request_id, box)
                    self.llm_engine.begin_when_full()
        except BaseException:
            self._inbox.leave(ids)
            raise
        return ids

    def _gather(self, ids: list[str], kind: type[Kind], use_tqdm: bool | Callable[..., Any]) -> list[Kind]:
        """Step until all have ended; their outputs in the order of `ids`."""
        finished: dict[str, Kind] = {}
        with Progress(len(ids), enabled=bool(use_tqdm)) as progress, self._inbox.waiting(ids) as outputs:
            while len(finished) < len(ids):
                for output in outputs():
                    if output.finished and isinstance(output, kind):
                        finished[output.request_id] = output
                        progress.finished(output)
        return [finished[request_id] for request_id in ids]

    def _each_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        listed = _for_each("sampling_params", self.get_default_sampling_params() if params is None else params, count)
        if any(isinstance(one, PoolingParams) for one in listed):
            raise ValidationError(
                "sampling_params must be SamplingParams, got PoolingParams: `embed` makes vectors", "sampling_params"
            )
        return listed

    def _render(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[PromptType]:
        """Conversations through the chat template, as prompts with their token ids."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        if not conversations:
            raise ValidationError("chat needs at least one message", "messages", messages)
        renderer = self._renderer
        prompts: list[PromptType] = []
        for conversation in conversations:
            text, tokens = renderer.render(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=template_text(chat_template),
                chat_template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return prompts


def _make_engine(config: EngineConfig) -> LLMEngine:
    """One in this process, or several in processes of their own."""
    if config.data_parallel_size == 1:
        return LLMEngine(config)
    from quire.api.replicated import ReplicatedEngine

    return ReplicatedEngine(config)


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many: a string, a dict, or a list of token ids is one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValidationError(
            f"prompts are text, token ids, dicts of them, or a list of those; got {type(prompts).__name__}",
            "prompts",
            prompts,
        )
    listed = list(prompts)
    return [listed] if listed and hasattr(listed[0], "__index__") else listed  # type: ignore[list-item,return-value]


def _for_each(name: str, params: Params | Sequence[Params], count: int) -> list[Params]:
    """One set of parameters for all prompts, or one for each."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise ValidationError(f"{count} prompts, but {len(params)} {name}", name, len(params))
    return list(params)
