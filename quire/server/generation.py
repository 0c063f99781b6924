"""The path that every generating route takes: into the queue, to the engine, and back as it comes.

    async with exchange.watched(server.deadline(body.timeout)):
        async with aclosing(generate(server, exchange, jobs)) as outputs:
            async for index, output in outputs:  # of jobs[index]; deltas or everything, as its params say
                ...

Leaving the loop in any way ends the requests in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.api.async_sessions import SessionTurn as SessionTurn
from quire.api.inputs import TokensPrompt
from quire.messages.beams import BeamSearchParams
from quire.messages.outputs import RequestOutput
from quire.messages.sampling import SamplingParams
from quire.output.beams import as_request_output
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.http import Exchange
from quire.server.limits import QueueTicket
from quire.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage

_numbers = itertools.count()


@dataclass
class GenerationJob:
    """One prompt for the engine."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    search: BeamSearchParams | None = None
    """Given: a beam search, whose sequences are the samples; `params` says how they are shown."""
    turn: SessionTurn | None = None
    """The session whose turn it is."""


async def generate(
    server: ServerContext, exchange: Exchange, jobs: Sequence[GenerationJob]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What the engine yields for these jobs, each with its job's index. They are let in together or not at all."""
    _check_samples(server, jobs)
    server.check_serving()
    places = server.admission.enter_all([(job.params.n, len(job.tokens)) for job in jobs])
    streams = [_run(server, exchange, job, place) for job, place in zip(jobs, places, strict=True)]
    try:
        if len(streams) == 1:
            async with aclosing(streams[0]) as outputs:
                async for output in outputs:
                    yield 0, output
        else:
            async with aclosing(_merged(streams)) as merged:
                async for pair in merged:
                    yield pair
    finally:
        for place in places:
            place.leave()


def _check_samples(server: ServerContext, jobs: Sequence[GenerationJob]) -> None:
    most = server.config.max_samples
    for job in jobs:
        if job.params.n > most:
            raise bad_request(f"n is {job.params.n}; at most {most} (--max-samples)", "n")


async def _run(
    server: ServerContext, exchange: Exchange, job: GenerationJob, place: QueueTicket
) -> AsyncGenerator[RequestOutput, None]:
    """One job, told to whoever watches."""
    request_id = f"{exchange.id}:{next(_numbers)}"
    prompt: TokensPrompt = {"prompt_token_ids": job.tokens, "cache_salt": job.cache_salt or ""}
    if job.text is not None:
        prompt["prompt"] = job.text
    seen = server.observer.on_submit(request_id, job.params, job.tokens if job.text is None else job.text)
    asked: dict[str, Any] = {"priority": job.priority, "tenant": exchange.tenant}
    if job.search is None:
        stream = server.llm.run(prompt, job.params, request_id, **asked, turn=job.turn)
    else:
        stream = _search(server, job.search, job, prompt, request_id, **asked)
    try:
        async with aclosing(stream):
            async for output in stream:
                seen.on_output(output)
                place.start()
                if output.error is not None:
                    raise ApiError(500, f"the engine could not go on with this request: {output.error}")
                yield output
    except Exception:
        seen.on_finish("error")
        raise
    finally:
        seen.on_finish()
        place.leave()


async def _search(
    server: ServerContext,
    search: BeamSearchParams,
    job: GenerationJob,
    prompt: TokensPrompt,
    request_id: str,
    **asked: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """A beam search as one output."""
    found = await server.llm.beam_search(prompt, search, request_id, **asked)
    if not found.sequences:
        raise ApiError(500, f"the engine could not go on with this request: {found.error or 'it was aborted'}")
    yield as_request_output(found, server.vocabulary, job.params.skip_special_tokens)


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Several streams as they come. The queue is short: who reads slowly makes them wait, and outputs merge there."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=16)

    async def pump(index: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
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
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class Counter:
    """Counts tokens for `usage` while outputs come, whether they hold what is new or everything."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion = 0
        self.reasoning: int | None = None
        """Tokens of thinking; None where nobody tells them apart."""

    def add(self, index: int, output: RequestOutput) -> None:
        """New tokens. Outputs must be deltas, or come once."""
        if index not in self._prompts:
            self._prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens or 0
        for sample in output.outputs:
            self.completion += len(sample.token_ids)

    @property
    def usage(self) -> Usage:
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        usage = Usage(
            prompt_tokens=prompt,
            total_tokens=prompt + self.completion,
            completion_tokens=self.completion,
            prompt_tokens_details=PromptTokensDetails(sum(cached for _, cached in self._prompts.values())),
        )
        if self.reasoning is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self.reasoning)
        return usage
