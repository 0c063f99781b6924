"""/v1/conversations."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.server.protocol.common import Body, check_conversation
from quire.server.protocol.responses import ResponseInputItem
from quire.server.protocol.values import NOT_EMPTY, Metadata


class ConversationCreateRequest(Body):
    """The body of POST /v1/conversations."""

    items: list[ResponseInputItem] | None = None
    """Its first items."""
    metadata: Metadata | None = None

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        check_conversation("items", self.items)


class ConversationUpdateRequest(Body, kw_only=True):
    """The body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class ConversationItemsRequest(Body, kw_only=True):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[ResponseInputItem], NOT_EMPTY]

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        check_conversation("items", self.items)


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True
