"""`ResponseStore`: the responses and conversations of all tenants, in one SQLite database.

With `kv_disk` it is a private file beside the sessions, and survives any end of the process: a change is synced when
its transaction ends. Otherwise it is in memory. Its methods wait for the disk, and run in a thread of its own:

    found = await store.run(store.response, owner, "resp_1")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.errors import StoreError, StoreFullError, StoreUnavailableError
from quire.kvcache.offload.disk.files import make_private, open_own, unavailable
from quire.server.errors import ApiError, bad_request, not_found
from quire.server.stored.tree import ITEM_BYTES, SCHEMA, Item, ItemTree, StoreBounds, StoredItem

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME = "responses.db"
FORMAT = 1
"""Version of the tables."""
INTERRUPTED = "the server ended before this response was finished"
FINISHED = ("completed", "incomplete")
"""Responses with one of these can be followed up."""


class StoreOverflowError(StoreError):
    """A tenant's conversation is larger than all it may have stored."""


@dataclass(frozen=True)
class StoredContext:
    """What a request goes on from: nothing, a response, or a conversation."""

    bodies: list[msgspec.Raw] = field(default_factory=list)
    node: int | None = None
    session: str = ""
    """The key of the session whose tokens these items became; empty: none."""
    salt: str = ""
    """With which other settings that session's tokens go together."""
    bytes: int = 0
    """About as many as the items have."""
    conversation: str | None = None
    model: str = ""
    """The model of the response."""

    @property
    def items(self) -> list[Item]:
        """Its items, decoded: there may be many."""
        return [msgspec.json.decode(body) for body in self.bodies]


@dataclass(frozen=True)
class StoredTurn:
    """What one request added."""

    owner: str
    context: StoredContext
    inputs: Sequence[Item]
    outputs: Sequence[Item] = ()
    response: str | None = None
    """The response's id; None: it is not stored, only the conversation's items are."""
    body: bytes = b"{}"
    """The response without its output."""
    session: str = ""
    salt: str = ""


class ResponseStore:
    """Stored responses and conversations. An owner finds only its own: others' do not exist for it."""

    def __init__(
        self,
        folder: Path | None,
        bounds: StoreBounds,
        on_drop: Callable[[str], object] = lambda key: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder`: where the file is; None: in memory. `on_drop` is called with the key of each session that nothing
        needs any more."""
        self._on_drop = on_drop
        self._db = _open(folder)
        self._tree = ItemTree(self._db, bounds, clock)
        self._thread = ThreadPoolExecutor(1, "quire-responses")
        self._dropped: list[str] = []
        self.removed = dict(self._tree.removed)
        """Responses and conversations removed so far, by reason."""
        self.total_bytes = 0
        """Of all owners."""
        self.transact(self._end_interrupted)
        self.report_dropped()

    async def run(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method in the store's thread, in one transaction: it changes everything it has to, or nothing."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.transact, method, *arguments)
        finally:
            self.report_dropped()

    def transact(self, method: Callable[..., T], *arguments: Any) -> T:
        """The same in the caller's thread."""
        try:
            if self._tree.needs_sweep:
                self._commit(self._tree.sweep)
            return self._commit(method, *arguments)
        except sqlite3.Error as error:
            logger.error("stored responses: %s", error)
            if getattr(error, "sqlite_errorcode", 0) == 13 or "full" in str(error):
                raise StoreFullError("the disk is full: nothing can be stored until there is room") from None
            raise StoreUnavailableError(f"stored responses cannot be used: {error}") from None

    def _commit(self, method: Callable[..., T], *arguments: Any) -> T:
        self._tree.dropped = []
        self._tree.removed = dict(self.removed)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            result = method(*arguments)
            size = self._tree.size("*")
        self._dropped += self._tree.dropped
        self.removed, self.total_bytes = self._tree.removed, size
        return result

    def report_dropped(self) -> None:
        """Pass on the sessions that are not needed any more."""
        while self._dropped:
            self._on_drop(self._dropped.pop())

    async def tidy(self) -> None:
        """Empty SQLite's log: what was deleted is then in no file any more."""
        with contextlib.suppress(sqlite3.Error):
            checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)"
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.execute, checkpoint)

    def close(self) -> None:
        """End the thread and close the file."""
        self._thread.shutdown(wait=True)
        self._db.close()

    def size(self, owner: str) -> int:
        """Bytes that count against the owner's bound."""
        return self._tree.size(owner)

    # Responses

    def response(self, owner: str, name: str) -> dict[str, Any]:
        """The response with its output, as clients see it."""
        node, body = self._response_node(owner, name)
        self._tree.touch("nodes", node)
        return {**msgspec.json.decode(body), "output": self._tree.output(node)}

    def response_context(self, owner: str, name: str) -> StoredContext:
        """What a follow-up of the response goes on from."""
        node, body = self._response_node(owner, name, "previous_response_id")
        found = msgspec.json.decode(body)
        status = found.get("status")
        if status not in FINISHED:
            raise bad_request(
                f"the response {name!r} is {status}: only a completed or incomplete one can be followed up",
                "previous_response_id",
            )
        self._tree.touch("nodes", node)
        bodies = [item.body for item in self._tree.context(node)]
        model = found.get("model") or ""
        return StoredContext(bodies, node, *self._tree.latest_session(node), self._tree.path_bytes(node), model=model)

    def input_items(self, owner: str, name: str) -> list[StoredItem]:
        """All items that the response was generated from, oldest first."""
        node, _ = self._response_node(owner, name)
        return self._tree.context(node, but_output_of=node)

    def delete_response(self, owner: str, name: str) -> None:
        """Delete a response. Responses that follow it keep its items in their context."""
        self._tree.forget_response(self._response_node(owner, name)[0])

    def add(self, turn: StoredTurn) -> None:
        """Store a response that is finished, and add its items to its conversation."""
        node = self._insert(turn, self._parent(turn), is_busy=False)
        self._advance(turn, node)
        if not self._tree.shrink(turn.owner, node):
            raise _overflow(self._tree.bounds)

    def begin(self, turn: StoredTurn) -> None:
        """Store a response that has yet to be generated."""
        node = self._insert(turn, self._parent(turn), is_busy=True)
        if not self._tree.shrink(turn.owner, node):
            raise _overflow(self._tree.bounds)

    def update(self, turn: StoredTurn) -> None:
        """Store how far a response stored by `begin` is, if it was not deleted."""
        changed = (turn.body, turn.owner, turn.response)
        self._db.execute("UPDATE nodes SET body = ? WHERE owner = ? AND response = ?", changed)

    def finish(self, turn: StoredTurn) -> None:
        """Store the end of a response that was stored by `begin`, if it was not deleted."""
        found = self._find_node(turn.owner, turn.response)
        if found is None:
            return
        node = found[0]
        values = (turn.body, turn.session, self._tree.clock(), len(turn.body) - len(found[1]), node)
        self._db.execute("UPDATE nodes SET body = ?, session = ?, used = ?, bytes = bytes + ? WHERE key = ?", values)
        self._tree.add_items(node, turn.owner, turn.outputs, is_output=True)
        self._advance(turn, node)
        if not self._tree.shrink(turn.owner, node):
            raise _overflow(self._tree.bounds)
        self._db.execute("UPDATE nodes SET is_busy = 0 WHERE key = ?", (node,))

    def end(self, turn: StoredTurn) -> None:
        """Store that a response stored by `begin` was cancelled or has failed, with its output if there is room."""
        found = self._find_node(turn.owner, turn.response)
        if found is None:
            return
        values = (turn.body, self._tree.clock(), len(turn.body) - len(found[1]), found[0])
        self._db.execute("UPDATE nodes SET body = ?, is_busy = 0, used = ?, bytes = bytes + ? WHERE key = ?", values)
        size = sum(ITEM_BYTES + len(msgspec.json.encode(item)) for item in turn.outputs)
        if self._tree.size(turn.owner) + size <= self._tree.bounds.bytes:
            self._tree.add_items(found[0], turn.owner, turn.outputs, is_output=True)

    def items(self, owner: str, names: Sequence[str]) -> dict[str, Item]:
        """Stored items by their ids; of several with one id, the latest."""
        found = {}
        for name in names:
            query = "SELECT body FROM items WHERE owner = ? AND id = ? ORDER BY key DESC LIMIT 1"
            if (row := self._db.execute(query, (owner, name)).fetchone()) is not None:
                found[name] = msgspec.json.decode(row[0])
        return found

    def _find_node(self, owner: str, name: str | None) -> tuple[int, bytes] | None:
        query = "SELECT key, body FROM nodes WHERE owner = ? AND response = ?"
        found: tuple[int, bytes] | None = self._db.execute(query, (owner, name)).fetchone()
        return found

    def _response_node(self, owner: str, name: str, parameter: str = "response_id") -> tuple[int, bytes]:
        if (found := self._find_node(owner, name)) is None:
            raise not_found(
                f"there is no response {name[:80]!r}: it was not stored, was deleted, or expired", parameter
            )
        return found

    def _insert(self, turn: StoredTurn, parent: int | None, *, is_busy: bool) -> int:
        return self._tree.insert(
            turn.owner, parent, turn.inputs, turn.outputs, response=turn.response, body=turn.body, is_busy=is_busy,
            session=turn.session, salt=turn.salt,
        )  # fmt: skip

    def _parent(self, turn: StoredTurn) -> int | None:
        """The node that the turn's is a child of: what was deleted since the turn began is stored again."""
        context = turn.context
        if context.conversation is not None:
            if (found := self._find_conversation(turn.owner, context.conversation)) is not None:
                head: int | None = found[1]
                return head
        elif self._tree.exists(context.node):
            return context.node
        return self._tree.insert(turn.owner, None, context.items)

    def _advance(self, turn: StoredTurn, node: int) -> None:
        """The turn's conversation goes on from this node."""
        name = turn.context.conversation
        if name is not None and (found := self._find_conversation(turn.owner, name)) is not None:
            self._move_head(found[0], found[1], node)
        else:
            self._tree.release(node)  # a response stays

    def _end_interrupted(self) -> None:
        """Responses that were being generated when the process ended have failed."""
        for key, body in self._db.execute("SELECT key, body FROM nodes WHERE is_busy").fetchall():
            failed = msgspec.json.decode(body) | {
                "status": "failed",
                "error": {"code": "server_error", "message": INTERRUPTED},
            }
            changed = (msgspec.json.encode(failed), key)
            self._db.execute("UPDATE nodes SET body = ?, is_busy = 0 WHERE key = ?", changed)

    # Conversations

    def create_conversation(self, owner: str, items: Sequence[Item], metadata: Mapping[str, str]) -> dict[str, Any]:
        """A new conversation."""
        name, now = f"conv_{uuid.uuid4().hex}", self._tree.clock()
        head = self._tree.insert(owner, None, items) if items else None
        self._db.execute(
            "INSERT INTO conversations (owner, id, created, metadata, head, used) VALUES (?, ?, ?, ?, ?, ?)",
            (owner, name, int(now), msgspec.json.encode(metadata), head, now),
        )
        if not self._tree.shrink(owner, head):
            raise _overflow(self._tree.bounds)
        return self.conversation(owner, name)

    def conversation(self, owner: str, name: str) -> dict[str, Any]:
        """The conversation, as clients see it."""
        key, _, created, metadata = self._conversation(owner, name)
        self._tree.touch("conversations", key)
        return {"id": name, "object": "conversation", "created_at": created, "metadata": msgspec.json.decode(metadata)}

    def update_conversation(self, owner: str, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Change its metadata."""
        changed = (msgspec.json.encode(metadata), self._conversation(owner, name)[0])
        self._db.execute("UPDATE conversations SET metadata = ? WHERE key = ?", changed)
        return self.conversation(owner, name)

    def delete_conversation(self, owner: str, name: str) -> None:
        """Delete a conversation. Its responses stay."""
        self._tree.forget_conversation(self._conversation(owner, name)[0])

    def conversation_context(self, owner: str, name: str) -> StoredContext:
        """What a response in the conversation goes on from."""
        key, head, _, _ = self._conversation(owner, name, "conversation")
        self._tree.touch("conversations", key)
        bodies = [item.body for item in self._visible(key, head)]
        model = self._tree.model(head)
        return StoredContext(bodies, head, *self._tree.latest_session(head), self._tree.path_bytes(head), name, model)

    def conversation_items(self, owner: str, name: str) -> list[StoredItem]:
        """Its items, oldest first."""
        key, head, _, _ = self._conversation(owner, name)
        self._tree.touch("conversations", key)
        return self._visible(key, head)

    def add_items(self, owner: str, name: str, items: Sequence[Item]) -> None:
        """Add items to a conversation."""
        key, head, _, _ = self._conversation(owner, name)
        node = self._tree.insert(owner, head, items)
        self._move_head(key, head, node)
        if not self._tree.shrink(owner, node):
            raise _overflow(self._tree.bounds)

    def delete_item(self, owner: str, name: str, item_id: str) -> None:
        """Delete an item of a conversation. A response that has it keeps it."""
        key, head, _, _ = self._conversation(owner, name)
        item = next((item.key for item in self._visible(key, head) if item.id == item_id), None)
        if item is None:
            raise not_found(f"the conversation has no item {item_id[:80]!r}", "item_id")
        (node,) = self._db.execute("SELECT node FROM items WHERE key = ?", (item,)).fetchone()
        if self._tree.is_in_a_response(node):
            self._db.execute("INSERT INTO hidden VALUES (?, ?)", (key, item))
        else:
            self._tree.remove_item(item)

    def _visible(self, key: int, head: int | None) -> list[StoredItem]:
        hidden = {item for (item,) in self._db.execute("SELECT item FROM hidden WHERE conversation = ?", (key,))}
        return [item for item in self._tree.context(head) if item.key not in hidden]

    def _move_head(self, key: int, before: int | None, node: int) -> None:
        used = self._tree.clock()
        self._db.execute("UPDATE conversations SET head = ?, used = ? WHERE key = ?", (node, used, key))
        self._tree.release(before)

    def _find_conversation(self, owner: str, name: str) -> tuple[int, int | None, int, bytes] | None:
        query = "SELECT key, head, created, metadata FROM conversations WHERE owner = ? AND id = ?"
        found: tuple[int, int | None, int, bytes] | None = self._db.execute(query, (owner, name)).fetchone()
        return found

    def _conversation(
        self, owner: str, name: str, parameter: str = "conversation_id"
    ) -> tuple[int, int | None, int, bytes]:
        if (found := self._find_conversation(owner, name)) is None:
            raise not_found(f"there is no conversation {name[:80]!r}: it was deleted, or expired", parameter)
        return found


def _overflow(bounds: StoreBounds) -> StoreOverflowError:
    return StoreOverflowError(
        f"the conversation cannot be stored: with what is being generated it is larger than the {bounds.bytes} bytes "
        "that a tenant may have stored (--max-stored-bytes)"
    )


def as_stored_error(error: StoreError) -> ApiError:
    """Why something could not be stored, as a response."""
    return ApiError(507 if isinstance(error, StoreFullError | StoreOverflowError) else 503, str(error))


# The file


def _open(folder: Path | None) -> sqlite3.Connection:
    if folder is None:
        return _prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    path = folder / FILE_NAME
    try:
        make_private(folder)
        os.close(open_own(path, create=True))  # private before SQLite opens it; its log is made with the same rights
    except OSError as error:
        raise unavailable(folder, error) from None
    try:
        return _prepared(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
    except sqlite3.OperationalError as error:
        raise StoreUnavailableError(f"{path} cannot be used: {error}") from None
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{FILE_NAME}.damaged-{int(time.time())}")
        logger.error("%s is damaged (%s): it is kept as %s, and its responses are lost", path, error, aside.name)
        for end in ("", "-wal", "-shm"):
            if Path(f"{path}{end}").exists():
                os.replace(f"{path}{end}", f"{aside}{end}")
        return _open(folder)


def _prepared(db: sqlite3.Connection) -> sqlite3.Connection:
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA secure_delete = ON")  # what a client deletes is overwritten
        db.execute("PRAGMA busy_timeout = 10000")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise StoreUnavailableError(
                f"{FILE_NAME} has format {version}, this quire writes {FORMAT}: use the quire that wrote it, or "
                "another folder"
            )
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
