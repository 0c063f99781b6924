"""Sessions by name: their content after restarts, forks, deletions and compaction, against a plain model."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import (
    QuireError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
    StoreInUseError,
    ValidationError,
)
from quire.sessions.log import SessionStore, check_name, export_session, import_session
from tests.sessions import storm

LENGTHS = st.sampled_from([0, 1, 2, 100, 255, 256, 257, 512, 700])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[SessionStore]:
    with SessionStore.open(tmp_path / "sessions", file_bytes=8192, clock=clock) as store:
        yield store


class SessionMachine(RuleBasedStateMachine):
    """All operations on sessions, in any order, with restarts, in files so small that all are compacted."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="quire-sessions-"))
        self.clock = Clock()
        self.model: storm.Model = {}
        self.ids: dict[str, int] = {}
        self.used: dict[str, float] = {}
        self.store = self.open()

    def open(self) -> SessionStore:
        return SessionStore.open(self.folder, file_bytes=storm.FILE_BYTES, clock=self.clock)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def do(self, operation: storm.Operation, name: str) -> None:
        storm.perform(operation, self.store, durable=False)
        storm.apply(operation, self.model)
        if operation[0] in ("create", "append", "fork", "update"):
            self.used[name] = self.clock.now
        if operation[0] in ("create", "fork"):
            number = self.store.get(name).id
            assert number > max(self.ids.values(), default=0)
            self.ids[name] = number

    @rule(name=st.sampled_from(storm.NAMES), start=st.integers(0, 2), length=LENGTHS, ttl=st.sampled_from([None, 50]))
    def create(self, name: str, start: int, length: int, ttl: float | None) -> None:
        if name in self.model:
            with pytest.raises(SessionExistsError, match=name):
                self.store.create(name)
            return
        self.do(("create", {"name": name, "tokens": list(range(start, start + length)), "ttl": ttl}), name)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), start=st.integers(0, 2), length=LENGTHS)
    def append(self, data: st.DataObject, start: int, length: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.do(("append", {"name": name, "tokens": list(range(start, start + length))}), name)

    @precondition(lambda self: 0 < len(self.model) < len(storm.NAMES))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        new = data.draw(st.sampled_from([name for name in storm.NAMES if name not in self.model]))
        at = data.draw(st.integers(0, len(self.model[name]["tokens"])))
        self.do(("fork", {"name": name, "new": new, "at": at}), new)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def set_kv(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        tokens = data.draw(st.integers(0, len(self.model[name]["tokens"])))
        self.do(("kv", {"name": name, "tokens": tokens}), name)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.do(("delete", {"name": name}), name)
        del self.ids[name]
        with pytest.raises(SessionNotFoundError, match=name):
            self.store.get(name)

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        over = {n for n, s in self.model.items() if s["ttl"] and self.used[n] + s["ttl"] <= self.clock.now}
        assert set(self.store.sweep()) == over
        for name in over:
            del self.model[name], self.ids[name]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def look_at_a_part(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        tokens = self.model[name]["tokens"]
        start, stop = data.draw(st.integers(0, 800)), data.draw(st.integers(0, 800))
        assert self.store.tokens(name, start, stop).tolist() == tokens[start:stop]

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        found = storm.observe(self.store)
        assert found == self.model
        assert list(found) == sorted(self.model, key=self.ids.__getitem__), "in the order they were made"
        assert len(self.store) == len(self.model)

    @invariant()
    def the_use_of_the_store_is_that_of_its_sessions(self) -> None:
        use = self.store.use("")
        lengths = [len(session["tokens"]) for session in self.model.values()]
        assert (use.sessions, use.tokens) == (len(lengths), sum(lengths))
        assert use == self.store.use()
        assert 4 * use.tokens <= use.bytes <= 5 * use.tokens + 64 * 1024 * use.sessions
        assert use.bytes >= self.store.stats().live_bytes - sum(
            old.address.size for old in self.store._catalog.tombstones.values()
        )

    @invariant()
    def every_chunk_is_stored_once_and_garbage_is_bounded(self) -> None:
        beginnings = {
            tuple(session["tokens"][:end])
            for session in self.model.values()
            for end in range(256, len(session["tokens"]) + 1, 256)
        }
        stats = self.store.stats()
        assert stats.chunks == len(beginnings)
        assert stats.live_bytes <= stats.log_bytes
        assert stats.log_bytes <= 2 * stats.live_bytes + 3 * storm.FILE_BYTES or self.store._cleaner.clean()
        on_disk = sum(path.stat().st_size for path in self.folder.glob("*.log"))
        assert on_disk <= stats.log_bytes + storm.FILE_BYTES


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestSessionsForLong(SessionMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=400, stateful_step_count=100, deadline=None)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a b", "é", "a\n", "a\0", "-a", ".a", "a" * 129, None, 7, b"a", "a" * 10**6]
)
def test_ambiguous_names_are_refused(store: SessionStore, name: Any) -> None:
    with pytest.raises(ValidationError, match="cannot name a session") as caught:
        store.create(name)
    assert len(str(caught.value)) < 300
    for act in (store.get, store.tokens, store.delete):
        with pytest.raises((QuireError, TypeError)):
            act(name)
    assert len(store) == 0


@given(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}", fullmatch=True))
def test_common_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


def test_no_name_reaches_the_file_system(store: SessionStore, tmp_path: Path) -> None:
    store.create("agent-7:turn_2@home", [1, 2, 3])
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"sessions", "lock", "reserve", "00000001.log"}


def test_a_fork_is_its_own_session_and_outlives_its_parent(store: SessionStore) -> None:
    store.create("a", range(600), meta={"role": "x"})
    fork = store.fork("a", "b", at=300)
    assert (fork.parent, fork.forked_at, fork.num_tokens, fork.meta) == ("a", 300, 300, {"role": "x"})
    store.append("b", [7])
    store.append("a", [8])
    store.delete("a")
    assert store.tokens("b").tolist() == [*range(300), 7]
    with pytest.raises(ValidationError, match="301"):
        store.fork("b", "c", at=302)


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], [1.5], ["1"], [[1]], [None], np.array([2**40])])
def test_invalid_tokens_are_refused_before_anything_is_written(store: SessionStore, tokens: Any) -> None:
    store.create("a", [1])
    with pytest.raises(ValidationError, match="32 bits"):
        store.append("a", tokens)
    assert store.tokens("a").tolist() == [1]


def test_a_closed_store_releases_the_folder_to_the_next_owner(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as before:
        before.create("a", [1])
    with SessionStore.open(tmp_path) as now:
        now.create("b", [2])
        with pytest.raises(StoreError, match="closed"):
            before.append("a", [3])
        with pytest.raises(StoreError, match="closed"):
            before.create("c")
    with SessionStore.open(tmp_path) as store:
        assert {name: store.tokens(name).tolist() for name in "ab"} == {"a": [1], "b": [2]} and "c" not in store


def test_limits_are_in_the_errors(store: SessionStore) -> None:
    store.create("a", [1])
    for ttl in (0, -1, float("nan"), "5"):
        with pytest.raises(ValidationError, match="ttl"):
            store.update("a", ttl=ttl)
    with pytest.raises(ValidationError, match="4096"):
        store.update("a", meta={"x": "y" * 4096})
    with pytest.raises(ValidationError, match="2 tokens"):
        store.set_kv("a", 2, b"")
    meta: Any
    for meta in ([1], {"x": 1}):
        with pytest.raises(ValidationError, match="text to text"):
            store.update("a", meta=meta)
    limit: Any
    for limit in (0, "3", 1.5):
        with pytest.raises(ValidationError, match="limit"):
            store.page(limit=limit)
    at: Any
    for at in (2, -1, "1", 0.5):
        with pytest.raises(ValidationError, match="cannot be forked at"):
            store.fork("a", "b", at)


def test_a_session_in_use_does_not_expire(tmp_path: Path, clock: Clock) -> None:
    with SessionStore.open(tmp_path, clock=clock) as store:
        store.create("a", ttl=100)
        store.create("b", ttl=100)
        store.create("c")
        clock.now += 90
        store.touch("a")
    with SessionStore.open(tmp_path, clock=clock) as store:
        clock.now += 20
        assert store.sweep() == ["b"]
        store.update("a", ttl=None)
        clock.now += 10**6
        assert store.sweep() == []
        assert len(store) == 2


def test_a_page_continues_after_the_last_one_while_sessions_are_created_and_deleted(store: SessionStore) -> None:
    for i in range(10):
        store.create(f"s{i}", durable=False)
    first = store.page(limit=4)
    assert [session.name for session in first.sessions] == ["s0", "s1", "s2", "s3"]
    assert first.after is not None
    store.delete("s3")
    store.delete("s5")
    store.create("s10")
    second = store.page(first.after, limit=4)
    assert [session.name for session in second.sessions] == ["s4", "s6", "s7", "s8"]
    assert second.after is not None
    last = store.page(second.after, limit=2)
    assert [session.name for session in last.sessions] == ["s9", "s10"]
    assert last.after is None


def test_sessions_are_found_by_creation_time(store: SessionStore, clock: Clock) -> None:
    begin = clock.now
    for i in range(6):
        store.create(f"s{i}", durable=False)
        clock.now += 10 if i % 2 else 0  # always two at a time
    store.delete("s2")

    def made_after(seconds: float, owner: str | None = None) -> list[str]:
        return [session.name for session in store.page(store.last_id_at(begin + seconds, owner)).sessions]

    assert made_after(-1) == ["s0", "s1", "s3", "s4", "s5"]
    assert made_after(0) == made_after(9) == ["s3", "s4", "s5"]
    assert made_after(10) == ["s4", "s5"] and made_after(20) == []
    assert store.last_id_at(begin + 20, "unknown") == 0


def test_a_clock_that_is_set_back_does_not_change_the_order(store: SessionStore, clock: Clock) -> None:
    begin = clock.now
    for name, now in (("s0", 100.0), ("s1", 50.0), ("s2", 101.0)):
        clock.now = begin + now
        store.create(name, durable=False)
    clock.now = begin
    fork = store.fork("s0", "s3")
    times = [session.created for session in store.page().sessions]
    assert times == sorted(times) and fork.used == begin
    assert store.page(store.last_id_at(begin + 100.0)).sessions[0].name == "s2"


def test_one_process_owns_the_folder(tmp_path: Path) -> None:
    child = f"""
from quire.sessions.log import SessionStore
store = SessionStore.open({str(tmp_path)!r})
store.create("theirs", [1, 2])
print("open", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    with pytest.raises(StoreInUseError, match=f"process {process.pid}"):
        SessionStore.open(tmp_path)
    process.kill()
    process.communicate()
    with SessionStore.open(tmp_path) as store:
        assert store.tokens("theirs").tolist() == [1, 2]


def test_many_threads_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    syncs = []
    real = os.fdatasync

    def slow(fd: int) -> None:
        syncs.append(fd)
        time.sleep(0.05)  # long enough for all other threads to start and wait, on a busy machine too
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    with SessionStore.open(tmp_path) as store:

        def work(i: int) -> None:
            store.create(f"t{i}")
            for j in range(5):
                store.append(f"t{i}", [j])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(store.tokens(f"t{i}").tolist() == [0, 1, 2, 3, 4] for i in range(16))
        assert len(syncs) < 16 * 6 / 2, "concurrent commits share syncs"


def test_a_session_is_exported_and_imported(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "one") as one, SessionStore.open(tmp_path / "two") as two:
        one.create("a", range(1000), fingerprint=b"model", salt="tenant", meta={"k": "v"})
        export_session(one, "a", tmp_path / "a.quire")
        session = import_session(two, tmp_path / "a.quire", fingerprint=b"model")
        assert (session.name, session.meta, session.salt) == ("a", {"k": "v"}, "")
        assert two.tokens("a").tolist() == list(range(1000))
        assert import_session(two, tmp_path / "a.quire", "b").name == "b"
        with pytest.raises(SessionExistsError):
            import_session(two, tmp_path / "a.quire")
        with pytest.raises(ValidationError, match="another model"):
            import_session(two, tmp_path / "a.quire", "c", fingerprint=b"other")
        with pytest.raises(StoreError, match="missing"):
            import_session(two, tmp_path / "missing")


def test_a_damaged_export_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    with SessionStore.open(tmp_path / "one") as store:
        store.create("a", range(100))
        export_session(store, "a", path)
        data = path.read_bytes()
        for i in range(0, len(data), 7):
            path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
            with pytest.raises(ValidationError, match="a.quire"):
                import_session(store, path, "b")
        for length in (0, 10, 44, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(ValidationError, match="a.quire"):
                import_session(store, path, "b")
        assert len(store) == 1


def test_thousands_of_sessions_share_their_common_prefix(tmp_path: Path) -> None:
    prompt = list(range(512))
    with SessionStore.open(tmp_path) as store:
        for i in range(2000):
            store.create(f"agent-{i}", prompt + [1000 + i] * 32, durable=False)
        store.commit()
        stats = store.stats()
        assert stats.chunks == 2, "the common part is stored once"
        assert stats.log_bytes < 2000 * 550
    begin = time.process_time()
    with SessionStore.open(tmp_path) as store:
        assert time.process_time() - begin < 2
        assert store.tokens("agent-1234").tolist() == prompt + [2234] * 32
        assert len(store.page(limit=50).sessions) == 50
