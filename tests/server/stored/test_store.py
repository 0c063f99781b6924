"""The store of responses and conversations: contexts, branches, deletion, bounds, lifetimes, crashes."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import StoreUnavailableError
from quire.server.errors import ApiError
from quire.server.stored.store import (
    FILE_NAME,
    INTERRUPTED,
    ResponseStore,
    StoredContext,
    StoredTurn,
    StoreOverflowError,
)
from quire.server.stored.tree import TOTAL_SHARES, Item, StoreBounds

DAY = 86400.0
WIDE = StoreBounds(1000, 1 << 20, 30 * DAY)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Stored:
    """A store in the test's own thread, and the sessions it has dropped."""

    def __init__(self, bounds: StoreBounds = WIDE, folder: Path | None = None) -> None:
        self.clock = Clock()
        self.dropped: list[str] = []
        self.store = ResponseStore(folder, bounds, self.dropped.append, self.clock)

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self.store.transact(getattr(self.store, method), *arguments)
        finally:
            self.store.report_dropped()

    def add(
        self, name: str | None, after: StoredContext | str | None = None, owner: str = "me", text: str = ""
    ) -> None:
        """A turn with one item in and one out, named after the response, that follows another."""
        context = self.call("response_context", owner, after) if isinstance(after, str) else after or StoredContext()
        label = name or "unstored"
        inputs, outputs = [item(f"{label}-in", text)], [item(f"{label}-out")]
        session = f"session-{label}"
        body = msgspec.json.encode({"id": name, "status": "completed", "background": False})
        self.call("add", StoredTurn(owner, context, inputs, outputs, name, body, session, "salt"))

    def context(self, name: str, owner: str = "me") -> list[str]:
        return ids(self.call("response_context", owner, name).items)

    def has(self, name: str, owner: str = "me") -> bool:
        try:
            self.call("response", owner, name)
        except ApiError as error:
            assert error.status == 404
            return False
        return True


def item(name: str, text: str = "") -> Item:
    return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def ids(items: Sequence[Any]) -> list[str]:
    """Ids of items, decoded or as they are stored."""
    return [item["id"] if isinstance(item, dict) else item.id for item in items]


class TestResponses:
    def test_a_context_has_every_item_of_the_responses_before(self) -> None:
        stored = Stored()
        stored.add("a")
        stored.add("b", "a")
        assert stored.context("b") == ["a-in", "a-out", "b-in", "b-out"]
        assert ids(stored.call("input_items", "me", "b")) == ["a-in", "a-out", "b-in"]
        response = msgspec.json.decode(msgspec.json.encode(stored.call("response", "me", "b")))
        assert (response["id"], ids(response["output"])) == ("b", ["b-out"])
        assert stored.call("response_context", "me", "b").session == "session-b"

    def test_follow_ups_of_one_response_are_independent(self) -> None:
        stored = Stored()
        stored.add("a")
        for name in ("b", "c"):
            stored.add(name, "a")
        stored.add("d", "b")
        assert stored.context("d") == ["a-in", "a-out", "b-in", "b-out", "d-in", "d-out"]
        assert stored.context("c") == ["a-in", "a-out", "c-in", "c-out"]

    def test_what_is_deleted_in_the_middle_stays_in_what_follows(self) -> None:
        stored = Stored()
        stored.add("a")
        stored.add("b", "a")
        stored.add("c", "b")
        stored.call("delete_response", "me", "b")
        assert not stored.has("b") and stored.context("c")[2:4] == ["b-in", "b-out"]
        assert stored.dropped == ["session-b"], "its session is not needed"
        for name in ("a", "c"):
            stored.call("delete_response", "me", name)
        assert stored.store.size("me") == 0 and stored.store.size("*") == 0
        assert sorted(stored.dropped) == ["session-a", "session-b", "session-c"]

    def test_a_response_deleted_while_it_is_followed_up_leaves_its_items_to_the_follow_up(self) -> None:
        stored = Stored()
        stored.add("a")
        context = stored.call("response_context", "me", "a")
        stored.call("delete_response", "me", "a")
        stored.add("b", context)
        assert stored.context("b") == ["a-in", "a-out", "b-in", "b-out"]

    def test_an_owner_finds_nothing_of_another(self) -> None:
        stored = Stored()
        stored.add("a")
        made = stored.call("create_conversation", "me", [item("x")], {})
        for method, name in [
            *((method, "a") for method in ("response", "response_context", "input_items", "delete_response")),
            *((f"{kind}conversation{end}", made["id"]) for kind, end in
              (("", ""), ("", "_context"), ("", "_items"), ("delete_", ""))),
        ]:  # fmt: skip
            with pytest.raises(ApiError, match="there is no") as caught:
                stored.call(method, "other", name)
            unknown = str(caught.value).replace(repr(name), repr("never"))
            with pytest.raises(ApiError) as expected:
                stored.call(method, "other", "never")
            assert caught.value.status == 404 and unknown == str(expected.value), "as if it did not exist"
        assert stored.call("items", "other", ["a-in", "x"]) == {}
        assert set(stored.call("items", "me", ["a-in", "x", "y"])) == {"a-in", "x"}

    def test_only_an_answer_can_be_followed_up(self) -> None:
        stored = Stored()
        body = msgspec.json.encode({"status": "in_progress", "background": True})
        stored.call("begin", StoredTurn("me", StoredContext(), [item("i")], (), "a", body))
        with pytest.raises(ApiError, match="in_progress") as caught:
            stored.call("response_context", "me", "a")
        assert caught.value.status == 400


class TestConversations:
    def test_responses_are_added(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [item("x")], {"k": "v"})["id"]
        assert stored.call("conversation", "me", name)["metadata"] == {"k": "v"}
        stored.add("a", stored.call("conversation_context", "me", name))
        stored.call("add_items", "me", name, [item("y")])
        stored.add(None, stored.call("conversation_context", "me", name))
        expected = ["x", "a-in", "a-out", "y", "unstored-in", "unstored-out"]
        assert ids(stored.call("conversation_items", "me", name)) == expected
        assert stored.call("conversation_context", "me", name).session == "session-unstored"
        assert stored.context("a") == ["x", "a-in", "a-out"]

    def test_items_added_while_a_response_is_generated_come_before_it(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [item("x")], {})["id"]
        context = stored.call("conversation_context", "me", name)
        stored.call("add_items", "me", name, [item("y")])
        stored.add("a", context)
        assert ids(stored.call("conversation_items", "me", name)) == ["x", "y", "a-in", "a-out"]

    def test_a_deleted_item_is_kept_by_a_response_that_has_it(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [item("x"), item("z")], {})["id"]
        stored.call("delete_item", "me", name, "z")
        assert stored.call("items", "me", ["z"]) == {}, "no response has it: it is gone"
        stored.add("a", stored.call("conversation_context", "me", name))
        stored.call("delete_item", "me", name, "x")
        assert ids(stored.call("conversation_items", "me", name)) == ["a-in", "a-out"]
        assert stored.context("a") == ["x", "a-in", "a-out"]
        with pytest.raises(ApiError, match="has no item"):
            stored.call("delete_item", "me", name, "x")

    def test_a_deleted_conversation_leaves_its_responses(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [item("x")], {})["id"]
        stored.add("a", stored.call("conversation_context", "me", name))
        stored.call("delete_conversation", "me", name)
        assert stored.context("a") == ["x", "a-in", "a-out"] and not stored.dropped
        stored.call("delete_response", "me", "a")
        assert stored.store.size("*") == 0 and stored.dropped == ["session-a"]

    def test_a_deleted_response_stays_in_its_conversation(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [], {})["id"]
        stored.add("a", stored.call("conversation_context", "me", name))
        stored.call("delete_response", "me", "a")
        assert not stored.has("a")
        context = stored.call("conversation_context", "me", name)
        assert ids(context.items) == ["a-in", "a-out"] and context.session == "session-a"
        assert not stored.dropped, "the conversation goes on from that session"
        stored.add("b", context)
        assert stored.dropped == ["session-a"]

    def test_a_response_outlives_the_conversation_it_was_generated_for(self) -> None:
        stored = Stored()
        name = stored.call("create_conversation", "me", [item("x")], {})["id"]
        context = stored.call("conversation_context", "me", name)
        stored.call("delete_conversation", "me", name)
        stored.add("a", context)
        assert stored.context("a") == ["x", "a-in", "a-out"]
        stored.add(None, context)
        stored.call("delete_response", "me", "a")
        assert stored.store.size("*") == 0, "nothing of the response that was not stored is left"


class TestBounds:
    def test_the_least_recently_used_responses_are_dropped(self) -> None:
        stored = Stored(StoreBounds(3, 1 << 20, DAY))
        for name in "abc":
            stored.add(name)
        stored.clock.now += 100
        stored.call("response", "me", "a")
        stored.add("d")
        assert [name for name in "abcd" if stored.has(name)] == ["a", "c", "d"]
        assert stored.store.removed == {"size": 1, "age": 0}
        assert stored.dropped == ["session-b"]

    def test_a_conversation_longer_than_the_bound_goes_on(self) -> None:
        stored = Stored(StoreBounds(3, 1 << 20, DAY))
        stored.add("0")
        for number in range(1, 10):
            stored.add(str(number), str(number - 1))
        assert [number for number in range(10) if stored.has(str(number))] == [7, 8, 9]
        assert len(stored.context("9")) == 20

    def test_bytes_are_bounded_and_others_keep_theirs(self) -> None:
        stored = Stored(StoreBounds(1000, 20_000, DAY))
        stored.add("theirs", owner="other", text="x" * 10_000)
        for number in range(20):
            stored.add(str(number), text="x" * 4000)
            assert stored.store.size("me") <= 20_000
        assert stored.has("theirs", "other") and stored.has("19") and not stored.has("0")

    def test_what_alone_is_too_large_is_refused_and_drops_nothing(self) -> None:
        stored = Stored(StoreBounds(1000, 20_000, DAY))
        stored.add("a", text="x" * 9000)
        for turn in (lambda: stored.add("b", text="x" * 30_000), lambda: stored.add("c", "a", text="x" * 15_000)):
            with pytest.raises(StoreOverflowError, match="max-stored-bytes"):
                turn()
        assert stored.has("a") and not stored.has("b") and not stored.has("c") and not stored.dropped
        assert stored.store.removed == {"size": 0, "age": 0} and stored.store.total_bytes == stored.store.size("me")

    def test_all_owners_together_are_bounded(self) -> None:
        stored = Stored(StoreBounds(1000, 10_000, DAY))
        for number in range(3 * TOTAL_SHARES):
            stored.add("a", owner=f"tenant{number}", text="x" * 6000)
        assert stored.store.size("*") <= TOTAL_SHARES * 10_000
        assert stored.has("a", f"tenant{3 * TOTAL_SHARES - 1}") and not stored.has("a", "tenant0")

    def test_conversations_are_bounded(self) -> None:
        stored = Stored(StoreBounds(2, 1 << 20, DAY))
        names = [stored.call("create_conversation", "me", [item(str(n))], {})["id"] for n in range(3)]
        with pytest.raises(ApiError, match="there is no conversation"):
            stored.call("conversation", "me", names[0])
        assert stored.call("conversation_items", "me", names[2])

    def test_what_is_not_used_expires(self) -> None:
        stored = Stored(StoreBounds(10, 1 << 20, DAY))
        stored.add("a")
        stored.add("b")
        name = stored.call("create_conversation", "me", [item("x")], {})["id"]
        stored.clock.now += 0.6 * DAY
        stored.call("response", "me", "a")
        stored.clock.now += 0.6 * DAY
        assert stored.has("a") and not stored.has("b")
        with pytest.raises(ApiError, match="there is no conversation"):
            stored.call("conversation", "me", name)
        stored.clock.now += 1.1 * DAY
        assert not stored.has("a") and stored.store.size("*") == 0
        assert stored.store.removed == {"size": 0, "age": 3}

    def test_random_use_keeps_every_context_and_every_bound(self) -> None:
        """Compared with plain lists: a response's context is its parent's and its own items, whatever was deleted."""
        draw = random.Random(1)
        bounds = StoreBounds(12, 40_000, DAY)
        stored, contexts = Stored(bounds), dict[str, list[str]]()
        for number in range(200):
            known = [name for name in contexts if stored.has(name)]
            if known and draw.random() < 0.2:
                stored.call("delete_response", "me", draw.choice(known))
                continue
            name, parent = str(number), draw.choice([None, *known[-5:]])
            try:
                stored.add(name, parent, text="x" * draw.randrange(3000))
            except StoreOverflowError:
                continue
            contexts[name] = [*(contexts[parent] if parent else []), f"{name}-in", f"{name}-out"]
            left = [name for name in contexts if stored.has(name)]
            assert len(left) <= bounds.responses and stored.store.size("me") <= bounds.bytes
            assert all(stored.context(name) == contexts[name] for name in left)
        dropped = {name.removeprefix("session-") for name in stored.dropped}
        assert dropped == {name for name in contexts if not stored.has(name)}, "a session for each response, no other"
        for name in [name for name in contexts if stored.has(name)]:
            stored.call("delete_response", "me", name)
        assert stored.store.size("*") == 0


class TestFile:
    def test_it_is_private_and_survives(self, tmp_path: Path) -> None:
        first = Stored(folder=tmp_path / "responses")
        first.add("a")
        name = first.call("create_conversation", "me", [item("x")], {})["id"]
        for path in (tmp_path / "responses").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        second = Stored(folder=tmp_path / "responses")  # the first was not closed, as if it had been killed
        assert second.context("a") == ["a-in", "a-out"]
        assert ids(second.call("conversation_items", "me", name)) == ["x"]
        for stored in (first, second):
            stored.store.close()

    def test_a_response_that_was_being_generated_has_failed(self, tmp_path: Path) -> None:
        first = Stored(folder=tmp_path)
        body = msgspec.json.encode({"id": "a", "status": "in_progress", "background": True})
        first.call("begin", StoredTurn("me", StoredContext(), [item("i")], (), "a", body))
        first.store.close()
        second = Stored(folder=tmp_path)
        found = second.call("response", "me", "a")
        assert (found["status"], found["error"]["message"]) == ("failed", INTERRUPTED)
        second.store.close()

    def test_what_was_deleted_is_in_no_file(self, tmp_path: Path) -> None:
        stored = Stored(folder=tmp_path)
        stored.add("a", text="a secret of mine")
        stored.call("delete_response", "me", "a")
        asyncio.run(stored.store.tidy())
        assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())
        stored.store.close()

    def test_a_damaged_file_is_set_aside(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
        stored = Stored(folder=tmp_path)
        stored.add("a")
        assert stored.has("a") and list(tmp_path.glob(f"{FILE_NAME}.damaged-*"))
        stored.store.close()

    def test_another_format_and_a_link_are_refused(self, tmp_path: Path) -> None:
        with sqlite3.connect(tmp_path / FILE_NAME) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
        with pytest.raises(StoreUnavailableError, match="format 99"):
            Stored(folder=tmp_path)
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked" / FILE_NAME).symlink_to(tmp_path / FILE_NAME)
        with pytest.raises(StoreUnavailableError, match="link"):
            Stored(folder=tmp_path / "linked")
