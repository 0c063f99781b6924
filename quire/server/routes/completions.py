"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from quire.api.work_pool import check_abandoned
from quire.messages.beams import BeamSearchParams
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.messages.sampling import SamplingParams
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.generation import GenerationJob, UsageCounter, generate, requested_session, send_directly
from quire.server.http import EventStream, EventTemplate, Exchange, encode, event_bytes
from quire.server.logprobs import Position, completion_logprobs, prompt_logprobs, takes_long
from quire.server.protocol.common import Usage, has_many_prompts, request_timings
from quire.server.protocol.completions import (
    MAX_TOKENS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.server.protocol.sampling import beam_search_params, sampling_params
from quire.server.routing import Route


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create completions of one or more prompts, streamed or not."""
    request = await exchange.read_json(CompletionRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        is_long = bool(request.embeds) or has_many_prompts(request.prompt)
        jobs = await exchange.work(prepare, context, exchange, request, is_long=is_long)
        answer = CompletionAnswer(context, exchange, request, jobs)
        await (answer.stream() if request.stream else answer.send())


def prepare(context: ServerContext, exchange: Exchange, request: CompletionRequest) -> list[GenerationJob]:
    """A job for each prompt."""
    context.check_serving()
    context.check_model(exchange, request.model, request.adapters)
    request.check_fields()
    exchange.set_request_id(request.request_id)
    prompts, embeds = request.prompts, request.embeds
    _check_prompt_count(context, len(prompts) + len(embeds), request.n or 1)
    limit = MAX_TOKENS if request.max_tokens is None else request.max_tokens
    # Scoring a prompt still takes a step: its token is generated and left out of the response.
    params = sampling_params(request, context.sampling_defaults, max(1, limit), request.logprobs)
    search = beam_search_params(request, max(1, limit))
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = request.logprobs
    turn = None if embeds else requested_session(exchange, request, search)
    if turn is not None and (len(prompts) > 1 or request.max_tokens == 0):
        raise bad_request("a session's turn has one prompt and generates at least one token", "session_id")
    if request.suffix:
        if not context.llm.inputs.fill_in_middle.is_supported:
            raise bad_request(context.llm.inputs.fill_in_middle.refusal(context.names[0]), "suffix")
        context.llm.inputs.end_middle(params)
    jobs = [_embeds_job(context, request, given, limit, params, search) for given in embeds]
    from_start = request.truncation_side == "right"
    for prompt in prompts:
        check_abandoned()
        text = prompt if isinstance(prompt, str) else None
        if request.suffix:
            text, tokens = _fill_in_middle(context, request, prompt)
        elif isinstance(prompt, str):
            adds = request.add_special_tokens is not False
            tokens = context.tokenize(prompt, adds, params.truncate_prompt_tokens, from_start=from_start)
        else:
            keep = params.truncate_prompt_tokens or 0
            tokens = prompt[:keep] if from_start and keep > 0 else prompt
        if params.truncate_prompt_tokens is None:
            context.check_length(len(tokens), limit)
        job = GenerationJob(tokens, params, text, request.priority or 0, request.cache_salt, search, turn)
        job.is_turn_optional = turn is not None and request.session_id is None
        jobs.append(job)
    return jobs


def _embeds_job(
    context: ServerContext,
    request: CompletionRequest,
    given: str,
    limit: int,
    params: SamplingParams,
    search: BeamSearchParams | None,
) -> GenerationJob:
    """The job of a prompt that is given as embeddings."""
    check_abandoned()
    prepared = context.llm.inputs.sent_embeds(given)
    context.check_length(len(prepared.tokens), limit)
    job = GenerationJob(prepared.tokens, params, None, request.priority or 0, request.cache_salt, search)
    job.media = prepared
    return job


def _fill_in_middle(
    context: ServerContext, request: CompletionRequest, prompt: str | list[int]
) -> tuple[str, list[int]]:
    """The text before the middle, and the tokens of the whole prompt."""
    keep = request.truncate_prompt_tokens
    keep = context.max_model_len - 1 if keep is not None and keep < 0 else keep
    if isinstance(prompt, str):
        text, prefix = prompt, context.tokenize(prompt, False, keep)
    else:
        text, prefix = "" if context.tokenizer is None else context.texts.decode(prompt), prompt
    tokens = context.llm.inputs.fill_in_middle.prompt(
        prefix,
        request.suffix or "",
        lambda part: context.tokenize(part, False, field="suffix"),
        keep,
        request.add_special_tokens is not False,
    )
    return text, tokens


def _check_prompt_count(context: ServerContext, prompts: int, sequences: int) -> None:
    """Check prompts times n: each limit alone would allow a hundred thousand sequences."""
    most = context.config.max_prompts
    if prompts > most:
        raise bad_request(f"prompt holds {prompts}; at most {most} (--max-prompts)", "prompt")
    if prompts > 1 and prompts * sequences > most:
        raise bad_request(
            f"prompt holds {prompts}, with n={sequences} that makes {prompts * sequences} sequences; at most {most} "
            "(--max-prompts)",
            "n",
        )


@dataclass
class _Progress:
    """How much of one choice has been sent."""

    is_finished: bool = False
    offset: int = 0
    """Characters so far, for `text_offset` of logprobs."""
    is_started: bool = False


class CompletionAnswer:
    """Sends outputs as OpenAI's completions. Choice i of prompt p has the index p * n + i."""

    def __init__(
        self, context: ServerContext, exchange: Exchange, request: CompletionRequest, jobs: list[GenerationJob]
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._request = request
        self._jobs = jobs
        self._id = f"cmpl-{exchange.id}"
        self._created = int(time.time())
        self._model = request.model or context.names[0]
        self._n = jobs[0].params.n
        self._only_echo = request.max_tokens == 0
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._top = -1 if request.logprob_token_ids else request.logprobs or 0
        self._wants_timings = bool(request.return_metrics) or context.config.enable_per_request_metrics
        self._counter = UsageCounter()
        self._progress = [_Progress() for _ in range(len(jobs) * self._n)]

    async def send(self) -> None:
        """Send the whole response."""
        outputs: list[RequestOutput | None] = [None] * len(self._jobs)
        async with aclosing(generate(self._context, self._exchange, self._jobs)) as coming:
            async for index, output in coming:
                outputs[index] = output
        whole = [output for output in outputs if output is not None]
        await self._exchange.reply(await self._exchange.call(self._has_many_details(whole), self._whole, whole))

    def _has_many_details(self, outputs: Sequence[RequestOutput]) -> bool:
        """Whether logprobs, or the text of a long prompt, take long to write."""
        request = self._request
        tops = [top for top in (request.logprobs, request.prompt_logprobs) if top is not None]
        tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        if tops or request.echo:
            tokens += sum(len(output.prompt_token_ids) for output in outputs)
        return -1 in tops or takes_long(tokens, max(tops, default=0 if request.echo else None))

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The encoded response."""
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output)
            choices += [self._choice(index, output, sequence) for sequence in output.outputs]
        response = self._response(choices)
        response.usage = self._context.shown(self._counter.usage, is_whole=True)
        response.service_tier = response.system_fingerprint = response.kv_transfer_params = None
        if self._wants_timings:
            timings = [request_timings(output) for output in outputs]
            response.metrics = timings[0] if len(timings) == 1 else timings
        return encode(response)

    async def stream(self) -> None:
        """Send events: new output of each choice, usage."""
        request = self._request
        forced = self._context.config.enable_force_include_usage
        continuous = request.continuous_usage or forced
        events = self._exchange.events()
        if not (continuous or self._only_echo or request.return_token_ids):
            self._send_directly(events)
        ends: dict[int, RequestOutput] = {}
        async with aclosing(generate(self._context, self._exchange, self._jobs)) as coming:
            async for index, output in coming:
                self._count(index, output)
                ends[index] = output
                for sequence in output.outputs:
                    progress = self._progress[index * self._n + sequence.index]
                    if progress.is_finished or not (sequence.token_ids or sequence.finish_reason):
                        continue
                    progress.is_finished = sequence.finish_reason is not None
                    # All that was generated while a client did not read comes at once.
                    is_long = takes_long(len(sequence.token_ids) * self._n, request.logprobs)
                    if not progress.is_started and (request.echo or request.prompt_logprobs is not None):
                        is_long = self._has_many_details([output])
                    usage = self._context.shown(self._counter.usage) if continuous else None
                    await events.send_bytes(
                        await self._exchange.call(is_long, self._event, index, output, sequence, usage)
                    )
        if request.include_usage or forced or self._wants_timings:
            closing = self._response([])
            if request.include_usage or forced:
                closing.usage = self._context.shown(self._counter.usage)
            if self._wants_timings:
                timings = [request_timings(ends[index]) for index in sorted(ends)]
                closing.metrics = timings[0] if len(timings) == 1 else timings
            await events.send(closing)
        await events.close()

    def _send_directly(self, events: EventStream) -> None:
        """Where possible, send events of new text without making outputs and choices of it."""
        choice = CompletionChoice(0, EventTemplate.TEXT, None, None, None)
        fill = EventTemplate(self._response([choice])).fill

        def encoded(text: str, tokens: int) -> list[bytes]:
            self._counter.completion += tokens
            return [fill(text)]

        send_directly(self._jobs, events, encoded)

    def _event(self, index: int, output: RequestOutput, sequence: CompletionOutput, usage: Usage | None) -> bytes:
        """New output of a choice as an encoded event."""
        chunk = self._response([self._choice(index, output, sequence)])
        if usage is not None:
            chunk.usage = usage
        return event_bytes(chunk)

    def _count(self, index: int, output: RequestOutput) -> None:
        self._counter.add(index, output)
        if self._only_echo:
            self._counter.completion = 0

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(self._id, "text_completion", self._created, self._model, choices)

    def _choice(self, index: int, output: RequestOutput, sequence: CompletionOutput) -> CompletionChoice:
        """A choice, or its new output; the first time with what was requested about its prompt."""
        request = self._request
        number = index * self._n + sequence.index
        progress = self._progress[number]
        is_first, progress.is_started = not progress.is_started, True
        prompt = self._prompt_text(index, output.prompt_token_ids) if request.echo and is_first else ""
        choice = CompletionChoice(
            index=number,
            text=prompt if self._only_echo else prompt + sequence.text,
            logprobs=None,
            finish_reason="length" if self._only_echo and sequence.finish_reason else sequence.finish_reason,
            stop_reason=None if self._only_echo else sequence.stop_reason,
        )
        if not request.stream:
            choice.token_ids = choice.prompt_token_ids = choice.prompt_logprobs = None
        if request.logprobs is not None:
            choice.logprobs = self._logprobs(progress, output, sequence, is_first)
        if request.return_token_ids:
            choice.token_ids = [] if self._only_echo else list(sequence.token_ids)
            choice.prompt_token_ids = output.prompt_token_ids if is_first else UNSET
        if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(
        self, progress: _Progress, output: RequestOutput, sequence: CompletionOutput, is_first: bool
    ) -> CompletionLogprobs:
        tokens: list[int] = []
        positions: list[Position | None] = []
        if self._request.echo and is_first:
            tokens += output.prompt_token_ids
            positions += output.prompt_logprobs or [None] * len(tokens)
        if not self._only_echo:
            tokens += sequence.token_ids
            positions += sequence.logprobs or []
        columns = completion_logprobs(tokens, positions, self._top, self._as_ids, progress.offset)
        if self._request.echo and is_first and columns.tokens and not self._as_ids:
            self._name_first(columns, tokens[0])
        if columns.tokens:
            progress.offset = columns.text_offset[-1] + len(columns.tokens[-1])
        return columns

    def _name_first(self, columns: CompletionLogprobs, token: int) -> None:
        """The first token of a prompt has no logprob, so its text comes from the tokenizer."""
        if self._context.tokenizer is not None:
            name = self._context.tokenizer.decode([token])
            columns.tokens[0] = name
            columns.text_offset[1:] = [offset + len(name) for offset in columns.text_offset[1:]]

    def _prompt_text(self, index: int, tokens: list[int]) -> str:
        """The prompt's text, of the remaining tokens if it was truncated."""
        job = self._jobs[index]
        if job.text is None or len(tokens) < len(job.tokens):
            job.text = "" if self._context.tokenizer is None else self._context.texts.decode(tokens)
        return job.text


ROUTES = [
    Route(
        "POST",
        "/v1/completions",
        create,
        body=CompletionRequest,
        answer=CompletionResponse,
        event=CompletionResponse,
        last_data="[DONE]",
        uses_sessions=True,
        generates=True,
    )
]
