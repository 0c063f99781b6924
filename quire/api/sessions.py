"""`llm.sessions`: conversations by name.

s = llm.sessions.create("agent-7")
s.append("...")
out = s.generate(SamplingParams(...))
s.suspend()                              # frees its device blocks; its tokens are durable already
s = llm.sessions.resume("agent-7")       # later, or in another process with the same `kv_disk`
t = s.fork("agent-7b")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from quire.api.adapters import LoRAChoice
from quire.api.chat import ChatRenderer
from quire.api.engine import LLMEngine
from quire.api.inputs import check_params
from quire.api.output_queues import OutputQueues
from quire.api.progress import Progress
from quire.api.session_input import (
    TAIL_TOKENS,
    Addition,
    SessionInput,
    SessionReader,
    calls_tools,
    check_turn,
    is_messages,
)
from quire.api.session_media import SessionItems, stored_media
from quire.errors import SessionNotFoundError, ValidationError
from quire.messages.outputs import RequestOutput
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.sessions.keeper import KEEP, SessionInfo, SessionKeeper, SessionPage
from quire.sessions.log import owner_id, session_key
from quire.sessions.log.export import read_file, write_export
from quire.sessions.log.state import SessionUse

PAGE = 100


class Sessions:
    """The sessions of one tenant."""

    def __init__(
        self,
        engine: LLMEngine,
        outputs: OutputQueues,
        next_id: Callable[[], str],
        renderer: Callable[[], ChatRenderer],
        tenant: str = "",
    ) -> None:
        self._engine = engine
        self._outputs = outputs
        self._next_id = next_id
        self._renderer = renderer
        self._tenant = tenant
        self.items = SessionItems()
        """Pixels of the images of sessions."""

    def of(self, tenant: str) -> Sessions:
        """The sessions of another tenant. Tenants do not see each other's sessions, and may use the same names."""
        made = Sessions(self._engine, self._outputs, self._next_id, self._renderer, tenant)
        made.items = self.items
        return made

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
        """A new session, empty or starting with a prompt or messages. `ttl`: seconds without use after which it is
        deleted. `tools`: offered to the model; an answer that calls one suspends the session."""
        if tenant is not None and tenant != self._tenant:
            return self.of(tenant).create(
                name, prompt, messages=messages, tools=tools, ttl=ttl, meta=meta,
                chat_template_kwargs=chat_template_kwargs,
            )  # fmt: skip
        if prompt is not None and messages is not None:
            raise ValidationError("a session starts with a prompt or with messages, not with both", "messages")
        key = self.key_of(name)
        begin = messages if prompt is None else prompt
        addition = Addition(0, [])
        if begin is not None:
            reader = self.reader
            addition = reader.read(begin, [], tools=tools, chat_template_kwargs=chat_template_kwargs)
            reader.check_room(0, addition)
        salt, media = self._engine.inputs.salt_of(self._tenant), stored_media(addition.media)
        with self._outputs.exclusive():
            self.keeper.create(key, addition.tokens, salt=salt, ttl=ttl, meta=meta, media=media)
        if addition.media is not None:
            self.items.add(key, addition.media.items)
        return SessionHandle(self, name, key, tools)

    def resume(self, name: str) -> SessionHandle:
        """An existing session; raises if there is none, or if it is lost. Its next turn loads the KV it needs."""
        key = self.key_of(name)
        with self._outputs.exclusive():
            self.keeper.touch(key)
        return SessionHandle(self, name, key)

    def get(self, name: str) -> SessionHandle:
        """An existing session, lost or not. Does not count as use."""
        key = self.key_of(name)
        self.info_of(key)
        return SessionHandle(self, name, key)

    def list(self, after: str | None = None, limit: int = PAGE) -> list[SessionInfo]:
        """Up to `limit` sessions, oldest first; `after`: those created after the one with that name."""
        start = 0 if after is None else self.keeper.store.get(self.key_of(after)).id
        return self._page(start, limit).sessions

    def __iter__(self) -> Iterator[SessionInfo]:
        after: int | None = 0
        while after is not None:
            page = self._page(after, PAGE)
            yield from page.sessions
            after = page.after

    def __len__(self) -> int:
        return self.use.sessions

    @property
    def use(self) -> SessionUse:
        """How many sessions, tokens and bytes they use, of what max_tenant_sessions and its relatives allow."""
        with self._outputs.exclusive():
            return self.keeper.use(owner_id(self._tenant))

    def __contains__(self, name: object) -> bool:
        try:
            self.info_of(self.key_of(name))
        except (SessionNotFoundError, ValidationError):
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete a session. Its forks stay."""
        with self._outputs.exclusive():
            self.keeper.delete(self.key_of(name))

    def import_(
        self, path: str | os.PathLike[str], name: str | None = None, *, ttl: float | None = None
    ) -> SessionHandle:
        """A session from a file that `export` wrote, under its own name or another."""
        with self._outputs.exclusive():
            info = self.keeper.import_(
                read_file(path),
                lambda own: self.key_of(own if name is None else name),
                salt=self._engine.inputs.salt_of(self._tenant),
                ttl=ttl,
            )
        return self.get(info.name)

    def _page(self, after: int, limit: int) -> SessionPage:
        with self._outputs.exclusive():
            return self.keeper.page(after, limit, owner_id(self._tenant))

    # For handles

    def exclusive(self) -> AbstractContextManager[None]:
        """No other thread uses the engine inside, and Ctrl-C is deferred."""
        return self._outputs.exclusive()

    def info_of(self, key: str) -> SessionInfo:
        """A session's state."""
        with self._outputs.exclusive():
            return self.keeper.get(key)

    @property
    def keeper(self) -> SessionKeeper:
        """The engine's session keeper."""
        return self._engine.sessions

    @property
    def reader(self) -> SessionReader:
        """Converts input to tokens."""
        inputs = self._engine.inputs
        return SessionReader(inputs, None if inputs.tokenizer is None else self._renderer().render_text)

    def key_of(self, name: object) -> str:
        """The engine's key of the session with that name."""
        return session_key(self._tenant, name)

    def begin(
        self,
        key: str,
        params: SamplingParams | None,
        kind: RequestOutputKind | None,
        lora_request: LoRAChoice = None,
    ) -> str:
        """Queue a turn; returns its request's id."""
        params = self._engine.inputs.default_params() if params is None else params
        check_params(params, SamplingParams, "sampling_params")
        check_turn(params)
        if kind is not None:
            params = params.clone()
            params.output_kind = kind
        with self._outputs.exclusive():
            request_id = self._next_id()
            tokens = self.keeper.tokens(key)
            self._engine.inputs.check_room(len(tokens), "session")
            prompt = self._engine.inputs.session_prompt(tokens, self.items.of(key))
            self._engine.add_request(
                request_id, prompt, params, tenant=self._tenant, session=key, lora_request=lora_request
            )
            self._outputs.register(request_id, [])
        return request_id

    def outputs(self, request_id: str) -> Iterator[RequestOutput]:
        """Outputs of a turn. Leaving early aborts it."""
        with self._outputs.reading([request_id]) as take:
            yield None  # type: ignore[misc]
            while True:
                for output in take():
                    if output.finished:
                        self.keeper.store.commit()  # a turn ended by a stop string is not durable yet
                    yield output  # type: ignore[misc]
                    if output.finished:
                        return

    def wait_until_saved(self, key: str) -> None:
        """Step until the session's KV is saved."""
        while not self.keeper.kv.is_saved(key) and self._engine.has_unfinished_requests():
            self._outputs.step()

    def text_of(self, tokens: Sequence[int]) -> str:
        """Tokens as text, including special tokens."""
        text: str = self._engine.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def calls_tools(self, answer: Sequence[int], tools: Sequence[Any]) -> bool:
        """Whether an answer contains tool calls, in the format of the chat template."""
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
        """Append text, token ids or messages. They are durable when this returns, and computed with the next turn."""
        keeper, reader = self._sessions.keeper, self._sessions.reader
        with self._sessions.exclusive():
            tools = self._tools if tools is None and is_messages(given) else tools
            tail = keeper.tokens(self._key, -TAIL_TOKENS)
            addition = reader.read(given, tail, tools=tools, chat_template_kwargs=chat_template_kwargs)
            length = keeper.get(self._key).num_tokens
            reader.check_room(length, addition)
            at, media = length - addition.drop if addition.drop else None, stored_media(addition.media)
            info = keeper.append(self._key, addition.tokens, at=at, media=media)
            if addition.media is not None:
                self._sessions.items.add(self._key, addition.media.items)
        self._tools = tools if tools is not None else self._tools
        return info

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        use_tqdm: bool = False,
        lora_request: LoRAChoice = None,
    ) -> RequestOutput:
        """One turn: generate a continuation and append it. If it calls one of `tools`, the session is suspended.
        `lora_request`: the adapters of this turn."""
        outputs = self._turn(params, RequestOutputKind.FINAL_ONLY, tools, lora_request)
        with Progress(1, enabled=use_tqdm) as progress:
            (output,) = outputs
            progress.finished(output)
        return output

    def stream(
        self,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        lora_request: LoRAChoice = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, streamed. Leaving the loop early aborts the turn, and the session is as it was before."""
        return self._turn(params, None, tools, lora_request)

    def _turn(
        self,
        params: SamplingParams | None,
        kind: RequestOutputKind | None,
        tools: Sequence[Any] | None,
        lora_request: LoRAChoice,
    ) -> Iterator[RequestOutput]:
        self._tools = tools if tools is not None else self._tools
        outputs = self._outputs(self._sessions.begin(self._key, params, kind, lora_request))
        next(outputs)  # enters the `with`: a stream that is dropped unread aborts its turn too
        return outputs

    def _outputs(self, request_id: str) -> Iterator[RequestOutput]:
        for output in self._sessions.outputs(request_id):
            if output is not None and output.finished:
                self._suspend_after_calls(len(output.prompt_token_ids))
            yield output

    def _suspend_after_calls(self, start: int) -> None:
        answer = self._sessions.keeper.tokens(self._key, start)
        if self._tools and answer and self._sessions.calls_tools(answer, self._tools):
            self.suspend()

    def suspend(self) -> SessionInfo:
        """Free its device blocks. When this returns, its KV is saved."""
        with self._sessions.exclusive():
            self._sessions.keeper.suspend(self._key)
        self._sessions.wait_until_saved(self._key)
        return self.info

    def fork(self, name: str, at: int | None = None) -> SessionHandle:
        """A new session with the first `at` tokens of this one (default: all). They share cached blocks."""
        key = self._sessions.key_of(name)
        with self._sessions.exclusive():
            self._sessions.keeper.fork(self._key, key, at)
        return SessionHandle(self._sessions, name, key, self._tools)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file: its tokens and metadata, not its KV."""
        write_export(self._sessions.keeper.export(self._key), path)

    def update(self, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None) -> SessionInfo:
        """Change the time to live (None: no limit), or the metadata."""
        with self._sessions.exclusive():
            return self._sessions.keeper.update(self._key, ttl=ttl, meta=meta)

    def recover(self) -> SessionInfo:
        """Keep what is left of a lost session."""
        with self._sessions.exclusive():
            return self._sessions.keeper.recover(self._key)

    def delete(self) -> None:
        """Delete the session. Its forks stay."""
        self._sessions.delete(self.name)

    @property
    def tokens(self) -> list[int]:
        """All its tokens."""
        return self._sessions.keeper.tokens(self._key)

    @property
    def text(self) -> str:
        """All its tokens as text, including special tokens."""
        return self._sessions.text_of(self.tokens)

    @property
    def info(self) -> SessionInfo:
        """Its state."""
        return self._sessions.info_of(self._key)

    def __repr__(self) -> str:
        return f"SessionHandle({self.name!r})"
