"""Asks a server's routes for operators, with errors for people."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import QuireError

KEY = "QUIRE_ADMIN_KEY"
"""Environment variable with the admin key."""
ANSWER_SECONDS = 30.0


class NoAnswerError(QuireError):
    """The server does not answer, or refused."""


def get(url: str, key: str | None, path: str, query: Mapping[str, int] | None = None) -> bytes:
    """The body of a response of the server at `url`."""
    import httpx

    from quire.cli.bench.load.client import error_message

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(base + path, headers=headers, params=dict(query or {}), timeout=ANSWER_SECONDS)
    except httpx.ConnectError as error:
        raise NoAnswerError(f"nothing answers at {url}: {error}; is the server running?") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoAnswerError(f"{url}: {error or type(error).__name__}") from error
    if answer.status_code == 404:
        raise NoAnswerError(f"{url} has no {path}: start the server with --admin-key and give that key as --api-key")
    if answer.status_code == 401:
        raise NoAnswerError(f"{url}: {path} needs the server's --admin-key: give it as --api-key or in ${KEY}")
    if answer.status_code != 200:
        raise NoAnswerError(f"{url} answered {answer.status_code}: {error_message(answer.content)}")
    return answer.content
