"""Items of /v1/responses and /v1/conversations as they are stored and listed: each has a type, an id and a status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.dialects.responses_chat import check_item
from quire.server.dialects.responses_writer import new_item_id
from quire.server.errors import bad_request, not_found
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.responses import ResponseItemList
from quire.server.stored.tree import StoredItem

LARGEST_PAGE = 100
DEFAULT_PAGE = 20
REFERENCE = "item_reference"

_ID = re.compile(r"[!-~]{1,128}")
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def references(items: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the stored items that an input refers to."""
    return [] if isinstance(items, str) else [str(item.get("id")) for item in items if _is_reference(item)]


def resolved(items: Sequence[dict[str, Any]], stored: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, with stored ones in place of references to them; raises 404 for one that is not stored."""
    whole = []
    for index, item in enumerate(items):
        if _is_reference(item) and str(item.get("id")) not in stored:
            raise not_found(f"there is no stored item {str(item.get('id'))[:80]!r}", f"input[{index}].id")
        whole.append(stored[str(item["id"])] if _is_reference(item) else item)
    return whole


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Clients may leave the type of a reference out."""
    return item.get("type") == REFERENCE or (item.get("type") is None and set(item) <= {"id", "type"} and "id" in item)


def stored_items(
    given: str | Sequence[dict[str, Any]], fields: FieldReader, where: str = "input"
) -> list[dict[str, Any]]:
    """An input as items to store; raises 400 for what is not an item."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_stored(item, f"{where}[{index}]", fields) for index, item in enumerate(given)]


def _stored(item: dict[str, Any], where: str, fields: FieldReader) -> dict[str, Any]:
    check_item(item, where, fields)
    kind = item.get("type") or "message"
    name = item.get("id")
    name = name if isinstance(name, str) and _ID.fullmatch(name) else new_item_id(_PREFIXES[kind])
    whole = {"status": "completed", **{field: value for field, value in item.items() if value is not None}}
    whole |= {"id": name, "type": kind}
    if kind == "message" and isinstance(text := whole["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": text}
        if whole["role"] == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        whole["content"] = [part]
    if kind == "reasoning":
        whole.setdefault("summary", [])
    return whole


# Pages


PAGE_QUERY: dict[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": DEFAULT_PAGE},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
    "include": {"type": "array", "items": {"type": "string"}},
}
"""Query parameters of every list of items; `include` changes nothing: items are always whole."""


def page(items: Sequence[StoredItem], query: Mapping[str, str]) -> ResponseItemList:
    """The page of items, given oldest first, that a query asks for."""
    given, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if not given.isdecimal() or not 1 <= int(given[:9]) <= LARGEST_PAGE:
        raise bad_request(f"limit must be 1 to {LARGEST_PAGE}, got {given[:40]!r}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {order[:40]!r}", "order")
    listed = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        found = [index for index, item in enumerate(listed) if item.id == after]
        if not found:
            raise not_found(f"there is no item {after[:80]!r} to list after", "after")
        start = found[-1] + 1  # a client may send an item back: the last one, so that paging goes on
    shown = listed[start : start + int(given)]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    has_more = start + len(shown) < len(listed)
    data: list[Any] = [item.body for item in shown]
    return ResponseItemList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)
