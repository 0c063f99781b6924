"""`llm.sessions`: conversations by name.

s = llm.sessions.create("agent-7")
s.append("...")
out = s.generate(SamplingParams(...))
s.suspend()                              # off the device; tokens are durable since they were there
s = llm.sessions.resume("agent-7")       # later, or in another process with the same `kv_disk`
t = s.fork("agent-7b")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from quire.api.chat import ChatRenderer
from quire.api.engine import LLMEngine
from quire.api.inbox import Inbox
from quire.api.progress import Progress
from quire.api.session_input import TAIL_TOKENS, SessionInput, SessionReader, is_messages, whole_turns_only
from quire.api.session_tools import calls_tools
from quire.errors import SessionNotFoundError, ValidationError
from quire.messages.outputs import RequestOutput
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.sessions.keeper import KEEP, SessionInfo, SessionKeeper, SessionPage
from quire.sessions.log import owner_id, session_key
from quire.sessions.log.export import read_file, write_export

PAGE = 100


class Sessions:
    """The sessions of an engine; those of one tenant."""

    def __init__(
        self,
        engine: LLMEngine,
        inbox: Inbox,
        next_id: Callable[[], str],
        renderer: Callable[[], ChatRenderer],
        tenant: str = "",
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._next_id = next_id
        self._renderer = renderer
        self._tenant = tenant

    def of(self, tenant: str) -> Sessions:
        """The sessions of a tenant. Tenants do not see each other's, and may use the same names."""
        return Sessions(self._engine, self._inbox, self._next_id, self._renderer, tenant)

    def create(
        self,
        name: str,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        tools: Sequence[Any] | None = None,
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        tenant: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SessionHandle:
        """A new session, empty or beginning with a prompt or messages. `ttl`: seconds without use after which it ends.
        `tools`: what the model is told it may call, and what answers are read for."""
        if tenant is not None and tenant != self._tenant:
            return self.of(tenant).create(
                name, prompt, messages=messages, tools=tools, ttl=ttl, meta=meta,
                chat_template_kwargs=chat_template_kwargs,
            )  # fmt: skip
        if prompt is not None and messages is not None:
            raise ValidationError("a session begins with a prompt or with messages, not with both", "messages")
        key = self.key_of(name)
        begin = messages if prompt is None else prompt
        tokens: list[int] = []
        if begin is not None:
            reader = self.reader
            addition = reader.read(begin, [], tools=tools, chat_template_kwargs=chat_template_kwargs)
            reader.check_room(0, addition)
            tokens = addition.tokens
        with self._inbox.alone():
            self.keeper.create(key, tokens, salt=self._engine.inputs.salt_of(self._tenant), ttl=ttl, meta=meta)
        return SessionHandle(self, name, key, tools)

    def resume(self, name: str) -> SessionHandle:
        """A session that is there; raises if there is none, or if it is lost. Its next turn loads what it needs."""
        key = self.key_of(name)
        with self._inbox.alone():
            self.keeper.touch(key)
        return SessionHandle(self, name, key)

    def get(self, name: str) -> SessionHandle:
        """A session that is there, lost or not. It is not used by that."""
        key = self.key_of(name)
        self.info_of(key)
        return SessionHandle(self, name, key)

    def list(self, after: str | None = None, limit: int = PAGE) -> list[SessionInfo]:
        """Up to `limit` sessions in the order they were made; `after`: those made after the one of that name."""
        start = 0 if after is None else self.keeper.store.get(self.key_of(after)).id
        return self._page(start, limit).sessions

    def __iter__(self) -> Iterator[SessionInfo]:
        after: int | None = 0
        while after is not None:
            page = self._page(after, PAGE)
            yield from page.sessions
            after = page.after

    def __len__(self) -> int:
        with self._inbox.alone():
            return self.keeper.count(owner_id(self._tenant))

    def __contains__(self, name: object) -> bool:
        try:
            self.info_of(self.key_of(name))
        except (SessionNotFoundError, ValidationError):
            return False
        return True

    def delete(self, name: str) -> None:
        """End a session. Its forks stay."""
        with self._inbox.alone():
            self.keeper.delete(self.key_of(name))

    def import_(
        self, path: str | os.PathLike[str], name: str | None = None, *, ttl: float | None = None
    ) -> SessionHandle:
        """A session from a file that `export` wrote, under its own name or another."""
        with self._inbox.alone():
            info = self.keeper.import_(
                read_file(path),
                lambda own: self.key_of(own if name is None else name),
                salt=self._engine.inputs.salt_of(self._tenant),
                ttl=ttl,
            )
        return self.get(info.name)

    def _page(self, after: int, limit: int) -> SessionPage:
        with self._inbox.alone():
            return self.keeper.page(after, limit, owner_id(self._tenant))

    # What handles are made of

    def alone(self) -> AbstractContextManager[None]:
        """No other thread uses the engine meanwhile, and Ctrl-C waits."""
        return self._inbox.alone()

    def info_of(self, key: str) -> SessionInfo:
        """How a session is."""
        with self._inbox.alone():
            return self.keeper.get(key)

    @property
    def keeper(self) -> SessionKeeper:
        """Keeps them, in the engine."""
        return self._engine.sessions

    @property
    def reader(self) -> SessionReader:
        """Reads what is added to them."""
        inputs = self._engine.inputs
        return SessionReader(inputs, None if inputs.tokenizer is None else self._renderer().render_text)

    def key_of(self, name: object) -> str:
        """What a session of that name goes by in the engine."""
        return session_key(self._tenant, name)

    def begin(self, key: str, params: SamplingParams | None, kind: RequestOutputKind | None) -> str:
        """Queue a turn; returns its request's id."""
        params = self._engine.inputs.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params", params
            )
        if params.truncate_prompt_tokens is not None:
            raise whole_turns_only()
        if kind is not None:
            params = params.clone()
            params.output_kind = kind
        with self._inbox.alone():
            request_id = self._next_id()
            tokens = self.keeper.tokens(key)
            self._engine.inputs.check_room(len(tokens), "session")
            self._engine.add_request(request_id, tokens, params, tenant=self._tenant, session=key)
            self._inbox.expect(request_id, [])
        return request_id

    def outputs(self, request_id: str) -> Iterator[RequestOutput]:
        """What comes of a turn. Leaving early aborts it."""
        with self._inbox.waiting([request_id]) as outputs:
            yield None  # type: ignore[misc]
            while True:
                for output in outputs():
                    if output.finished:
                        self.keeper.store.commit()  # where a stop string ended it, nobody has waited for that yet
                    yield output  # type: ignore[misc]
                    if output.finished:
                        return

    def settle(self, key: str) -> None:
        """Make steps until all that is to be saved of a session is saved."""
        while not self.keeper.kv.is_saved(key) and self._engine.has_unfinished_requests():
            self._inbox.step()

    def text_of(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones too."""
        text: str = self._engine.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def calls_tools(self, answer: Sequence[int], tools: Sequence[Any]) -> bool:
        """Whether an answer holds tool calls, in the notation that the chat template teaches."""
        return calls_tools(answer, tools, self._renderer())


class SessionHandle:
    """One session."""

    def __init__(self, sessions: Sessions, name: str, key: str, tools: Sequence[Any] | None = None) -> None:
        self._sessions = sessions
        self._key = key
        self._tools = tools
        self.name = name

    def append(
        self,
        given: SessionInput,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """Add text, token ids or messages. They are durable when this returns, and computed with the next turn."""
        keeper, reader = self._sessions.keeper, self._sessions.reader
        with self._sessions.alone():
            tools = self._tools if tools is None and is_messages(given) else tools
            tail = keeper.tokens(self._key, -TAIL_TOKENS)
            addition = reader.read(given, tail, tools=tools, chat_template_kwargs=chat_template_kwargs)
            length = keeper.get(self._key).num_tokens
            reader.check_room(length, addition)
            info = keeper.append(self._key, addition.tokens, at=length - addition.drop if addition.drop else None)
        self._tools = tools if tools is not None else self._tools
        return info

    def generate(
        self, params: SamplingParams | None = None, *, tools: Sequence[Any] | None = None, use_tqdm: bool = False
    ) -> RequestOutput:
        """One turn: the session goes on, and what it says is part of it. After a call of one of `tools` it sleeps."""
        outputs = self._turn(params, RequestOutputKind.FINAL_ONLY, tools)
        with Progress(1, enabled=use_tqdm) as progress:
            (output,) = outputs
            progress.finished(output)
        return output

    def stream(
        self, params: SamplingParams | None = None, *, tools: Sequence[Any] | None = None
    ) -> Iterator[RequestOutput]:
        """As `generate`, as it comes. Leaving the loop early aborts the turn, and the session is as it was before."""
        return self._turn(params, None, tools)

    def _turn(
        self, params: SamplingParams | None, kind: RequestOutputKind | None, tools: Sequence[Any] | None
    ) -> Iterator[RequestOutput]:
        self._tools = tools if tools is not None else self._tools
        outputs = self._outputs(self._sessions.begin(self._key, params, kind))
        next(outputs)  # it is inside its `with` now: a stream that is dropped unread aborts its turn too
        return outputs

    def _outputs(self, request_id: str) -> Iterator[RequestOutput]:
        for output in self._sessions.outputs(request_id):
            if output is not None and output.finished:
                self._sleep_after_calls(len(output.prompt_token_ids))
            yield output

    def _sleep_after_calls(self, start: int) -> None:
        answer = self._sessions.keeper.tokens(self._key, start)
        if self._tools and answer and self._sessions.calls_tools(answer, self._tools):
            self.suspend()

    def suspend(self) -> SessionInfo:
        """Leave the device now. When this returns, all there was to save is saved, and no device block is held."""
        with self._sessions.alone():
            self._sessions.keeper.suspend(self._key)
        self._sessions.settle(self._key)
        return self.info

    def fork(self, name: str, at: int | None = None) -> SessionHandle:
        """A session with the same first tokens (all of them, unless said otherwise). They share what they can."""
        key = self._sessions.key_of(name)
        with self._sessions.alone():
            self._sessions.keeper.fork(self._key, key, at)
        return SessionHandle(self._sessions, name, key, self._tools)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file: its tokens and notes, not its KV."""
        write_export(self._sessions.keeper.export(self._key), path)

    def update(self, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None) -> SessionInfo:
        """Another time to live (None: for ever), or other notes."""
        with self._sessions.alone():
            return self._sessions.keeper.update(self._key, ttl=ttl, meta=meta)

    def recover(self) -> SessionInfo:
        """Accept what is left of a session that is lost."""
        with self._sessions.alone():
            return self._sessions.keeper.recover(self._key)

    def delete(self) -> None:
        """End the session. Its forks stay."""
        self._sessions.delete(self.name)

    @property
    def tokens(self) -> list[int]:
        """All its tokens."""
        return self._sessions.keeper.tokens(self._key)

    @property
    def text(self) -> str:
        """All its tokens as text, special ones too."""
        return self._sessions.text_of(self.tokens)

    @property
    def info(self) -> SessionInfo:
        """How it is."""
        return self._sessions.info_of(self._key)

    def __repr__(self) -> str:
        return f"SessionHandle({self.name!r})"
