"""How every generating route reaches the engine: admission to the queue, then one `EngineRequest` per prompt.

    (request,) = admit(context, exchange, [job])
    async with request as outputs:
        async for output in outputs:
            request.on_output(output)

Leaving the block in any way ends the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType

from msgspec import UNSET

from quire.api.async_sessions import SessionTurn as SessionTurn
from quire.api.async_sessions import Turn
from quire.api.inputs import TokensPrompt
from quire.errors import SessionBusyError
from quire.messages.beams import BeamSearchParams
from quire.messages.media import EMBEDS
from quire.messages.outputs import BeamSearchOutput, RequestMetrics, RequestOutput
from quire.messages.sampling import SamplingParams
from quire.output.beams import as_request_output
from quire.server.context import ServerContext
from quire.server.errors import bad_request, engine_failure
from quire.server.http import ChunkWriter, EventStream, Exchange
from quire.server.limits import QueueTicket
from quire.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage, used_energy
from quire.server.protocol.sampling import GenerationFields, session_names
from quire.sessions.log import session_key
from quire.speculative.prediction import PredictedText
from quire.vision.processor import Prepared

SESSION_HEADER = "x-session-id"

MERGE_QUEUE = 16
"""Outputs of several prompts that wait for the reader; beyond this, outputs merge in their own streams."""
START_AT_ONCE = 8
"""Prompts of one request that are sent to the engine before others have a turn."""


@dataclass
class GenerationJob:
    """One prompt for the engine."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    search: BeamSearchParams | None = None
    """Set for a beam search: its hypotheses become the sequences, and `params` only says how they are written."""
    turn: Turn | None = None
    """Set if the job is a turn of a session."""
    prediction: list[int] = field(default_factory=list)
    """The tokens that the client expects as the output."""
    is_turn_optional: bool = False
    """The session is named by a header, which other clients send for their own ends: if a turn of it is running, this
    request is none."""
    sink: DirectEvents | None = None
    """Sends new text."""
    media: Prepared | None = None
    """The prompt's images, if it has any; `tokens` has theirs."""

    @property
    def prompt(self) -> TokensPrompt:
        """The prompt as `AsyncLLM` takes it."""
        prompt: TokensPrompt = {"prompt_token_ids": self.tokens, "cache_salt": self.cache_salt or ""}
        if self.text is not None:
            prompt["prompt"] = self.text
        if self.prediction:
            prompt["prediction"] = self.prediction
        if self.media is not None:
            prompt["prepared"] = self.media
        return prompt

    @property
    def image_tokens(self) -> int:
        """Prompt tokens that stand for images and videos."""
        if self.media is None:
            return 0
        return sum(span.length for span in self.media.spans if self.media.items[span.item].kind != EMBEDS)

    @property
    def num_images(self) -> int:
        """Images and videos of the prompt."""
        return 0 if self.media is None else sum(item.kind != EMBEDS for item in self.media.items)


class DirectEvents:
    """Writes events of new text where a step's outputs are taken, without waking the route that reads the stream: all
    streams of a step in one pass, and no task, output or struct for a token.

    The route sends the first output and the last, and what comes while its client reads slowly.
    """

    def __init__(self, chunks: ChunkWriter, encode: Callable[[str, int], Sequence[bytes]]) -> None:
        """`encode`: the events of a text and its number of tokens, as the route would send them."""
        self._chunks = chunks
        self._encode = encode
        self.is_open = False
        """Set by the route, once it has sent the first output."""

    def is_ready(self) -> bool:
        """Whether it can write now."""
        return self.is_open and self._chunks.is_ready()

    def put_text(self, text: str, tokens: int) -> None:
        """Write the events of new text."""
        if events := self._encode(text, tokens):
            self._chunks.write(events)


def send_directly(
    jobs: Sequence[GenerationJob], events: EventStream, encode: Callable[[str, int], Sequence[bytes]]
) -> None:
    """Send new text of the only job as `encode` says, unless its outputs have more than text."""
    params, job = jobs[0].params, jobs[0]
    if len(jobs) > 1 or params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        return
    if events.chunks is not None and job.turn is None and job.search is None and not job.prediction:
        job.sink = DirectEvents(events.chunks, encode)


def requested_session(
    exchange: Exchange, request: GenerationFields, search: BeamSearchParams | None = None
) -> SessionTurn | None:
    """A turn of the session that the body's `session_id` or the header names; its prompt is the whole conversation."""
    name = exchange.headers.get(SESSION_HEADER) if request.session_id is None else request.session_id
    if name is None:
        return None
    if request.session_id is None:
        exchange.client_names = {**exchange.client_names, **session_names("X-Session-Id")}
    if (request.n or 1) != 1 or search is not None:
        if request.session_id is None:
            exchange.fields.ignore("X-Session-Id")
            return None
        raise bad_request("a session's turn generates one sequence: n must be 1, without beam search", "n")
    return SessionTurn(session_key(exchange.tenant, name), rewrites=True)


class EngineRequest:
    """An admitted job: its outputs, its place in the queue, and its record in metrics, logs and traces.

    Its id in the engine is the HTTP request's id with a number appended.
    """

    def __init__(self, context: ServerContext, exchange: Exchange, job: GenerationJob, ticket: QueueTicket) -> None:
        self.ticket = ticket
        self._context = context
        self._exchange = exchange
        self._job = job

    async def __aenter__(self) -> AsyncGenerator[RequestOutput, None]:
        job, exchange = self._job, self._exchange
        self._record = self._context.observer.on_submit(
            exchange.id,
            job.params,
            job.tokens if job.text is None else job.text,
            exchange.adapters,
            job.num_images,
            job.image_tokens,
        )
        if job.search is not None:
            self._outputs = self._search(job.search)
        else:
            self._outputs = self._turn_or_not() if job.is_turn_optional else self._run()
        return self._outputs

    def _run(self) -> AsyncGenerator[RequestOutput, None]:
        job, exchange = self._job, self._exchange
        return self._context.llm.run(
            job.prompt,
            job.params,
            exchange.id,
            job.priority,
            exchange.tenant,
            job.turn,
            True,
            job.sink,
            exchange.adapters,
        )

    async def _turn_or_not(self) -> AsyncGenerator[RequestOutput, None]:
        """Run as a turn of the session, or without it if it is busy."""
        try:
            async with aclosing(self._run()) as outputs:
                async for output in outputs:
                    yield output
        except SessionBusyError:  # raised before the first output
            self._exchange.fields.ignore("X-Session-Id")
            self._job.turn = None
            async with aclosing(self._run()) as outputs:
                async for output in outputs:
                    yield output

    def on_output(self, output: RequestOutput) -> None:
        """Record an output; call it for each one. Raises 500 if the engine could not finish the request."""
        self._record.on_output(output)
        self.ticket.start()
        if output.error is not None:
            raise engine_failure(output.error)

    def open_sink(self) -> None:
        """The first output has been sent: from now on new text can be sent without the route."""
        if self._job.sink is not None:
            self._job.sink.is_open = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._outputs.aclose()
        finally:
            self._record.on_finish("error" if isinstance(error, Exception) else None)
            self.ticket.leave()
            self._job.sink = None  # a reference cycle

    async def _search(self, search: BeamSearchParams) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search; yields one output."""
        llm, job, exchange = self._context.llm, self._job, self._exchange
        stream = await llm.submit(
            job.prompt, search, exchange.id, job.priority, exchange.tenant, shares_id=True, adapters=exchange.adapters
        )
        try:
            found: BeamSearchOutput = await stream.take()
        finally:
            llm.leave(stream)
        if not found.sequences:
            raise engine_failure(found.error)
        yield as_request_output(found, self._context.vocabulary, job.params.skip_special_tokens)


def admit(context: ServerContext, exchange: Exchange, jobs: Sequence[GenerationJob]) -> list[EngineRequest]:
    """Admit jobs to the queue, all or none. Raises 429 if the queue is full, 503 if there is no engine."""
    most = context.config.max_samples
    for job in jobs:
        if job.params.n > most:
            raise bad_request(f"n is {job.params.n}; at most {most} (--max-samples)", "n")
    _check_prompt_logprobs(context, jobs)
    context.check_serving()
    tickets = context.admission.enter([(job.params.n, len(job.tokens)) for job in jobs])
    return [EngineRequest(context, exchange, job, ticket) for job, ticket in zip(jobs, tickets, strict=True)]


def _check_prompt_logprobs(context: ServerContext, jobs: Sequence[GenerationJob]) -> None:
    """Each is an object, and they arrive for thousands of tokens at once."""
    most, count = context.config.max_prompt_logprobs, 0
    for job in jobs:
        if (top := job.params.prompt_logprobs) is not None:
            count += len(job.tokens) * (1 + (context.llm.info.model.vocab_size if top < 0 else top))
    if count > most:
        raise bad_request(
            f"the prompt's tokens would have {count} logprobs; at most {most} in one response "
            "(--max-prompt-logprobs). Request fewer for each token, or score the prompt in parts",
            "prompt_logprobs",
        )


async def generate(
    context: ServerContext, exchange: Exchange, jobs: Sequence[GenerationJob]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several jobs as they come, each with its job's index."""
    requests = admit(context, exchange, jobs)
    if len(requests) == 1:
        async with requests[0] as outputs:
            async for output in outputs:
                requests[0].on_output(output)
                yield 0, output
                requests[0].open_sink()
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=MERGE_QUEUE)
    pumps: list[asyncio.Future[None]] = []
    try:
        for index, request in enumerate(requests):
            pumps.append(asyncio.ensure_future(_pump(request, index, queue)))
            if index % START_AT_ONCE == 0:
                await asyncio.sleep(0)  # there may be a thousand: other requests run in between
        left = len(pumps)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for request in requests:
            request.ticket.leave()  # a pump that was cancelled before it began did not
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    request: EngineRequest, index: int, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
) -> None:
    """Put a request's outputs into the queue, then None, or the exception that ended it."""
    try:
        async with request as outputs:
            async for output in outputs:
                request.on_output(output)
                await queue.put((index, output))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))


class UsageCounter:
    """Counts tokens for `usage`."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion = 0
        self.reasoning: int | None = None
        """Reasoning tokens; None if reasoning is not separated from the answer."""
        self.predictions: list[PredictedText] = []
        """For each sequence of a request with a prediction: the prediction, as far as the sequence has come."""
        self.image_tokens = 0
        """Prompt tokens that stand for images and videos."""
        self._metered: dict[int, RequestMetrics] = {}
        """Of jobs whose energy is metered."""

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of job `index`. Outputs must be deltas, or the only one."""
        if index not in self._prompts:
            self._prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens or 0
        if output.metrics is not None and output.metrics.energy_source is not None:
            self._metered[index] = output.metrics
        for sequence in output.outputs:
            self.completion += len(sequence.token_ids)
            if self.predictions:
                self.predictions[sequence.index].read(sequence.token_ids)

    @property
    def first_usage(self) -> Usage:
        """The prompt's tokens alone, as the first chunk of a stream reports them."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        details = None if self.reasoning is None else CompletionTokensDetails(0)
        return Usage(
            prompt_tokens=prompt,
            total_tokens=prompt,
            completion_tokens=0,
            completion_tokens_details=UNSET if details is None else details,
        )

    @property
    def usage(self) -> Usage:
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        usage = Usage(
            prompt_tokens=prompt,
            total_tokens=prompt + self.completion,
            completion_tokens=self.completion,
            prompt_tokens_details=PromptTokensDetails(
                sum(cached for _, cached in self._prompts.values()), self.image_tokens or UNSET
            ),
        )
        if self.reasoning is not None or self.predictions:
            usage.completion_tokens_details = CompletionTokensDetails(self.reasoning or 0)
        if self.predictions and usage.completion_tokens_details:
            usage.completion_tokens_details.accepted_prediction_tokens = sum(one.accepted for one in self.predictions)
            usage.completion_tokens_details.rejected_prediction_tokens = sum(one.rejected for one in self.predictions)
        if self._metered:
            usage.energy = used_energy(self._metered.values(), self.completion or prompt)
        return usage
