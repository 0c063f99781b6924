"""`quire sessions`: manages a folder of sessions without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.sessions.log import SessionStore, session_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SessionStore.open(tmp_path / "sessions") as store:
        store.create("agent-7", range(40), meta={"for": "tests"})
        store.create("agent-8", range(5))
        store.create(session_key("one", "agent-7"), range(3))
    return tmp_path


def test_list_and_show(quire, folder):
    ran = quire("sessions", "list", "--kv-disk", folder)
    assert ran.code == 0, ran.err
    assert [line.split()[:2] for line in ran.out.splitlines()] == [["agent-7", "40"], ["agent-8", "5"]]
    assert "agent-7  3 tokens" in quire("sessions", "list", "--kv-disk", folder, "--tenant", "one").out
    shown = quire("sessions", "show", "agent-7", "--kv-disk", folder).out
    assert "40" in shown and "tests" in shown


def test_delete_export_and_import(quire, folder, tmp_path):
    assert quire("sessions", "export", "agent-7", tmp_path / "file", "--kv-disk", folder).code == 0
    assert quire("sessions", "delete", "agent-7", "--kv-disk", folder).code == 0
    gone = quire("sessions", "show", "agent-7", "--kv-disk", folder)
    assert gone.code == 2 and "no session 'agent-7'" in gone.err
    assert quire("sessions", "import", tmp_path / "file", "--kv-disk", folder).out == "agent-7\n"
    named = quire("sessions", "import", tmp_path / "file", "--kv-disk", folder, "--name", "b", "--tenant", "one")
    assert named.out == "b\n"
    with SessionStore.open(folder / "sessions") as store:
        assert store.tokens(session_key("one", "b")).tolist() == store.tokens("agent-7").tolist() == list(range(40))


def test_errors(quire, folder, tmp_path):
    assert "takes 1 arguments" in quire("sessions", "show", "--kv-disk", folder).err
    assert "there are no sessions" in quire("sessions", "list", "--kv-disk", tmp_path / "nowhere").err
    with SessionStore.open(tmp_path / "many" / "replica-1" / "sessions"):
        pass
    assert str(tmp_path / "many" / "replica-1") in quire("sessions", "list", "--kv-disk", tmp_path / "many").err
    with SessionStore.open(folder / "sessions"):
        assert "in use by process" in quire("sessions", "list", "--kv-disk", folder).err
