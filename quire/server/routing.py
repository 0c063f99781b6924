"""`Route`: a path, what answers it, what goes in and comes out: the table and the OpenAPI document are made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.server.context import ServerContext
    from quire.server.errors import ApiError
    from quire.server.http import Exchange

Handler = Callable[["ServerContext", "Exchange"], Awaitable[None]]

ADMIN = "/admin/"

BODY_ERRORS = (400, 404, 408, 413, 415, 429)
GENERATION_ERRORS = (500, 503)
SESSION_ERRORS = (400, 404, 409, 410, 503, 507)


@dataclass(frozen=True)
class ErrorStyle:
    """How another API's clients read errors."""

    kind: Any
    """The struct of its body."""
    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]
    """The last event of a stream that fails."""


@dataclass(frozen=True)
class Route:
    """One method of one path. Errors that every guarded route has (401, 431) need no mention."""

    method: str
    path: str
    handler: Handler
    body: Any = None
    """The struct of the request's body."""
    answer: Any = None
    """The struct of the answer, where it is JSON; a tuple of those it may be."""
    event: Any = None
    """The struct of an event, where the answer can be streamed."""
    last_data: str = ""
    """What the last event holds, where that is no JSON."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of what the address may say after a question mark."""
    body_type: str = "application/json"
    """Other than JSON: bytes, and `body` says nothing."""
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    uses_sessions: bool = False
    """It reads or writes sessions."""
    generates: bool = False
    """It takes a place in the engine's queue."""
    is_open: bool = False
    """It needs no key."""
    error_style: ErrorStyle | None = None
    """How its errors look, where they are not OpenAI's."""

    @property
    def statuses(self) -> list[int]:
        """Every error status it can answer with."""
        statuses = {431, *self.errors}
        if self.body is not None or self.body_type != "application/json":
            statuses |= set(BODY_ERRORS)
        if self.uses_sessions:
            statuses |= set(SESSION_ERRORS)
        if self.generates:
            statuses |= set(GENERATION_ERRORS)
        if not self.is_open:
            statuses.add(401)
        return sorted(statuses)
