"""Chat generation for every API that has chats: from a chat request to the pieces of its answer.

    generation = await prepare(context, exchange, request)
    async with exchange.interruptible(context.deadline(request.timeout)):
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                ...  # piece.deltas: reasoning, content and tool calls (`quire.output.parsers.deltas`)

An API with another request format converts its request to a `ChatRequest` first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from quire.api.async_sessions import BranchTurn, Turn
from quire.api.chat_media import take_media
from quire.api.embeds_parts import take_embeds
from quire.api.text_encoding import TextEncoder
from quire.api.work_pool import check_abandoned
from quire.messages.media import EMBEDS
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from quire.output.parsers.reasoning import SWITCHES, ThinkSplit, make_reasoning_split
from quire.output.parsers.toolcalls import ToolPlan
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.generation import (
    GenerationJob,
    SessionTurn,
    UsageCounter,
    admit,
    requested_session,
    send_directly,
)
from quire.server.http import EventStream, Exchange
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.conversation import NamedTool
from quire.server.protocol.fields import asks_for_nothing
from quire.server.protocol.sampling import beam_search_params, sampling_params
from quire.speculative.prediction import MAX_PREDICTED_TOKENS, PredictedText
from quire.vision.processor import Prepared

MOST_DROPPED = 4
DROPPED_CHARACTERS = 64
"""How much of an earlier turn's end a prompt that goes on from it may lack, in tokens and in characters."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names that chat templates have for the switch between reasoning and not."""


@dataclass(slots=True)
class AnswerPiece:
    """New output of one sequence."""

    deltas: list[Delta]
    sequence: CompletionOutput
    """The new tokens and their logprobs."""
    output: RequestOutput
    finish_reason: str | None = None
    """In OpenAI's terms; set in the sequence's last piece."""


class GeneratedChoice:
    """Parses the answer of one sequence as it is generated."""

    def __init__(self, reader: AnswerReader | None, plan: ToolPlan, keeps_reasoning: bool) -> None:
        self._reader = reader
        self._plan = plan
        self._keeps_reasoning = keeps_reasoning
        self.is_finished = False
        self.calls = 0
        self.reasoning_tokens = 0
        self._is_reasoning = True

    def read(self, sequence: CompletionOutput) -> tuple[list[Delta], str | None]:
        """The deltas of new text, and the finish reason if the sequence has ended."""
        reason = sequence.finish_reason
        self.is_finished = reason is not None
        deltas = self.read_text(sequence.text, len(sequence.token_ids))
        if self._reader is None:
            return deltas, reason
        return deltas, None if reason is None else self._plan.finish_reason(reason, self.calls)

    def read_text(self, text: str, tokens: int) -> list[Delta]:
        """The deltas of new text, which has this many tokens."""
        if self._reader is None:
            return [Content(text)] if text else []
        deltas = self._reader.push(text) if text else []
        if self.is_finished:
            deltas = deltas + self._reader.finish()
        self._count_reasoning(deltas, text, tokens)
        return [delta for delta in deltas if self._keeps(delta)]

    @property
    def parses_calls(self) -> bool:
        """Whether the answer is parsed for tool calls."""
        return self._plan.is_active

    def _count_reasoning(self, deltas: list[Delta], text: str, tokens: int) -> None:
        """Count tokens whose text is reasoning. A piece with its end, which has several tokens if they were read late,
        is divided by characters."""
        kinds = {type(delta) for delta in deltas}
        if self._is_reasoning and kinds <= {Reasoning}:
            self.reasoning_tokens += tokens
        elif self._is_reasoning and kinds:
            self._is_reasoning = False
            thought = sum(len(delta.text) for delta in deltas if isinstance(delta, Reasoning))
            self.reasoning_tokens += min(tokens, round(tokens * thought / max(1, len(text))))

    def _keeps(self, delta: Delta) -> bool:
        if isinstance(delta, Reasoning):
            return self._keeps_reasoning
        if isinstance(delta, CallStart):
            self.calls = max(self.calls, delta.index + 1 if self._plan.is_parallel else 1)
        if isinstance(delta, CallStart | CallArguments | CallEnd):
            return self._plan.is_parallel or delta.index == 0
        return True


class RenderedChat(NamedTuple):
    """A conversation as a prompt."""

    text: str
    tokens: list[int]
    media: Prepared | None = None
    """Its images, if it has any."""


@dataclass
class SessionPrompt:
    """The prompt of a session's turn."""

    text: str
    tokens: list[int]
    turn: SessionTurn
    media: Prepared | None = None
    """Of a model that takes images: those of the session whose pixels are held."""


@dataclass
class Branch:
    """A prompt that goes on from an earlier turn's tokens, if its text goes on from theirs."""

    turn: BranchTurn | None = None
    """The turn of a session that it becomes; None: of none."""
    before: list[int] = field(default_factory=list)

    def continued(self, texts: TextEncoder, text: str) -> list[int] | None:
        """Tokens of the whole prompt that begin with the earlier ones; None if its text does not begin with theirs.

        Tokens that were generated are often not those that a tokenizer makes of the same text: without this, their KV
        would not be found. A few at their end may go: the end token or stop string that the template does not repeat.
        """
        for drop in range(min(MOST_DROPPED, len(self.before)) + 1):
            kept = self.before[: len(self.before) - drop]
            start = texts.decode(kept)
            if text.startswith(start):
                tokens = kept + texts.encode(text[len(start) :], "input_text", add_special_tokens=False)
                return tokens if texts.decode(tokens) == text else None
            if not text.startswith(start[:-DROPPED_CHARACTERS]):
                return None
        return None


@dataclass
class ChatGeneration:
    """A checked chat request, ready to be generated."""

    context: ServerContext
    exchange: Exchange
    job: GenerationJob
    choices: list[GeneratedChoice]
    splits_reasoning: bool
    """Whether reasoning is separated from the answer."""
    is_streamed: bool = False
    counter: UsageCounter = field(default_factory=UsageCounter)

    def send_directly(self, events: EventStream, encode: Callable[[list[Delta]], Sequence[bytes]]) -> None:
        """Where possible, send the events that `encode` makes of new deltas without making pieces of them. The first
        piece and the last are made in any case."""
        send_directly([self.job], events, lambda text, tokens: encode(self._read_text(text, tokens)))

    def _read_text(self, text: str, tokens: int) -> list[Delta]:
        (choice,) = self.choices
        self.counter.completion += tokens
        deltas = choice.read_text(text, tokens)
        if self.splits_reasoning:
            self.counter.reasoning = choice.reasoning_tokens
        return deltas

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """New output, sequence by sequence. Without streaming, each sequence comes in one piece."""
        (request,) = admit(self.context, self.exchange, [self.job])
        async with request as outputs:
            async for output in outputs:
                request.on_output(output)
                self.counter.add(0, output)
                for sequence in output.outputs:
                    choice = self.choices[sequence.index]
                    if choice.is_finished or not (sequence.token_ids or sequence.finish_reason):
                        continue
                    deltas, reason = choice.read(sequence)
                    if self.splits_reasoning:
                        self.counter.reasoning = sum(each.reasoning_tokens for each in self.choices)
                    if reason is not None:
                        await self._on_finish(choice)
                    yield AnswerPiece(deltas, sequence, output, reason)
                request.open_sink()

    async def _on_finish(self, choice: GeneratedChoice) -> None:
        if choice.parses_calls:
            self.context.metrics.on_tool_parse(self.is_streamed, choice.calls > 0, self.exchange.path)
        if choice.calls and self.job.turn is not None:
            # Until the tools' results arrive, other requests can use the session's memory.
            await self.job.turn.suspend(self.context.llm)


def is_long(request: ChatRequest) -> bool:
    """Whether rendering may take long even for a small request: a template of its own, or descriptions of tools."""
    return request.tools is not None or request.chat_template is not None


def prepare(
    context: ServerContext,
    exchange: Exchange,
    request: ChatRequest,
    session: SessionPrompt | None = None,
    is_limit_soft: bool = False,
    branch: Branch | None = None,
) -> ChatGeneration:
    """Check a chat request and render its messages to a prompt, in `Exchange.work`; `session`: the prompt, if it is a
    session's turn; `is_limit_soft`: the answer may end at the model's length, below the limit of the request;
    `branch`: what the prompt goes on from."""
    context.check_serving()
    context.check_model(exchange, request.model, request.adapters)
    request.check_fields()
    exchange.set_request_id(request.request_id)
    for index, message in enumerate(request.messages):
        message.check_parts(exchange.fields, f"messages[{index}]", lambda: _template_source(context, request))
    plan = tool_plan(context, request)
    limit, field_name = request.token_limit
    logprobs = _logprobs(context, request)
    params = sampling_params(
        request, context.sampling_defaults, context.max_new_tokens if limit is None else limit, logprobs
    )
    whole = None if session is None else RenderedChat(session.text, session.tokens, session.media)
    text, tokens, media = whole or render(context, request)
    if media is not None and session is None:
        _check_media(request, params, any(item.kind == EMBEDS for item in media.items))
    elif branch is not None and branch.before and (same := branch.continued(context.texts, text)) is not None:
        tokens = same if len(same) <= (params.truncate_prompt_tokens or len(same)) else tokens
    if request.echo and not request.stream and params.prompt_logprobs is None:
        params.prompt_logprobs = request.top_logprobs or 0
    if is_limit_soft and limit is not None and limit <= context.max_model_len:
        params.max_tokens = limit = max(1, min(limit, context.max_model_len - len(tokens)))
    if params.truncate_prompt_tokens is None:
        context.check_length(len(tokens), limit, field_name)
    make_reader, split = _reader_factory(context, plan, text)
    _constrain(request, params, plan)
    if params.structured_outputs is not None and split is not None and params.structured_outputs.after is None:
        switches = template_kwargs(context, request)
        params.structured_outputs = split.after_thinking(params.structured_outputs, text, switches)
    search = beam_search_params(request, limit or max(1, context.max_model_len - len(tokens)))
    if search is not None and params.structured_outputs is not None:
        raise bad_request("a tool_choice that requires calls is not supported with use_beam_search", "tool_choice")
    readers = [make_reader() for _ in range(min(params.n, context.config.max_samples))]
    if any(reader is not None and reader.needs_special_tokens for reader in readers):
        params.skip_special_tokens = False
    if split is not None and params.output_kind is RequestOutputKind.FINAL_ONLY:
        params.output_kind = RequestOutputKind.DELTA  # to find the token at which reasoning ends
    turn: Turn | None = branch.turn if branch is not None else None
    if turn is None:
        turn = requested_session(exchange, request, search) if session is None else session.turn
    prediction = _prediction(context, request)
    job = GenerationJob(
        tokens,
        params,
        text,
        request.priority or 0,
        request.cache_salt,
        search,
        turn,
        prediction,
        is_turn_optional=turn is not None and session is None and request.session_id is None,
        media=media,
    )
    counter = UsageCounter()
    counter.predictions = [PredictedText(prediction) for _ in readers if prediction]
    counter.image_tokens = job.image_tokens
    return ChatGeneration(
        context=context,
        exchange=exchange,
        job=job,
        choices=[GeneratedChoice(reader, plan, request.keeps_reasoning) for reader in readers],
        splits_reasoning=split is not None,
        is_streamed=bool(request.stream),
        counter=counter,
    )


def tool_plan(context: ServerContext, request: ChatRequest) -> ToolPlan:
    """How the request's tools are offered and how calls are parsed."""
    parser = "json"
    _check_template(context, request)
    if request.tools is not None and context.tool_prompts is not None:
        parser = context.tool_prompts.parser(request.chat_template)
    choice = request.tool_choice
    return ToolPlan(
        [tool.function for tool in request.tools or ()],
        choice if isinstance(choice, str) else None,
        named=choice.function.name if isinstance(choice, NamedTool) else None,
        is_parallel=request.parallel_tool_calls is not False,
        parser=parser,
        is_auto_on=context.config.enable_auto_tool_choice,
    )


def _check_media(request: ChatRequest, params: SamplingParams, has_embeds: bool) -> None:
    if has_embeds:  # they have no tokens
        for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens", "session_id"):
            if getattr(request, name, None) not in (None, False):
                raise bad_request(f"prompt_embeds cannot be combined with {name}", name)
    if params.truncate_prompt_tokens is not None:
        raise bad_request(
            "a conversation with images is not truncated: leave truncate_prompt_tokens (truncation) out",
            "truncate_prompt_tokens",
        )


def render(context: ServerContext, request: ChatRequest) -> RenderedChat:
    """The conversation as text and as token ids, with its images."""
    if context.tool_prompts is None:
        raise bad_request("chat needs a tokenizer, and the server runs with --skip-tokenizer-init", "messages")
    _check_template(context, request)
    given = [message.as_dict() for message in request.messages]
    messages, sources = take_media(given, context.llm.inputs.media.check_kind)
    messages, embeds = take_embeds(messages)
    if embeds and request.add_special_tokens:
        raise bad_request("add_special_tokens is for chats without prompt_embeds: leave it out", "add_special_tokens")
    settings = None if asks_for_nothing(request.mm_processor_kwargs) else request.mm_processor_kwargs
    if settings is not None and not context.config.trust_request_mm_kwargs:
        raise bad_request(
            "mm_processor_kwargs is refused: the server must be started with --trust-request-mm-kwargs",
            "mm_processor_kwargs",
        )
    if not isinstance(settings, dict | None):
        raise bad_request("mm_processor_kwargs must be an object", "mm_processor_kwargs")
    arguments: dict[str, Any] = {
        "preamble": preamble_of(context, request),
        "tools": rendered_tools(context, request),
        "add_generation_prompt": (
            not request.continue_final_message
            if request.add_generation_prompt is None
            else request.add_generation_prompt
        ),
        "continue_final_message": bool(request.continue_final_message),
        "chat_template": request.chat_template,
        "chat_template_kwargs": template_kwargs(context, request),
        "documents": request.documents,
    }
    text = context.tool_prompts.render(list(messages), **arguments)
    check_abandoned()
    # Templates write the special tokens themselves: the tokenizer adds its own only for a request that says so.
    adds = bool(request.add_special_tokens)
    if embeds:
        text, media = context.llm.inputs.join_embeds(
            text, embeds, bool(sources), lambda piece: context.tokenize(piece, False)
        )
        return RenderedChat(text, media.tokens, media)
    if sources:
        media = context.llm.inputs.prepare_chat(text, sources, settings, lambda whole: context.tokenize(whole, adds))
        return RenderedChat(text, media.tokens, media)
    from_start = request.truncation_side == "right"
    tokens = context.tokenize(text, adds, keep=request.truncate_prompt_tokens, from_start=from_start)
    return RenderedChat(text, tokens)


def _template_source(context: ServerContext, request: ChatRequest) -> str:
    return request.chat_template or context.llm.renderer.template()


def _check_template(context: ServerContext, request: ChatRequest) -> None:
    if request.chat_template is not None and not context.config.trust_request_chat_template:
        raise bad_request(
            "chat_template is refused: the server must be started with --trust-request-chat-template", "chat_template"
        )


def preamble_of(context: ServerContext, request: ChatRequest) -> str | None:
    """The tool description for the system message, if the chat template writes none."""
    if request.tools is None or context.tool_prompts is None or not context.config.enable_tool_preamble:
        return None
    return tool_plan(context, request).preamble() if context.tool_prompts.ignores_tools(request.chat_template) else None


def rendered_tools(context: ServerContext, request: ChatRequest) -> list[dict[str, Any]] | None:
    """Tools as chat templates expect them."""
    if request.tools is None:
        return None
    if request.tool_choice == "none" and context.config.exclude_tools_when_tool_choice_none:
        return None
    return [_without_nulls(msgspec.to_builtins(tool)) for tool in request.tools]


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {"type": tool["type"], "function": function}


def template_kwargs(context: ServerContext, request: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template: the server's defaults, overridden by the request's."""
    given: dict[str, Any] = {}
    if request.effort is not None:
        given["reasoning_effort"] = request.effort
    if request.thinks is not None:
        given |= dict.fromkeys(SWITCHES, request.thinks)
    return {**(context.config.default_chat_template_kwargs or {}), **given, **(request.chat_template_kwargs or {})}


def _prediction(context: ServerContext, request: ChatRequest) -> list[int]:
    """The tokens of the answer that the client expects; none if there are no drafts to make of them."""
    text = "" if request.prediction is None else request.prediction.text
    if not text or context.llm.config.speculative_config is None or request.use_beam_search:
        return []
    most = min(MAX_PREDICTED_TOKENS, context.max_model_len)
    return context.texts.encode_start(text, most, "prediction", add_special_tokens=False)[:most]


def _logprobs(context: ServerContext, request: ChatRequest) -> int | None:
    if not request.logprobs:
        return None
    if request.logprob_token_ids:
        return request.top_logprobs or None
    count, most = request.top_logprobs or 0, context.llm.config.max_logprobs
    if most >= 0 and not 0 <= count <= most:
        raise bad_request(f"top_logprobs is {count}; it must be from 0 to {most} (max_logprobs)", "top_logprobs")
    return count


def _reader_factory(context: ServerContext, plan: ToolPlan, prompt: str) -> tuple[Any, type[ThinkSplit] | None]:
    """(makes a parser for one answer, the class that separates its reasoning or None)."""
    name = context.reasoning_parser
    split = None if name is None else type(make_reasoning_split(name, prompt))

    def make_reader() -> AnswerReader | None:
        if name is None and not plan.is_active:
            return None
        return AnswerReader(None if name is None else make_reasoning_split(name, prompt), plan.make_parser())

    return make_reader, split


def _constrain(request: ChatRequest, params: SamplingParams, plan: ToolPlan) -> None:
    """Constrain the answer to the tool calls that the request requires, or else to its own structured output: that is
    the form of an answer in text, and a required call leaves no room for one."""
    wanted = plan.constraint()
    if wanted is not None:
        if plan.named is not None and request.structured_outputs is not None:
            raise bad_request(
                "a tool_choice that names a tool cannot be combined with structured_outputs: send one of them"
            )
        params.structured_outputs = wanted
