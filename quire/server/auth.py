"""API keys and tenants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from quire.server.errors import ApiError

TENANT_HEADERS = ("x-tenant", "x-quire-tenant")
LONGEST_TENANT = 128


class ApiKeys:
    """The keys that give access to a group of routes."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so comparing them reveals nothing about a key's length.
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> str:
        """A name for the request's key that does not reveal it; raises 401 without a valid key."""
        given = request_key(headers)
        if given is None:
            raise _unauthorized("the request has no API key: send Authorization: Bearer KEY")
        digest = _digest(given)
        found = None
        for known in self._digests:  # always all of them: the time must not reveal which one matched
            if hmac.compare_digest(digest, known):
                found = known
        if found is None:
            raise _unauthorized("the API key is not valid")
        return "key-" + found.hex()[:12]


def request_key(headers: Headers) -> str | None:
    """The key of a request: a bearer token, or X-Api-Key as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise 403 for a request that a page of another origin makes. Browsers say so in headers that pages cannot set;
    other clients send none of them."""
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
    if origin in allowed or (origin and "*" in allowed):
        return
    hosts = {headers.get("host", ""), headers.get("x-forwarded-host", "")} - {""}
    is_foreign = bool(origin) and origin.partition("://")[2] not in hosts
    if site in ("cross-site", "same-site") or (is_foreign and site != "same-origin"):
        raise ApiError(403, "pages of other origins may not read this (--allowed-origins lists those that may)")


def tenant_of(headers: Headers) -> str:
    """The tenant that the headers name; used only if the server has no keys."""
    for name in TENANT_HEADERS:
        if given := headers.get(name, ""):
            if len(given) > LONGEST_TENANT or not given.isprintable():
                raise ApiError(400, f"{name} must be at most {LONGEST_TENANT} printable characters", param=name)
            return given
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
