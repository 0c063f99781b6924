"""`Route`: a path, its handler, its request and response types; router and OpenAPI document are built from it."""

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
ENGINE = "/v1/engine/"
PAGE = "/page/"

BODY_ERRORS = (400, 404, 408, 413, 415, 429)
GENERATION_ERRORS = (500, 503)
SESSION_ERRORS = (400, 404, 409, 410, 429, 503, 507)


@dataclass(frozen=True)
class ErrorStyle:
    """The error format of another API."""

    kind: Any
    """The struct of its body."""
    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]
    """The last event of a stream that fails."""


@dataclass(frozen=True)
class Route:
    """One method of one path. Errors that every route with a key has (401, 431) are implied."""

    method: str
    path: str
    handler: Handler
    body: Any = None
    """The struct of the request's body."""
    answer: Any = None
    """The struct of a JSON response, or a tuple of alternatives."""
    event: Any = None
    """The struct of an event, if the response can be streamed."""
    last_data: str = ""
    """The data of the last event, if it is not JSON."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """JSON schemas of the query parameters."""
    body_type: str = "application/json"
    """If not JSON, the body is bytes, and `body` is unused."""
    media_type: str = "application/json"
    is_binary: bool = False
    """Its response may also be bytes."""
    errors: tuple[int, ...] = ()
    uses_sessions: bool = False
    """It reads or writes sessions."""
    generates: bool = False
    """It sends requests to the engine."""
    is_public: bool = False
    """It needs no key."""
    is_hubs: bool = False
    """It is about the whole server, or about what only one process keeps: with several fronts, the hub answers it."""
    needs_admin: bool = False
    """It needs the admin key, as all routes under /admin do."""
    error_style: ErrorStyle | None = None
    """Its error format, if not OpenAI's."""

    @property
    def statuses(self) -> list[int]:
        """Every error status it can return."""
        statuses = {431, *self.errors}
        if self.body is not None or self.body_type != "application/json":
            statuses |= set(BODY_ERRORS)
        if self.uses_sessions:
            statuses |= set(SESSION_ERRORS)
        if self.generates:
            statuses |= set(GENERATION_ERRORS)
        if not self.is_public:
            statuses.add(401)
        return sorted(statuses)
