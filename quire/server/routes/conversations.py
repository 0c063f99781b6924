"""/v1/conversations: stored items to which responses are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire.server.context import ServerContext
from quire.server.dialects.response_items import PAGE_QUERY, page, stored_items
from quire.server.errors import bad_request, not_found
from quire.server.http import Exchange, encode
from quire.server.protocol.conversations import (
    ConversationCreateRequest,
    ConversationDeleted,
    ConversationItemsRequest,
    ConversationObject,
    ConversationUpdateRequest,
)
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.responses import ResponseItemList
from quire.server.routing import Route
from quire.sessions.log import owner_id

T = TypeVar("T")


async def _call(context: ServerContext, method: Callable[..., T], exchange: Exchange, *arguments: Any) -> T:
    """Call a method of the store for the request's tenant."""
    return await context.stored.call(method, owner_id(exchange.tenant), *arguments)


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a conversation."""
    request = await exchange.read_json(ConversationCreateRequest)
    if not context.stored.is_on:
        raise bad_request("nothing is stored here (--max-stored-responses 0): send whole conversations")
    items = await exchange.work(_read, request, exchange.fields)
    store = context.stored.store
    made = await _call(context, store.create_conversation, exchange, items, request.metadata or {})
    await exchange.reply(msgspec.convert(made, ConversationObject))


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve a conversation."""
    found = await _call(context, context.stored.store.conversation, exchange, _name(exchange))
    await exchange.reply(msgspec.convert(found, ConversationObject))


async def update(context: ServerContext, exchange: Exchange) -> None:
    """Change a conversation's metadata."""
    request = await exchange.read_json(ConversationUpdateRequest)
    store = context.stored.store
    changed = await _call(context, store.update_conversation, exchange, _name(exchange), request.metadata or {})
    await exchange.reply(msgspec.convert(changed, ConversationObject))


async def delete(context: ServerContext, exchange: Exchange) -> None:
    """Delete a conversation. Its responses stay."""
    await _call(context, context.stored.store.delete_conversation, exchange, _name(exchange))
    await exchange.reply(ConversationDeleted(id=_name(exchange)))


async def list_items(context: ServerContext, exchange: Exchange) -> None:
    """List a conversation's items by page."""
    store, query, owner = context.stored.store, exchange.query, owner_id(exchange.tenant)
    data = await context.stored.call(lambda: encode(page(store.conversation_items(owner, _name(exchange)), query)))
    await exchange.reply(data)


async def create_items(context: ServerContext, exchange: Exchange) -> None:
    """Add items to a conversation."""
    request = await exchange.read_json(ConversationItemsRequest)
    items = await exchange.work(_read, request, exchange.fields)
    await _call(context, context.stored.store.add_items, exchange, _name(exchange), items)
    ends = items[0]["id"], items[-1]["id"]
    await exchange.reply(ResponseItemList(data=items, first_id=ends[0], last_id=ends[1], has_more=False))


async def retrieve_item(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve an item of a conversation."""
    items = await _call(context, context.stored.store.conversation_items, exchange, _name(exchange))
    wanted = exchange.path_params["item_id"]
    found = next((item for item in items if item.id == wanted), None)
    if found is None:
        raise not_found(f"the conversation has no item {wanted[:80]!r}", "item_id")
    await exchange.reply(found.body)


async def delete_item(context: ServerContext, exchange: Exchange) -> None:
    """Delete an item of a conversation. Responses that have it keep it."""
    store = context.stored.store
    await _call(context, store.delete_item, exchange, _name(exchange), exchange.path_params["item_id"])
    found = await _call(context, store.conversation, exchange, _name(exchange))
    await exchange.reply(msgspec.convert(found, ConversationObject))


def _read(request: ConversationCreateRequest | ConversationItemsRequest, fields: FieldReader) -> list[dict[str, Any]]:
    request.check_fields()
    return stored_items(request.items or [], fields, "items")


def _name(exchange: Exchange) -> str:
    name: str = exchange.path_params["conversation_id"]
    return name


_ONE = "/v1/conversations/{conversation_id}"
_ITEM = f"{_ONE}/items/{{item_id}}"


def _route(method: str, path: str, handler: Any, **more: Any) -> Route:
    errors = (400, 404, 503, 507)
    return Route(method, path, handler, errors=errors, is_hubs=True, **{"answer": ConversationObject, **more})


ROUTES = [
    _route("POST", "/v1/conversations", create, body=ConversationCreateRequest),
    _route("GET", _ONE, retrieve),
    _route("POST", _ONE, update, body=ConversationUpdateRequest),
    _route("DELETE", _ONE, delete, answer=ConversationDeleted),
    _route("GET", f"{_ONE}/items", list_items, answer=ResponseItemList, query=PAGE_QUERY),
    _route("POST", f"{_ONE}/items", create_items, body=ConversationItemsRequest, answer=ResponseItemList),
    _route("GET", _ITEM, retrieve_item, answer=None),
    _route("DELETE", _ITEM, delete_item),
]
