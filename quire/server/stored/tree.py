"""Items of conversations, in a tree of nodes.

A node has the items that one request added, and what was answered. Its context is the items of all nodes from the root
to it, so two follow-ups of one response are two children of its node, and what they have in common is stored once.

    nodes          response: its id, if a client can still refer to it; body: the response without its output
    items          in order; those of the output come last
    conversations  head: the node with its latest items
    hidden         items deleted from a conversation that a response still has
    sizes          bytes of each owner's nodes, and of all ("*")

A node stays while it has a response, is a conversation's head, or has children. So deleting a response in the middle of
a conversation leaves its items to the responses that follow it, and they go with the last of these.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

Item = dict[str, Any]

NODE_BYTES = 512
"""What a node costs besides its texts…"""
ITEM_BYTES = 128
"""…and an item."""
TOTAL_SHARES = 16
"""All tenants together may use so many times what one may: a client without a key can name any tenant."""
TOUCH_SECONDS = 60.0
"""A use is noted at most this often."""
SWEEP_SECONDS = 1.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    key INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, parent INTEGER, response TEXT, body BLOB NOT NULL,
    is_busy INTEGER NOT NULL, session TEXT NOT NULL, salt TEXT NOT NULL, used REAL NOT NULL, bytes INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS nodes_by_response ON nodes (owner, response) WHERE response IS NOT NULL;
CREATE INDEX IF NOT EXISTS nodes_by_parent ON nodes (parent);
CREATE INDEX IF NOT EXISTS responses_by_owner ON nodes (owner, used) WHERE response IS NOT NULL;
CREATE INDEX IF NOT EXISTS responses_by_use ON nodes (used) WHERE response IS NOT NULL;
CREATE INDEX IF NOT EXISTS busy_nodes ON nodes (key) WHERE is_busy;
CREATE TABLE IF NOT EXISTS sizes (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS node_added AFTER INSERT ON nodes BEGIN
    INSERT INTO sizes VALUES (new.owner, new.bytes), ('*', new.bytes)
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS node_changed AFTER UPDATE OF bytes ON nodes BEGIN
    UPDATE sizes SET bytes = bytes + new.bytes - old.bytes WHERE owner IN (new.owner, '*');
END;
CREATE TRIGGER IF NOT EXISTS node_removed AFTER DELETE ON nodes BEGIN
    UPDATE sizes SET bytes = bytes - old.bytes WHERE owner IN (old.owner, '*');
    DELETE FROM sizes WHERE owner = old.owner AND bytes = 0;
END;
CREATE TABLE IF NOT EXISTS items (
    key INTEGER PRIMARY KEY, node INTEGER NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL, is_output INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_by_node ON items (node);
CREATE INDEX IF NOT EXISTS items_by_id ON items (owner, id);
CREATE TABLE IF NOT EXISTS conversations (
    key INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, created INTEGER NOT NULL,
    metadata BLOB NOT NULL, head INTEGER, used REAL NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS conversations_by_head ON conversations (head);
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used);
CREATE INDEX IF NOT EXISTS conversations_by_owner ON conversations (owner, used);
CREATE TABLE IF NOT EXISTS hidden (
    conversation INTEGER NOT NULL, item INTEGER NOT NULL, PRIMARY KEY (conversation, item)
) WITHOUT ROWID;
"""

_PATH = """
WITH RECURSIVE path (key, parent, depth) AS (
    SELECT key, parent, 0 FROM nodes WHERE key = ?
    UNION ALL SELECT nodes.key, nodes.parent, depth + 1 FROM nodes JOIN path ON nodes.key = path.parent
)
"""
"""The nodes from this one up to its root."""
_BELOW = """
WITH RECURSIVE below (key) AS (
    SELECT ? UNION ALL SELECT nodes.key FROM nodes JOIN below ON nodes.parent = below.key
)
"""
"""This node and all that descend from it."""
_IS_LEAF = """
    NOT EXISTS (SELECT 1 FROM nodes AS child WHERE child.parent = nodes.key)
    AND NOT EXISTS (SELECT 1 FROM conversations WHERE head = nodes.key)
"""


@dataclass(frozen=True)
class StoreBounds:
    """What one tenant may have stored, and for how long."""

    responses: int
    """And as many conversations."""
    bytes: int
    ttl: float
    """Seconds since the last use."""


class StoredItem(NamedTuple):
    """An item as it is read: encoded, since a context may have many."""

    key: int
    id: str
    body: msgspec.Raw


class ItemTree:
    """All nodes of a database. Every change belongs to the transaction of its caller."""

    def __init__(self, db: sqlite3.Connection, bounds: StoreBounds, clock: Callable[[], float]) -> None:
        self.db = db
        self.bounds = bounds
        self.clock = clock
        self.dropped: list[str] = []
        """Keys of sessions that nothing refers to any more."""
        self.removed = {"size": 0, "age": 0}
        """Responses and conversations that were removed because of a bound, and those that expired."""
        self._swept = 0.0

    # Nodes

    def insert(
        self,
        owner: str,
        parent: int | None,
        inputs: Sequence[Item],
        outputs: Sequence[Item] = (),
        *,
        response: str | None = None,
        body: bytes = b"{}",
        is_busy: bool = False,
        session: str = "",
        salt: str = "",
    ) -> int:
        """A new node; its key."""
        cursor = self.db.execute(
            "INSERT INTO nodes (owner, parent, response, body, is_busy, session, salt, used, bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (owner, parent, response, body, is_busy, session, salt, self.clock(), NODE_BYTES + len(body)),
        )
        assert cursor.lastrowid is not None
        self.add_items(cursor.lastrowid, owner, inputs)
        self.add_items(cursor.lastrowid, owner, outputs, is_output=True)
        return cursor.lastrowid

    def add_items(self, node: int, owner: str, items: Sequence[Item], *, is_output: bool = False) -> None:
        """Add items to a node."""
        rows = [(node, owner, item["id"], is_output, msgspec.json.encode(item)) for item in items]
        self.db.executemany("INSERT INTO items (node, owner, id, is_output, body) VALUES (?, ?, ?, ?, ?)", rows)
        size = sum(ITEM_BYTES + len(row[4]) for row in rows)
        self.db.execute("UPDATE nodes SET bytes = bytes + ? WHERE key = ?", (size, node))

    def exists(self, node: int | None) -> bool:
        """Whether the node is still there; None, the beginning of every conversation, always is."""
        return node is None or self.db.execute("SELECT 1 FROM nodes WHERE key = ?", (node,)).fetchone() is not None

    def context(self, node: int | None, *, but_output_of: int | None = None) -> list[StoredItem]:
        """Every item from the root to a node; without the output of the node `but_output_of`."""
        rows = self.db.execute(
            _PATH + "SELECT items.key, id, body FROM path JOIN items ON items.node = path.key "
            "WHERE NOT (is_output AND path.key = ?) ORDER BY depth DESC, items.key",
            (node, -1 if but_output_of is None else but_output_of),
        )
        return [StoredItem(key, name, msgspec.Raw(body)) for key, name, body in rows]

    def output(self, node: int) -> list[msgspec.Raw]:
        """The items that were generated."""
        rows = self.db.execute("SELECT body FROM items WHERE node = ? AND is_output ORDER BY key", (node,))
        return [msgspec.Raw(body) for (body,) in rows]

    def latest_session(self, node: int | None) -> tuple[str, str]:
        """The session, and the salt, of the nearest node up the tree that has one; empty if none has."""
        found = self.db.execute(
            _PATH + "SELECT session, salt FROM path JOIN nodes USING (key) WHERE session != '' ORDER BY depth LIMIT 1",
            (node,),
        ).fetchone()
        return ("", "") if found is None else found

    def model(self, node: int | None) -> str:
        """The model of the nearest response up the tree; empty if there is none."""
        rows = self.db.execute(_PATH + "SELECT body FROM path JOIN nodes USING (key) ORDER BY depth", (node,))
        return next((model for (body,) in rows if body and (model := msgspec.json.decode(body).get("model"))), "")

    def path_bytes(self, node: int | None) -> int:
        """Bytes of all nodes from the root to a node."""
        row = self.db.execute(_PATH + "SELECT sum(bytes) FROM path JOIN nodes USING (key)", (node,)).fetchone()
        return row[0] or 0

    def is_in_a_response(self, node: int) -> bool:
        """Whether a response that can be retrieved has this node's items in its context."""
        query = _BELOW + "SELECT 1 FROM below JOIN nodes USING (key) WHERE response IS NOT NULL LIMIT 1"
        return self.db.execute(query, (node,)).fetchone() is not None

    def touch(self, table: str, key: int) -> None:
        """Note that a node or a conversation was used."""
        now = self.clock()
        self.db.execute(f"UPDATE {table} SET used = ? WHERE key = ? AND used < ?", (now, key, now - TOUCH_SECONDS))

    # Removal

    def remove_item(self, item: int) -> None:
        """Remove an item from its node."""
        node, size = self.db.execute("SELECT node, length(body) FROM items WHERE key = ?", (item,)).fetchone()
        self.db.execute("DELETE FROM items WHERE key = ?", (item,))
        self.db.execute("UPDATE nodes SET bytes = bytes - ? WHERE key = ?", (ITEM_BYTES + size, node))

    def forget_response(self, node: int) -> None:
        """The response can no longer be retrieved or followed up."""
        self.db.execute(
            "UPDATE nodes SET response = NULL, body = x'', is_busy = 0, bytes = bytes - length(body) WHERE key = ?",
            (node,),
        )
        self.release(node)

    def forget_conversation(self, key: int) -> None:
        """The conversation is deleted."""
        (head,) = self.db.execute("SELECT head FROM conversations WHERE key = ?", (key,)).fetchone()
        self.db.execute("DELETE FROM hidden WHERE conversation = ?", (key,))
        self.db.execute("DELETE FROM conversations WHERE key = ?", (key,))
        self.release(head)

    def release(self, node: int | None) -> None:
        """Something that referred to the node no longer does: remove it, and nodes above it, if nothing else does."""
        while node is not None:
            found = self.db.execute(
                f"SELECT parent, session, response IS NOT NULL, ({_IS_LEAF}), "
                "EXISTS (SELECT 1 FROM conversations WHERE head = nodes.key) FROM nodes WHERE key = ?",
                (node,),
            ).fetchone()
            if found is None:
                return
            parent, session, has_response, is_leaf, is_head = found
            if session and not (has_response or is_head):
                self.dropped.append(session)
                self.db.execute("UPDATE nodes SET session = '' WHERE key = ?", (node,))
            if has_response or not is_leaf:
                return
            self.db.execute("DELETE FROM items WHERE node = ?", (node,))
            self.db.execute("DELETE FROM nodes WHERE key = ?", (node,))
            node = parent

    # Bounds

    @property
    def needs_sweep(self) -> bool:
        """Whether the last one was some time ago."""
        return self.clock() - self._swept >= SWEEP_SECONDS

    def sweep(self) -> None:
        """Remove what was not used for as long as `ttl`."""
        self._swept = self.clock()
        oldest = self._swept - self.bounds.ttl
        conversations = self.db.execute("SELECT key FROM conversations WHERE used < ?", (oldest,)).fetchall()
        for (key,) in conversations:
            self.forget_conversation(key)
        expired = "SELECT key FROM nodes WHERE used < ? AND response IS NOT NULL AND NOT is_busy"
        responses = self.db.execute(expired, (oldest,)).fetchall()
        for (key,) in responses:
            self.forget_response(key)
        self.removed["age"] += len(conversations) + len(responses)

    def shrink(self, owner: str, keep: int | None = None) -> bool:
        """Remove what the owner has not used for longest until the rest is within the bounds; what the node `keep`
        needs stays. False: that alone is too much."""
        bounds, but = self.bounds, -1 if keep is None else keep
        for _ in range(self._count("conversations WHERE owner = ?", owner) - bounds.responses):
            oldest = "SELECT key FROM conversations WHERE owner = ? AND head IS NOT ? ORDER BY used, key LIMIT 1"
            if (found := self.db.execute(oldest, (owner, but)).fetchone()) is not None:
                self.forget_conversation(found[0])
                self.removed["size"] += 1
        for _ in range(self._count("nodes WHERE owner = ? AND response IS NOT NULL", owner) - bounds.responses):
            oldest = (
                "SELECT key FROM nodes WHERE owner = ? AND response IS NOT NULL AND NOT is_busy AND key != ? "
                "ORDER BY used, key LIMIT 1"
            )
            if (found := self.db.execute(oldest, (owner, but)).fetchone()) is not None:
                self.forget_response(found[0])
                self.removed["size"] += 1
        while (is_over := self.size(owner) > bounds.bytes) and self._drop_oldest("owner = ?", owner, but):
            pass
        while self.size("*") > TOTAL_SHARES * bounds.bytes and self._drop_oldest("? = '*'", "*", but):
            pass
        return not is_over and self.size("*") <= TOTAL_SHARES * bounds.bytes

    def size(self, owner: str) -> int:
        """Bytes of an owner's nodes; "*": of all."""
        found = self.db.execute("SELECT bytes FROM sizes WHERE owner = ?", (owner,)).fetchone()
        return 0 if found is None else found[0]

    def _count(self, what: str, *values: Any) -> int:
        count: int = self.db.execute(f"SELECT count(*) FROM {what}", values).fetchone()[0]
        return count

    def _drop_oldest(self, whose: str, owner: str, but: int) -> bool:
        """Remove the end of a conversation that was not used for longest, which frees bytes. False: there is none."""
        found = self.db.execute(
            f"SELECT used, 0, key FROM nodes WHERE {whose} AND response IS NOT NULL AND NOT is_busy AND key != ? "
            f"AND {_IS_LEAF} "
            f"UNION ALL SELECT used, 1, key FROM conversations WHERE {whose} AND head IS NOT NULL AND head != ? "
            "ORDER BY used, key LIMIT 1",
            (owner, but, owner, but),
        ).fetchone()
        if found is None:
            return False
        (self.forget_conversation if found[1] else self.forget_response)(found[2])
        self.removed["size"] += 1
        return True
