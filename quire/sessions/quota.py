"""What one tenant's sessions may use of the store, and the refusal of what would exceed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.errors import SessionQuotaError
from quire.sessions.log.state import SessionUse, stored_bytes

FIELDS = {"sessions": "max_tenant_sessions", "tokens": "max_tenant_session_tokens", "bytes": "max_tenant_session_bytes"}
"""The setting of each bound."""


@dataclass(frozen=True)
class SessionQuota:
    """The most of each that one tenant's sessions may use; None: no bound.

    A turn that has begun is finished: its output may exceed the bounds on tokens and bytes, and the next is refused.
    """

    sessions: int | None = None
    tokens: int | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, config: EngineConfig, default: SessionQuota) -> SessionQuota:
        """The bounds of a configuration; `default`: what it leaves unset. 0 there means no bound."""
        given = {bound: getattr(config, setting) for bound, setting in FIELDS.items()}
        return cls(**{bound: getattr(default, bound) if n is None else n or None for bound, n in given.items()})

    def share(self, parts: int) -> SessionQuota:
        """An equal part of it, for one of several engines."""
        return SessionQuota(**{bound: n and -(-n // parts) for bound, n in dataclasses.asdict(self).items()})

    def check(self, use: SessionUse, sessions: int, tokens: int, meta: Mapping[str, str] | None = None) -> None:
        """Raise if a tenant that uses `use` may not add this much. What adds nothing is never refused."""
        size = stored_bytes(sessions, tokens, meta or {})
        for bound, added in (("sessions", sessions), ("tokens", tokens), ("bytes", size)):
            most, used = getattr(self, bound), getattr(use, bound)
            if most is not None and added > 0 and used + added > most:
                what = "bytes of sessions" if bound == "bytes" else bound
                raise SessionQuotaError(
                    f"the tenant's sessions use {used} of {most} {what} ({FIELDS[bound]}), and this needs {added} "
                    "more: delete sessions, or shorten them"
                )


SERVED = SessionQuota(sessions=10_000, tokens=2**27, bytes=2**30)
"""Defaults of an engine that serves many callers."""
