"""Opening a folder reads an index, not the tokens in it; what the index cannot vouch for is read as before."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from quire.errors import SessionLostError
from quire.sessions.log import SessionStore
from quire.sessions.log.chunks import ROW, ChunkTable, TokenChunk
from quire.sessions.log.format import CHUNK_ROW, digest_of
from quire.sessions.log.log import FrameAddress
from tests.sessions import storm

LENGTH = 4000


def filled(folder: Path, sessions: int = 40, file_bytes: int = 64 << 10) -> SessionStore:
    store = SessionStore.open(folder, file_bytes=file_bytes)
    for i in range(sessions):
        store.create(f"s{i}", range(i * LENGTH, (i + 1) * LENGTH), durable=False)
    return store


def bytes_read_at_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes read from the log when the folder is opened, and the log's length. All sessions are as they were made."""
    read, real = 0, os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = real(fd, size, offset)
        read += len(data)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", counted)
        store = SessionStore.open(folder, file_bytes=64 << 10)
    found, size = read, store.stats().log_bytes
    for i in range(len(store)):
        assert store.tokens(f"s{i}").tolist() == list(range(i * LENGTH, (i + 1) * LENGTH))
    store.close()
    return found, size


def test_opening_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    read, size = bytes_read_at_open(tmp_path, monkeypatch)
    assert size > 700_000
    assert read < size / 10


def test_after_a_crash_one_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "crashed")
    store.commit()
    shutil.copytree(tmp_path / "crashed", tmp_path / "found")  # with times, as a crash leaves them
    store.close()
    (tmp_path / "found" / "lock").unlink()
    read, size = bytes_read_at_open(tmp_path / "found", monkeypatch)
    assert size > 700_000
    assert read < 64 * 1024 + size / 10


def test_a_folder_without_indexes_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    for path in tmp_path.glob("*.idx"):
        path.unlink()
    read, size = bytes_read_at_open(tmp_path, monkeypatch)
    assert read > size / 2
    read, size = bytes_read_at_open(tmp_path, monkeypatch)
    assert read < size / 10


def test_a_damaged_index_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    rng = random.Random(1)
    for path in tmp_path.glob("*.idx"):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    read, size = bytes_read_at_open(tmp_path, monkeypatch)
    assert read > size / 2


def flip_unnoticed(path: Path, at: int) -> None:
    """Damage that leaves the file's time as it is, as a failing disk does."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("seed", range(2))
def test_damage_that_the_index_does_not_show_is_found_and_never_served(tmp_path: Path, seed: int) -> None:
    """Each session is whole, or lost by name at the latest when it is read."""
    rng, model = random.Random(seed), storm.Model()
    with SessionStore.open(tmp_path / "whole", file_bytes=storm.FILE_BYTES) as store:
        for _ in range(60):
            operation = storm.choose(rng, model)
            storm.perform(operation, store, durable=False)
            storm.apply(operation, model)
    lost = 0
    for i in range(25):
        folder = tmp_path / f"copy-{i}"
        shutil.copytree(tmp_path / "whole", folder)
        path = rng.choice(sorted(folder.glob("*.log")))
        flip_unnoticed(path, rng.randrange(path.stat().st_size))
        with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as store:
            assert len(store) == len(model)
            for name, session in model.items():
                try:
                    assert store.tokens(name).tolist() == session["tokens"]
                except SessionLostError as error:
                    lost += 1
                    assert name in str(error)
                    left = store.recover(name).num_tokens
                    assert store.tokens(name).tolist() == session["tokens"][:left]
        shutil.rmtree(folder)
    assert lost > 0


def test_the_table_of_chunks_against_a_plain_model() -> None:
    """Chains of loaded and new chunks, moved and dropped in any order."""
    rng = random.Random(5)
    rows, parents = [], {0: 0}
    for number in range(1, 200):
        parents[number] = rng.choice([0, number - 1, rng.randrange(number)])
        rows.append((number, parents[number], digest_of(b"%d" % number), 1 + number % 3, 100 * number))
    rng.shuffle(rows)
    rows.append((7, parents[7], digest_of(b"7"), 9, 700))  # written again in a later file
    rows.append((900, 899, digest_of(b"900"), 1, 1))  # what it follows is missing
    table = ChunkTable([np.frombuffer(b"".join(CHUNK_ROW.pack(*row) for row in rows), ROW)])

    def chain(tip: int) -> list[int]:
        return [*chain(parents[tip]), tip] if tip else []

    assert table.depth(900) == 0 and table.find(899, digest_of(b"900")) is None
    assert table[7].address.file == 9
    tips = [rng.randrange(1, 200) for _ in range(40)]
    for tip in tips:
        assert table.depth(tip) == len(chain(tip))
        table.ref(tip)
    table.drop_unused()
    for step in range(200):
        alive = {number for tip in tips for number in chain(tip)}
        assert len(table) == len(alive)
        for number in rng.sample(sorted(parents), 5):
            digest = digest_of(b"%d" % number)
            assert table.find(parents[number], digest) == (number if number in alive else None)
        if step % 3 == 0:
            number = 1000 + step
            parents[number] = rng.choice([0, *alive])
            table.add(TokenChunk(number, parents[number], digest_of(b"%d" % number), FrameAddress(4, step, 1136)))
            table.ref(number)
            tips.append(number)
        elif step % 3 == 1 and alive:
            table.move(rng.choice(sorted(alive)), FrameAddress(5, step, 1136))
        elif tips:
            tip = tips.pop(rng.randrange(len(tips)))
            assert table.chain(tip) == chain(tip)
            gone = set(chain(tip)) - {number for other in tips for number in chain(other)}
            assert len(list(table.unref(tip))) == len(gone)
    chains = [table.chain(tip) for tip in tips]
    assert chains == [chain(tip) for tip in tips]
    held = {number for one in chains for number in one}
    assert {number for file in (1, 2, 3, 4, 5, 9) for number in table.in_file(file, 10_000)} == held
