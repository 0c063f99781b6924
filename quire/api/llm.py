"""`LLM`: offline generation with the engine in this process. Names and semantics are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from quire.api.adapters import LoRAChoice
from quire.api.chat import ChatRenderer, template_text
from quire.api.chat_media import take_media
from quire.api.compat import check_call, engine_arguments, no_such_method
from quire.api.embeds_parts import take_embeds
from quire.api.engine import LLMEngine, ModelSummary
from quire.api.inputs import AnyParams, PromptType, as_prompts, check_params, one_each
from quire.api.media_inputs import map_ahead
from quire.api.output_queues import OutputQueues, Queue
from quire.api.pairs import PairEncoder, Pairs, check_scores
from quire.api.progress import Progress
from quire.api.sessions import Sessions
from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.errors import ConfigError, ValidationError
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.lora import LoRARequest
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.messages.pooling import EXTRA, PoolingParams, with_task
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.vllm_arguments import CALL

Message = dict[str, Any]
LoRAChoices = LoRARequest | Sequence[LoRAChoice] | None
"""The adapter of all prompts, or the adapters of each."""
Kind = TypeVar("Kind", RequestOutput, PoolingRequestOutput, BeamSearchOutput)
_EMBED_HINT = ": `embed` returns embeddings"


class LLM:
    """A model, ready to generate.

    Takes every field of `EngineConfig` as a keyword. As a context manager it frees its memory at the end.
    Thread-safe: requests of several threads run in one batch.
    """

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._open(EngineConfig(model=name, **engine_arguments(settings)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """The same as the constructor, with settings that are already checked."""
        made = cls.__new__(cls)
        made._open(engine_args)
        return made

    def _open(self, config: EngineConfig) -> None:
        self.llm_engine = _make_engine(config)
        self._outputs = OutputQueues(self.llm_engine)
        self._requests = 0
        self._queued: list[list[str]] = []
        """Requests of each `enqueue`, until `wait_for_completion`."""

    # Generating

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs are in the prompts' order. `priority`, `tenant` and `lora_request`: one
        for all, or one each; adapters that are a list in the list add up. `prompt_token_ids`: prompts as token ids, as
        older scripts give them. `mm_processor_kwargs`: of all prompts with images that have none of their own."""
        check_call(vllm_arguments, "generate")
        if prompt_token_ids is not None:
            if prompts is not None:
                raise ValidationError("give either prompts or prompt_token_ids", "prompts", prompts)
            prompts = prompt_token_ids
        if mm_processor_kwargs:
            given: Any = as_prompts(prompts)
            settings = {"mm_processor_kwargs": mm_processor_kwargs}
            given = [settings | one if isinstance(one, dict) else one for one in given]
            prompts = given
        ids = self._submit(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY, tenant, lora_request)
        return self._gather(ids, RequestOutput, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[str]:
        """As `generate`, but only queues the requests; `wait_for_completion` waits. Returns their ids."""
        check_call(vllm_arguments, "enqueue")
        ids = self._submit(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY, tenant, lora_request)
        self._queued.append(list(ids))  # a copy: the caller may change the returned list
        return ids

    def wait_for_completion(
        self, output_type: type | tuple[type, ...] | None = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Outputs of everything that was queued, in order. `output_type` is vLLM's: all are `RequestOutput`."""
        queued, self._queued = self._queued, []
        try:
            return [output for ids in queued for output in self._gather(ids, RequestOutput, use_tqdm)]
        except BaseException:
            for ids in queued:
                self._outputs.drop(ids)
            raise

    def stream(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
    ) -> Iterator[RequestOutput]:
        """Outputs as steps produce them. Each holds everything so far, or with `output_kind=DELTA` only what is new.
        Leaving the loop early aborts what is unfinished."""
        ids = self._submit(prompts, sampling_params, priority, None, tenant, lora_request)
        stream = self._stream(ids)
        next(stream)  # enters the `with`: a stream that is dropped unread aborts its requests too
        return stream

    def _stream(self, ids: list[str]) -> Iterator[RequestOutput]:
        unfinished = set(ids)
        with self._outputs.reading(ids) as outputs:
            yield None  # type: ignore[misc]
            while unfinished:
                for output in outputs():
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output  # type: ignore[misc]  # these are not pooling requests

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
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many. Messages may have images: PIL images, path objects, data URLs."""
        check_call(vllm_arguments, "chat")
        prompts = self._render(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs,
            mm_processor_kwargs,
        )  # fmt: skip
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, tenant=tenant, lora_request=lora_request
        )

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        **template_options: Any,
    ) -> list[str]:
        """As `chat`, but only queues the requests; `wait_for_completion` waits. Returns their ids."""
        names = [name for name in template_options if name in CALL]
        check_call({name: template_options.pop(name) for name in names}, "enqueue_chat")
        prompts = self._render(messages, **template_options)
        return self.enqueue(prompts, sampling_params, priority=priority, tenant=tenant, lora_request=lora_request)

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRAChoices = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, as it comes. Options are those of `chat`."""
        options = {
            "chat_template": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
        } | template_options
        return self.stream(self._render(messages, **options), sampling_params, lora_request=lora_request)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        tenant: str = "",
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one prompt or many, best first, as transformers' beam search finds them.
        `concurrency_limit`: most prompts searched at a time."""
        check_call(vllm_arguments, "beam_search")
        check_params(params, BeamSearchParams, "params")
        if concurrency_limit is not None and not (isinstance(concurrency_limit, int) and concurrency_limit > 0):
            raise ValidationError(
                f"concurrency_limit must be None or an integer above 0, got {concurrency_limit!r}", "concurrency_limit"
            )
        listed = as_prompts(prompts)
        choices = _choices(lora_request, len(listed))
        at_once = concurrency_limit or max(1, len(listed))
        outputs: list[BeamSearchOutput] = []
        for start in range(0, len(listed), at_once):
            part = listed[start : start + at_once]
            ids = self._enqueue(part, [params] * len(part), None, None, tenant, choices[start : start + at_once])
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
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of one prompt or of each of many, in order; normalized unless the parameters disable it."""
        check_call(vllm_arguments, "embed")
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            tenant=tenant,
            lora_request=lora_request,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in pooled]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of a classifier's classes, of one prompt or of each of many, in order."""
        check_call(vllm_arguments, "classify")
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            tenant=tenant,
            lora_request=lora_request,
        )
        return [ClassificationRequestOutput.from_base(output) for output in pooled]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: str | None = None,
        tenant: str | Sequence[str] = "",
        lora_request: LoRAChoices = None,
        **vllm_arguments: Any,
    ) -> list[PoolingRequestOutput]:
        """As `embed` or `classify`, with the vectors as arrays. `pooling_task`: "embed" or "classify"; None: what the
        model does."""
        check_call(vllm_arguments, "encode")
        listed = as_prompts(prompts)
        params = one_each("pooling_params", PoolingParams() if pooling_params is None else pooling_params, len(listed))
        for one in params:
            check_params(one, PoolingParams, "pooling_params")
        tasked = [with_task(one, pooling_task) for one in params]
        ids = self._enqueue(listed, tasked, None, None, tenant, _choices(lora_request, len(listed)))
        return self._gather(ids, PoolingRequestOutput, use_tqdm)

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        tenant: str = "",
        lora_request: LoRAChoice = None,
        chat_template: str | None = None,
        **vllm_arguments: Any,
    ) -> list[ScoringRequestOutput]:
        """A score of each pair: one with one, one with each of many, or pair by pair. It is what a classifier of pairs
        answers, and otherwise the cosine similarity of their embeddings. `chat_template`: makes the classifier's prompt
        of messages of the roles query and document."""
        check_call(vllm_arguments, "score")
        limits = [((pooling_params and pooling_params.extra_kwargs) or {}).get(name, 0) for name in EXTRA]
        cut = self.llm_engine.inputs.first_tokens
        pairs = Pairs(cut(as_prompts(data_1), limits[0]), cut(as_prompts(data_2), limits[1]))
        head = self.llm_engine.info.model.class_head
        if head is None:
            choices = [lora_request] * len(pairs.prompts)
            embedded = self.encode(
                pairs.prompts, pooling_params, use_tqdm=use_tqdm, tenant=tenant, lora_request=choices
            )
            return pairs.scored(embedded)
        check_scores(self.llm_engine.info.model)
        template = chat_template or self.llm_engine.config.chat_template
        encoder = PairEncoder(self.llm_engine.inputs, head, lambda: self._renderer, template_text(template))
        keep = None if pooling_params is None else pooling_params.truncate_prompt_tokens
        prompts = pairs.joined(encoder, None if keep == -1 else keep)
        choices = [lora_request] * len(prompts)
        answers = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, tenant=tenant, lora_request=choices)
        return [ScoringRequestOutput.from_base(answer) for answer in answers]

    # Adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter and list it under its name; `generate` does it too. The engine reads it when needed."""
        self.llm_engine.adapters.add(lora_request)
        return True

    def remove_lora(self, lora_id: int | str) -> bool:
        """Take an adapter off the list, by its number or name; its open requests go on."""
        self.llm_engine.adapters.remove(lora_id)
        return True

    def pin_lora(self, lora_id: int | str) -> bool:
        """Keep an adapter on the device once it is there, by its number or name, unless no other can make room."""
        self.llm_engine.adapters.pin(lora_id)
        return True

    def list_loras(self) -> set[int]:
        """The numbers of listed adapters."""
        return {entry.number for entry in self.llm_engine.adapters}

    # The engine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default for `sampling_params=None`: the model's generation config."""
        return self.llm_engine.inputs.default_params()

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms of the engine; those that vLLM has too also under its names."""
        with self._outputs.lock:
            metrics = self.llm_engine.get_metrics()
        return [*metrics, *(theirs for metric in metrics if (theirs := metric.under_vllms_name) is not None)]

    def memory_map(self) -> MemoryMap:
        """What holds which blocks now, on all tiers. `quire inspect --snapshot` draws its `to_json`."""
        with self._outputs.lock:
            return self.llm_engine.memory_map()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached blocks; False if running requests still hold some."""
        if reset_running_requests:
            raise ValidationError(
                "reset_running_requests=True is not supported by quire: finish or abort the requests first",
                "reset_running_requests",
                True,
            )
        with self._outputs.lock:
            return self.llm_engine.reset_prefix_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the model, of all its replicas unless `include_dp` is off."""
        config = self.llm_engine.config
        return config.num_ranks * (config.data_parallel_size if include_dp else 1)

    @property
    def model_config(self) -> ModelSummary:
        """The model and its limits."""
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the engine can do; vLLM's names."""
        return ("generate", "embed")

    def rebalance_experts(self) -> Rebalanced:
        """With enable_expert_parallel: move experts to balance the load measured since the last time."""
        with self._outputs.lock:
            return self.llm_engine.rebalance_experts()

    @property
    def model_path(self) -> Path:
        """The file or folder the model was loaded from."""
        return self.llm_engine.info.files.path

    def shutdown(self) -> None:
        """Free the memory; the object cannot be used afterwards."""
        with self._outputs.lock:
            self.llm_engine.shutdown()

    def __getattr__(self, name: str) -> Any:
        raise no_such_method(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @cached_property
    def sessions(self) -> Sessions:
        """Conversations by name. Their KV is kept between turns; with `kv_disk` they also survive this process."""
        if (size := self.llm_engine.config.data_parallel_size) > 1:
            raise ConfigError(
                f"LLM supports sessions with one engine only, and data_parallel_size is {size}: use AsyncLLM or the "
                "server",
                "data_parallel_size",
                size,
            )
        return Sessions(self.llm_engine, self._outputs, self._next_id, lambda: self._renderer)

    # Internals

    def _next_id(self) -> str:
        self._requests += 1
        return str(self._requests - 1)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        engine = self.llm_engine
        return ChatRenderer(
            engine.tokenizer, engine.config.chat_template, placeholders=engine.inputs.media.placeholders
        )

    def _submit(
        self,
        prompts: PromptType | Sequence[PromptType] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        kind: RequestOutputKind | None,
        tenant: str | Sequence[str],
        lora_request: LoRAChoices,
    ) -> list[str]:
        """Queue one prompt or many; returns the requests' ids."""
        listed = as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = one_each("sampling_params", given, len(listed))
        for one in params:
            check_params(one, SamplingParams, "sampling_params", _EMBED_HINT if isinstance(one, PoolingParams) else "")
        return self._enqueue(listed, params, priority, kind, tenant, _choices(lora_request, len(listed)))

    def _enqueue(
        self,
        prompts: list[PromptType],
        params: Sequence[AnyParams],
        priority: int | Sequence[int] | None,
        kind: RequestOutputKind | None,
        tenant: str | Sequence[str],
        choices: Sequence[LoRAChoice],
    ) -> list[str]:
        """Queue all of these, or none if one is refused; returns their ids."""
        tenants: list[str] = one_each("tenant", tenant, len(prompts), "tenants")
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts), "priorities")
        ids: list[str] = []
        queue: Queue = []
        try:
            ready = self.llm_engine.inputs.prepare_ahead(prompts)
            for prompt, one, level, owner, lora in zip(ready, params, priorities, tenants, choices, strict=True):
                if kind is not None and isinstance(one, SamplingParams):
                    one = one.clone()
                    one.output_kind = kind
                with self._outputs.lock:
                    request_id = self._next_id()
                    self.llm_engine.add_request(
                        request_id, prompt, one, priority=level, tenant=owner, lora_request=lora
                    )
                    ids.append(request_id)
                    self._outputs.register(request_id, queue)
                    self.llm_engine.begin_when_full()
        except BaseException:
            self._outputs.drop(ids)
            raise
        return ids

    def _gather(self, ids: list[str], kind: type[Kind], use_tqdm: bool | Callable[..., Any]) -> list[Kind]:
        """Step until all have finished; returns their outputs in the order of `ids`."""
        finished: dict[str, Kind] = {}
        with Progress(len(ids), enabled=bool(use_tqdm)) as progress, self._outputs.reading(ids) as outputs:
            while len(finished) < len(ids):
                for output in outputs():
                    if output.finished and isinstance(output, kind):
                        finished[output.request_id] = output
                        progress.finished(output)
        return [finished[request_id] for request_id in ids]

    def _render(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[PromptType]:
        """Conversations as prompts, rendered by the chat template."""
        given: Any = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        conversations: list[Sequence[Message]] = given
        if not conversations:
            raise ValidationError("chat needs at least one message", "messages", messages)
        renderer, inputs = self._renderer, self.llm_engine.inputs

        def render(conversation: Sequence[Message]) -> PromptType:
            taken, sources = take_media(conversation, inputs.media.check_kind)
            taken, embeds = take_embeds(taken)
            text = renderer.render_text(
                taken,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=template_text(chat_template),
                chat_template_kwargs=chat_template_kwargs,
            )
            # The template writes the special tokens itself; the tokenizer must not add its own.
            if embeds:
                text, prepared = inputs.join_embeds(text, embeds, bool(sources))
                return {"prompt": text, "prompt_token_ids": prepared.tokens, "prepared": prepared}
            if sources:
                prepared = inputs.prepare_chat(text, sources, mm_processor_kwargs)
                return {"prompt": text, "prompt_token_ids": prepared.tokens, "prepared": prepared}
            return {"prompt": text, "prompt_token_ids": inputs.encode_chat(text)}

        return list(map_ahead(render, conversations) if inputs.media.processor else map(render, conversations))


def _choices(lora_request: LoRAChoices, count: int) -> list[LoRAChoice]:
    """The adapters of each of `count` prompts."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if not isinstance(lora_request, Sequence) or isinstance(lora_request, str):
        raise ValidationError(
            f"lora_request must be a LoRARequest or a list of them, got {type(lora_request).__name__}",
            "lora_request",
            lora_request,
        )
    return one_each("lora_request", lora_request, count, "adapters")


def _make_engine(config: EngineConfig) -> LLMEngine:
    """One engine in this process, or several in their own processes."""
    if config.data_parallel_size == 1:
        return LLMEngine(config)
    from quire.api.replicated import ReplicatedEngine

    return ReplicatedEngine(config)
