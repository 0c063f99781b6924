"""One turn of a conversation: from a chat request to the pieces of its answer, for every API that has chats.

    turn = await prepare(server, exchange, request)
    async with exchange.watched(server.deadline(request.timeout)):
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                ...  # piece.deltas: reasoning, content and tool calls, as `quire.output.parsers.deltas` tells them

An API of another shape turns its own request into a `ChatRequest` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from quire.output.parsers.reasoning import ThinkSplit, make_reasoning_split
from quire.output.parsers.toolcalls import ToolPlan
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.generation import Counter, GenerationJob, generate
from quire.server.http import Exchange
from quire.server.protocol.chat import ChatRequest, NamedTool
from quire.server.protocol.sampling import beam_search_params, sampling_params
from quire.server.session_turns import SessionPrompt, fall_asleep, session_turn

T = TypeVar("T")

LONG_CHAT = 4096
"""Characters: a conversation this long is rendered in a thread, and the event loop goes on."""


@dataclass
class AnswerPiece:
    """What is new of one sample."""

    index: int
    deltas: list[Delta]
    sample: CompletionOutput
    """Its new tokens and their logprobs."""
    output: RequestOutput
    finish_reason: str | None = None
    """As OpenAI tells it; set in the sample's last piece."""


class GeneratedChoice:
    """One sample's answer, being read."""

    def __init__(self, reader: AnswerReader | None, plan: ToolPlan, keeps_reasoning: bool) -> None:
        self._reader = reader
        self._plan = plan
        self._keeps_reasoning = keeps_reasoning
        self.is_over = False
        self.calls = 0
        self.reasoning_tokens = 0
        self._is_thinking = True

    def read(self, sample: CompletionOutput) -> tuple[list[Delta], str | None]:
        """What new text says, and how the sample ended if it did."""
        reason = sample.finish_reason
        self.is_over = reason is not None
        if self._reader is None:
            return [Content(sample.text)] if sample.text else [], reason
        deltas = self._reader.push(sample.text) if sample.text else []
        if reason is not None:
            deltas = deltas + self._reader.finish()
        self._count_reasoning(deltas, len(sample.token_ids))
        deltas = [delta for delta in deltas if self._keeps(delta)]
        return deltas, None if reason is None else self._plan.finish_reason(reason, self.calls)

    @property
    def seeks_calls(self) -> bool:
        """Whether the answer is read for tool calls."""
        return self._plan.is_active

    def _count_reasoning(self, deltas: list[Delta], tokens: int) -> None:
        kinds = {type(delta) for delta in deltas}
        if self._is_thinking and kinds <= {Reasoning}:
            self.reasoning_tokens += tokens
        elif kinds:
            self._is_thinking = False

    def _keeps(self, delta: Delta) -> bool:
        if isinstance(delta, Reasoning):
            return self._keeps_reasoning
        if isinstance(delta, CallStart):
            self.calls = max(self.calls, delta.index + 1 if self._plan.is_parallel else 1)
        if isinstance(delta, CallStart | CallArguments | CallEnd):
            return self._plan.is_parallel or delta.index == 0
        return True


@dataclass
class ChatGeneration:
    """A chat request, ready to be generated."""

    server: ServerContext
    exchange: Exchange
    job: GenerationJob
    choices: list[GeneratedChoice]
    splits: bool
    """Whether thinking is told from the answer."""
    is_streamed: bool = False
    counter: Counter = field(default_factory=Counter)

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """What is new, sample by sample. Where nothing is streamed, each sample comes whole."""
        async with aclosing(generate(self.server, self.exchange, [self.job])) as outputs:
            async for _, output in outputs:
                self.counter.add(0, output)
                for sample in output.outputs:
                    choice = self.choices[sample.index]
                    if choice.is_over or not (sample.token_ids or sample.finish_reason):
                        continue
                    deltas, reason = choice.read(sample)
                    if reason is not None and choice.seeks_calls:
                        self.server.seeing.metrics.on_tool_parse(self.is_streamed, choice.calls > 0, self.exchange.path)
                    if self.splits:
                        self.counter.reasoning = sum(each.reasoning_tokens for each in self.choices)
                    if reason is not None and choice.calls and self.job.turn is not None:
                        await fall_asleep(self.server, self.job.turn)
                    yield AnswerPiece(sample.index, deltas, sample, output, reason)


async def prepare(
    server: ServerContext, exchange: Exchange, request: ChatRequest, session: SessionPrompt | None = None
) -> ChatGeneration:
    """Check a chat request and turn its messages into a prompt. `session`: what it goes on with instead."""
    server.check_serving()
    server.check_model(request.model)
    request.check_fields()
    exchange.name_request(request.request_id)
    plan = await _aside(tool_plan, server, request)
    limit, field_name = request.token_limit
    logprobs = _logprobs(server, request)
    params = sampling_params(request, server.sampling_defaults, _checked_limit(server, limit), logprobs)
    text, tokens = await render(server, request) if session is None else (session.text, session.tokens)
    if params.truncate_prompt_tokens is None:
        server.check_length(len(tokens), limit, field_name)
    make_reader, split = _reading(server, plan, text)
    _constrain(request, params, plan, split, text)
    search = beam_search_params(request, limit or max(1, server.max_model_len - len(tokens)))
    if search is not None and params.structured_outputs is not None:
        raise bad_request("a tool_choice that demands calls means nothing with use_beam_search", "tool_choice")
    readers = [make_reader() for _ in range(min(params.n, server.config.max_samples))]
    if any(reader is not None and reader.needs_special_tokens for reader in readers):
        params.skip_special_tokens = False
    if split is not None and params.output_kind is RequestOutputKind.FINAL_ONLY:
        params.output_kind = RequestOutputKind.DELTA  # where thinking ends is seen token by token
    keeps_reasoning = request.include_reasoning is not False
    turn = session_turn(exchange, request, search) if session is None else session.turn
    return ChatGeneration(
        server=server,
        exchange=exchange,
        job=GenerationJob(tokens, params, text, request.priority or 0, request.cache_salt, search, turn),
        choices=[GeneratedChoice(reader, plan, keeps_reasoning) for reader in readers],
        splits=split is not None,
        is_streamed=bool(request.stream),
    )


def tool_plan(server: ServerContext, request: ChatRequest) -> ToolPlan:
    """What the request's tools mean for its answers."""
    parser = "json"
    _check_template(server, request)
    if request.tools is not None and server.offering is not None:
        parser = server.offering.parser(request.chat_template)
    choice = request.tool_choice
    return ToolPlan(
        [tool.function for tool in request.tools or ()],
        choice if isinstance(choice, str) else None,
        named=choice.function.name if isinstance(choice, NamedTool) else None,
        is_parallel=request.parallel_tool_calls is not False,
        parser=parser,
        is_auto_on=server.config.enable_auto_tool_choice,
    )


async def render(server: ServerContext, request: ChatRequest) -> tuple[str, list[int]]:
    """The conversation as text and as tokens."""
    if server.offering is None:
        raise bad_request("chat needs a tokenizer, and the server runs with --skip-tokenizer-init", "messages")
    _check_template(server, request)
    messages = [message.as_dict() for message in request.messages]
    arguments: dict[str, Any] = {
        "preamble": await _aside(preamble_of, server, request),
        "tools": rendered_tools(server, request),
        "add_generation_prompt": _default(request.add_generation_prompt, not request.continue_final_message),
        "continue_final_message": bool(request.continue_final_message),
        "chat_template": request.chat_template,
        "chat_template_kwargs": template_kwargs(server, request),
        "documents": request.documents,
    }
    length = sum(len(str(message.get("content", ""))) for message in messages)
    if length < LONG_CHAT and request.tools is None and request.chat_template is None:
        text = server.offering.render(messages, **arguments)
    else:
        text = await asyncio.to_thread(server.offering.render, messages, **arguments)
    if request.truncate_prompt_tokens is None:
        server.check_text(text)
    # The template writes the special tokens itself; the tokenizer must not add its own.
    return text, await server.tokenize(text, add_special_tokens=False)


def _check_template(server: ServerContext, request: ChatRequest) -> None:
    if request.chat_template is not None and not server.config.trust_request_chat_template:
        raise bad_request(
            "chat_template is refused: the server must be started with --trust-request-chat-template", "chat_template"
        )


async def _aside(work: Callable[[ServerContext, ChatRequest], T], server: ServerContext, request: ChatRequest) -> T:
    """In a thread where a template has to be tried that nobody has seen before: it may take its time."""
    if request.tools is None or request.chat_template is None:
        return work(server, request)
    return await asyncio.to_thread(work, server, request)


def preamble_of(server: ServerContext, request: ChatRequest) -> str | None:
    """What the model is told of tools, where its template would not."""
    if request.tools is None or server.offering is None or not server.config.enable_tool_preamble:
        return None
    return tool_plan(server, request).preamble() if server.offering.is_silent(request.chat_template) else None


def rendered_tools(server: ServerContext, request: ChatRequest) -> list[dict[str, Any]] | None:
    """Tools as chat templates are given them."""
    if request.tools is None:
        return None
    if request.tool_choice == "none" and server.config.exclude_tools_when_tool_choice_none:
        return None
    return [_without_nulls(msgspec.to_builtins(tool)) for tool in request.tools]


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {"type": tool["type"], "function": function}


def template_kwargs(server: ServerContext, request: ChatRequest) -> dict[str, Any]:
    """The template's own switches: the server's, over them the request's."""
    given: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        given["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            given["enable_thinking"] = False
    return {**(server.config.default_chat_template_kwargs or {}), **given, **(request.chat_template_kwargs or {})}


def _checked_limit(server: ServerContext, limit: int | None) -> int | None:
    return server.max_new_tokens if limit is None else limit


def _logprobs(server: ServerContext, request: ChatRequest) -> int | None:
    if not request.logprobs:
        return None
    count, most = request.top_logprobs or 0, server.llm.config.max_logprobs
    if most >= 0 and not 0 <= count <= most:
        raise bad_request(f"top_logprobs is {count}; from 0 to {most} (max_logprobs)", "top_logprobs")
    return count


def _default(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value


def _reading(server: ServerContext, plan: ToolPlan, prompt: str) -> tuple[Any, type[ThinkSplit] | None]:
    """How answers are read: what makes a reader, and the kind of split in it."""
    name = server.config.reasoning_parser
    split = None if name is None else type(make_reasoning_split(name, prompt))

    def make_reader() -> AnswerReader | None:
        if name is None and not plan.is_active:
            return None
        return AnswerReader(None if name is None else make_reasoning_split(name, prompt), plan.make_parser())

    return make_reader, split


def _constrain(
    request: ChatRequest, params: SamplingParams, plan: ToolPlan, split: type[ThinkSplit] | None, prompt: str
) -> None:
    """The form the answer must have: the request's own, or that of the calls it demands."""
    wanted = plan.constraint()
    if wanted is not None:
        if params.structured_outputs is not None:
            raise bad_request("a tool_choice that demands calls and a form of the answer exclude each other")
        params.structured_outputs = wanted
    if params.structured_outputs is not None and split is not None and split.opens(prompt):
        # The answer begins inside the thinking, which has no form.
        params.structured_outputs = msgspec.structs.replace(params.structured_outputs, after=split.closing)
