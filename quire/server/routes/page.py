"""/: the page, and its files. They need no key: what they show does."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.errors import not_found
from quire.server.http import Exchange
from quire.server.page.files import FOREVER, HEADERS, LONGEST_NAME, page_files
from quire.server.routing import Route


class PageSettings(msgspec.Struct):
    """What the page needs to know before a key is given."""

    version: str
    needs_key: bool
    has_admin: bool
    """Whether there is an admin key, with which everything is shown."""


async def index(context: ServerContext, exchange: Exchange) -> None:
    """The page: a chat, and what the engine does."""
    found = page_files()["index.html"]
    await exchange.reply(found.data, headers={**HEADERS, "Cache-Control": "no-cache"}, content_type=found.content_type)


async def file(context: ServerContext, exchange: Exchange) -> None:
    """A file of the page."""
    name = exchange.path_params["file"]
    found = page_files().get(name)
    if found is None:
        raise not_found(f"the page has no file {name[:LONGEST_NAME]!a}")
    await exchange.reply(found.data, headers={**HEADERS, "Cache-Control": FOREVER}, content_type=found.content_type)


async def settings(context: ServerContext, exchange: Exchange) -> None:
    """What the page needs to know before a key is given."""
    answer = PageSettings(context.version, bool(context.keys), bool(context.admin_keys))
    await exchange.reply(answer, headers={**HEADERS, "Cache-Control": "no-store"})


ROUTES = [
    Route("GET", "/", index, media_type="text/html", is_public=True),
    Route("GET", "/page/settings", settings, answer=PageSettings, is_public=True),
    Route("GET", "/page/files/{file}", file, media_type="text/plain", errors=(404,), is_public=True),
]
