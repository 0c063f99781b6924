"""Sessions that are off: the same methods, doing nothing, until an engine's first session is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.errors import ValidationError
from quire.messages.request import NewRequest, Request
from quire.sessions.keeper import SessionKeeper
from quire.sessions.session_kv import ResidentSession


class NoSessionKV:
    """No session holds blocks: the methods of `SessionKV` that the scheduler calls."""

    num_on_device = 0

    def on_device(self) -> list[ResidentSession]:
        return []

    def block_refs(self) -> Counter[int]:
        return Counter()

    def tokens_for(self, request: Request) -> int:
        return 0

    def cost_of_taking(self, request: Request) -> int:
        return 0

    def take(self, request: Request) -> None: ...
    def keep(self, request: Request, tokens: int, state_at: int) -> None: ...

    def reclaim(self, count: int, but: str = "") -> int:
        return 0

    def suspend_oldest(self) -> bool:
        return False

    def forget_device(self) -> None: ...


class NoSessions:
    """There are no sessions: the methods of `SessionKeeper` that the scheduler and the loop call."""

    def __init__(self) -> None:
        self.kv = NoSessionKV()

    def begin(self, source: NewRequest) -> int:
        raise ValidationError("this engine keeps no sessions", "session", source.session)

    def end(self, request: Request, is_kept: bool) -> str | None:
        return None

    def commit(self, then: Callable[[], object], failed: Callable[[Exception], object] | None = None) -> None:
        then()

    def tick(self) -> None: ...

    def tick_idle(self) -> float | None:
        return None

    def close(self) -> None: ...


Sessions = SessionKeeper | NoSessions
