"""The chunks of tokens in the log: which there are, where, and how many sessions and chunks refer to each.

Those of earlier runs are rows of arrays, 56 bytes each, filled without a Python object for any of them: a folder of a
million chunks is opened in a fraction of a second. Those of this run are objects.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.sessions.log.log import FrameAddress
from quire.sessions.log.state import CHUNK_FRAME_BYTES

ROW = np.dtype([("id", "<u8"), ("parent", "<u8"), ("digest", "V16"), ("file", "<u4"), ("offset", "<u4")])
"""A chunk as a row: what `CHUNK_ROW` packs."""
_SPREAD = 0x9E3779B97F4A7C15
"""An odd number that spreads chunk numbers over 64 bits."""
_BITS = (1 << 64) - 1


@dataclass(eq=False)
class TokenChunk:
    """256 tokens, referenced by the chunks that follow and the sessions that end with it."""

    id: int
    parent: int
    digest: bytes
    address: FrameAddress
    refs: int = 0


class ChunkTable:
    """Chunks by number and by content. A chunk is dropped with its last reference, and so may those before it."""

    def __init__(self, parts: Sequence[np.ndarray] = ()) -> None:
        """`parts`: rows of earlier runs, the files in order; of two rows of one chunk the later counts. A chunk that
        does not lead back to a first one through others is left out."""
        rows = np.concatenate(parts) if parts else np.empty(0, ROW)
        rows = rows[np.argsort(rows["id"], kind="stable")]
        last = np.append(rows["id"][1:] != rows["id"][:-1], True)[: len(rows)]
        rows = rows[last]
        depths = _depths(rows)
        self._rows = rows[depths > 0]
        self._ids = _view(self._rows["id"])
        self._depths = depths[depths > 0]
        self._parent_ids = _view(self._rows["parent"])
        before = np.searchsorted(self._rows["id"], self._rows["parent"])
        self._parents = _view(before)
        """Row of the chunk before; meaningless for a first chunk."""
        self._refs = np.bincount(before[self._rows["parent"] > 0], minlength=len(self._rows))
        hashes = _hashes(self._rows)
        self._by_hash = np.argsort(hashes)
        self._hashes = _view(hashes[self._by_hash])
        self._young: dict[int, TokenChunk] = {}
        self._young_of: dict[tuple[int, bytes], int] = {}
        self._young_in: dict[int, set[int]] = {}
        """Numbers of young chunks by file."""
        self._count = len(self._rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> TokenChunk:
        """The chunk of that number as it is now. Change it through the table."""
        if (young := self._young.get(number)) is not None:
            return young
        if (row := self._row(number)) is None:
            raise KeyError(number)
        return self._chunk(row)

    def chain(self, tip: int) -> list[int]:
        """Numbers of the chunks up to this one, in order."""
        chain = []
        while tip and (young := self._young.get(tip)) is not None:
            chain.append(tip)
            tip = young.parent
        row = self._known_row(tip) if tip else 0
        while tip:  # a chunk that was moved within the log keeps its row here
            chain.append(tip)
            tip, row = self._parent_ids[row], self._parents[row]
        return chain[::-1]

    def depth(self, number: int) -> int:
        """How many chunks of earlier runs lead to this one, including itself; 0: it is not there, or incomplete."""
        row = self._row(number)
        return 0 if row is None else int(self._depths[row])

    def find(self, parent: int, digest: bytes) -> int | None:
        """The chunk with this content after that parent."""
        if (young := self._young_of.get((parent, digest))) is not None:
            return young
        wanted = (int.from_bytes(digest[:8], "little") ^ parent * _SPREAD) & _BITS
        for at in range(bisect_left(self._hashes, wanted), len(self._hashes)):
            if self._hashes[at] != wanted:
                break
            row = int(self._by_hash[at])
            one = self._rows[row]
            if self._refs[row] and one["parent"] == parent and one["digest"].tobytes() == digest:
                return int(one["id"])
        return None

    def in_file(self, file: int, limit: int) -> list[int]:
        """Numbers of some chunks in that file."""
        young = list(itertools.islice(self._young_in.get(file, ()), limit))
        rows = np.flatnonzero((self._rows["file"] == file) & (self._refs > 0))[: limit - len(young)]
        return young + [int(number) for number in self._rows["id"][rows]]

    def bytes_by_file(self) -> dict[int, int]:
        """Bytes of the chunks of earlier runs in each file."""
        files, counts = np.unique(self._rows["file"][self._refs > 0], return_counts=True)
        return {int(file): int(count) * CHUNK_FRAME_BYTES for file, count in zip(files, counts, strict=True)}

    # Changes

    def add(self, chunk: TokenChunk) -> None:
        """Add a chunk without references; the one before it has one more."""
        self._put(chunk)
        self._count += 1
        self.ref(chunk.parent)

    def move(self, number: int, address: FrameAddress) -> None:
        """The chunk is somewhere else now."""
        chunk = self[number]
        if number in self._young:
            self._young_in[chunk.address.file].discard(number)
        else:
            self._refs[self._row(number)] = 0
        chunk.address = address
        self._put(chunk)

    def ref(self, number: int) -> None:
        """One more reference; 0: no chunk."""
        if number in self._young:
            self._young[number].refs += 1
        elif number:
            self._refs[self._known_row(number)] += 1

    def unref(self, number: int) -> Iterator[FrameAddress]:
        """One reference less; yields the addresses of the chunks that are dropped with it."""
        while number:
            if (young := self._young.get(number)) is not None:
                young.refs -= 1
                if young.refs:
                    return
                self._drop_young(young)
                address, number = young.address, young.parent
            else:
                row = self._known_row(number)
                self._refs[row] -= 1
                if self._refs[row]:
                    return
                address, number = self._chunk(row).address, self._parent_ids[row]
            self._count -= 1
            yield address

    def drop_unused(self) -> None:
        """After the references of sessions were added: drop chunks of earlier runs without any."""
        alive, before = np.ones(len(self._rows), bool), np.asarray(self._parents)
        ended = np.flatnonzero(self._refs == 0)
        while len(ended):
            alive[ended] = False
            parents = before[ended[self._rows["parent"][ended] > 0]]
            np.subtract.at(self._refs, parents, 1)
            ended = np.unique(parents[self._refs[parents] == 0])
        self._count = int(alive.sum())

    def _put(self, chunk: TokenChunk) -> None:
        self._young[chunk.id] = chunk
        self._young_of[chunk.parent, chunk.digest] = chunk.id
        self._young_in.setdefault(chunk.address.file, set()).add(chunk.id)

    def _drop_young(self, chunk: TokenChunk) -> None:
        del self._young[chunk.id]
        if self._young_of.get((chunk.parent, chunk.digest)) == chunk.id:
            del self._young_of[chunk.parent, chunk.digest]
        within = self._young_in[chunk.address.file]
        within.discard(chunk.id)
        if not within:
            del self._young_in[chunk.address.file]

    # Rows

    def _row(self, number: int) -> int | None:
        at = bisect_left(self._ids, number)
        return at if at < len(self._ids) and self._ids[at] == number else None

    def _known_row(self, number: int) -> int:
        if (row := self._row(number)) is None:
            raise KeyError(number)
        return row

    def _chunk(self, row: int) -> TokenChunk:
        one = self._rows[row]
        address = FrameAddress(int(one["file"]), int(one["offset"]), CHUNK_FRAME_BYTES)
        return TokenChunk(int(one["id"]), int(one["parent"]), one["digest"].tobytes(), address, int(self._refs[row]))


def _view(values: np.ndarray) -> memoryview:
    """The values for reading one at a time, as Python's integers."""
    return np.ascontiguousarray(values).data


def _hashes(rows: np.ndarray) -> np.ndarray:
    digests = np.frombuffer(np.ascontiguousarray(rows["digest"]).tobytes(), "<u8")[::2]
    return digests ^ rows["parent"] * np.uint64(_SPREAD)


def _depths(rows: np.ndarray) -> np.ndarray:
    """How many chunks lead to each, including itself; 0 or less: one of them is missing. Rows are sorted by id."""
    count = len(rows)
    root, missing = count, count + 1
    depths = np.ones(count + 2, np.int64)
    depths[root], depths[missing] = 0, -(1 << 30)
    before = np.full(count + 2, missing)
    before[root] = root
    at = np.minimum(np.searchsorted(rows["id"], rows["parent"]), max(count - 1, 0))
    if count:
        # A chunk is numbered after the one before it.
        is_known = (rows["id"][at] == rows["parent"]) & (rows["parent"] < rows["id"])
        before[:count] = np.where(rows["parent"] == 0, root, np.where(is_known, at, missing))
    # Each round doubles how far every chunk has looked back.
    while not np.all((before == root) | (before == missing)):
        depths += depths[before]
        before = before[before]
    return np.maximum(depths + depths[before], 0)[:count]
