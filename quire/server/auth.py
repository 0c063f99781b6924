"""Keys: who may ask, and under whose name."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from quire.server.errors import ApiError

TENANT_HEADERS = ("x-tenant", "x-quire-tenant")
LONGEST_TENANT = 128


class Keys:
    """The keys that open a group of routes."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests are of one length: comparing them tells nothing about a key's own.
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> str:
        """The name of the key that was shown, which says nothing about the key; raises 401 without one."""
        shown = shown_key(headers)
        if shown is None:
            raise _refused("no API key was given: send Authorization: Bearer KEY")
        digest = _digest(shown)
        found = None
        for known in self._digests:  # all of them, always: the time must not tell which
            if hmac.compare_digest(digest, known):
                found = known
        if found is None:
            raise _refused("the API key is not known here")
        return "key-" + found.hex()[:12]


def shown_key(headers: Headers) -> str | None:
    """The key of a request: a bearer token, or X-Api-Key as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


def tenant_of(headers: Headers) -> str:
    """Whom a request is for, in its own words: believed only where there are no keys."""
    for name in TENANT_HEADERS:
        if given := headers.get(name, ""):
            if len(given) > LONGEST_TENANT or not given.isprintable():
                raise ApiError(400, f"{name} must be at most {LONGEST_TENANT} printable characters", param=name)
            return given
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
