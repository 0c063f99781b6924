"""Files of the disk tier and the sessions: private to their user, and links in their place are never followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import StoreUnavailableError
from quire.kvcache.offload.disk.files import FolderLock, write_then_rename
from quire.kvcache.offload.disk.store import DiskStore
from quire.sessions.log import SessionStore
from quire.sessions.log.export import export_session

BLOCK = 4096
SECRET = "not ours"


@pytest.fixture(autouse=True)
def permissive() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Permissions of the folder and of all in it."""
    return {str(path.relative_to(folder.parent)): path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def assert_private(folder: Path) -> None:
    found = modes(folder)
    assert len(found) > 2
    wrong = {
        name: oct(mode)
        for name, mode in found.items()
        if mode != (0o700 if stat.S_ISDIR((folder.parent / name).lstat().st_mode) else 0o600)
    }
    assert not wrong


def fill(folder: Path) -> None:
    """Blocks and sessions, as an engine stores them."""
    with DiskStore.open(folder / "blocks", b"model", BLOCK, 1 << 20) as blocks:
        assert blocks.write(b"k" * 32, memoryview(b"v" * BLOCK))
    with SessionStore.open(folder / "sessions") as sessions:
        sessions.create("a", [1, 2, 3])


def test_an_engines_folder_is_private(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by" / "quire"
    with LLM(
        str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu", swap_space=0.02, kv_disk=str(folder)
    ) as llm:
        session = llm.sessions.create("a", "hello the world one two three four five six seven")
        session.generate(SamplingParams(max_tokens=20, ignore_eos=True))
        session.suspend()
    assert any(name.endswith(".kv") for name in modes(folder))
    assert_private(tmp_path / "made")


def test_existing_folders_are_tightened(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    fill(folder)
    (folder / "blocks" / ("0" * 32)).mkdir()  # of another model
    (folder / "blocks" / ("0" * 32) / "00000000.kv").write_bytes(b"x" * BLOCK)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with SessionStore.open(folder / "sessions") as sessions:
        assert sessions.tokens("a").tolist() == [1, 2, 3]
    with DiskStore.open(folder / "blocks", b"model", BLOCK, 1 << 20) as blocks:
        assert blocks.has(b"k" * 32)
    assert_private(folder / "blocks")
    assert_private(folder / "sessions")
    assert modes(folder)["kv"] == 0o755  # the user's own folder stays as it is


def test_a_lock_that_is_a_link_is_refused_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text(SECRET)
    for kind, make in (("soft", os.symlink), ("hard", os.link)):
        (folder := tmp_path / kind).mkdir()
        make(target, folder / "lock")
        with pytest.raises(StoreUnavailableError, match="lock is a link or no plain file"):
            FolderLock(folder)
    (pipe := tmp_path / "pipe").mkdir()
    os.mkfifo(pipe / "lock")
    with pytest.raises(StoreUnavailableError, match="lock"):
        FolderLock(pipe)
    assert target.read_text() == SECRET and target.lstat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("dangles", [False, True])
def test_a_reserve_that_is_a_link_is_replaced(tmp_path: Path, dangles: bool) -> None:
    target = tmp_path / "target"
    if not dangles:
        target.write_text(SECRET)
    (folder := tmp_path / "sessions").mkdir()
    (folder / "reserve").symlink_to(target)
    with SessionStore.open(folder) as sessions:
        sessions.create("a", [1, 2, 3])
    assert stat.S_ISREG((folder / "reserve").lstat().st_mode) and (folder / "reserve").stat().st_size == 1 << 20
    assert not target.exists() if dangles else target.read_text() == SECRET


def test_links_in_place_of_other_files_are_not_followed(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text(SECRET)
    folder = tmp_path / "kv"
    fill(folder)
    (segment,) = folder.rglob("*.kv")
    segment.unlink()
    segment.symlink_to(target)
    (draft := segment.with_name("00000001.kv.new")).symlink_to(target)
    with DiskStore.open(folder / "blocks", b"model", BLOCK, 1 << 20) as blocks:
        assert not blocks.has(b"k" * 32) and blocks.write(b"k" * 32, memoryview(b"v" * BLOCK))
    assert not draft.is_symlink()
    (log,) = folder.rglob("*.log")
    log.unlink()
    log.symlink_to(target)
    with pytest.raises(StoreUnavailableError, match="is a link"):
        SessionStore.open(folder / "sessions")
    assert target.read_text() == SECRET


def test_an_exported_file_is_private_and_its_draft_follows_no_link(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text(SECRET)
    (tmp_path / "a.session.new").symlink_to(target)
    with SessionStore.open(tmp_path / "sessions") as sessions:
        sessions.create("a", [1, 2, 3])
        export_session(sessions, "a", tmp_path / "a.session")
    assert (tmp_path / "a.session").lstat().st_mode & 0o777 == 0o600
    write_then_rename(tmp_path / "a.session", b"again")
    assert (tmp_path / "a.session").read_bytes() == b"again" and target.read_text() == SECRET
