"""Bundles: a model in one file. An uncompressed zip whose weights are mapped and read in place.

The first member, `quire.json`, is the manifest: the version that wrote it, and size and digest of every other member.
Weights begin at multiples of ALIGNMENT. Small files (configuration, tokenizer, template) are unpacked once into the
cache, because other libraries read them from a folder. A weight file in a bundle has the path `BUNDLE/NAME`.

A bundle may come from anyone: names must be plain, members must be stored as they are, within the file and listed, and
digests must match. Those of weights are checked once for each state of the file (size, time of change).
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from quire.errors import CheckpointError
from quire.paths import cache_dir

MAGIC = b"PK\x03\x04"
MANIFEST = "quire.json"
FORMAT = 1
ALIGNMENT = 16384
"""Bytes; pages are at most this large on nearly all machines."""
MOST_MEMBERS = 4096
MOST_MANIFEST_BYTES = 4 << 20
MOST_SMALL_BYTES = 256 << 20
"""Size of a member that is unpacked."""
CHUNK_BYTES = 8 << 20
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
PADDING_ID = 0xD935
"""Header id of padding in a zip's extra field."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of all members: the same model gives the same bundle."""


@dataclass(frozen=True)
class StoredFile:
    """Where the bytes of a weight file are: a file of its own, or a part of a bundle."""

    path: Path
    start: int
    size: int
    mtime_ns: int

    @property
    def end(self) -> int:
        return self.start + self.size

    def map(self) -> mmap.mmap:
        """The bytes, mapped read-only."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ, offset=self.start)


def locate(path: Path) -> StoredFile:
    """Where the bytes of a weight file are. Raises OSError if there is no such file."""
    try:
        state = path.stat()
    except NotADirectoryError:
        bundle = read_bundle(path.parent)
        if (member := bundle.members.get(path.name)) is None:
            raise CheckpointError(f"{bundle.path} has no member {path.name}") from None
        return member
    return StoredFile(path, 0, state.st_size, state.st_mtime_ns)


def is_bundle(path: Path) -> bool:
    """Whether a file begins as a bundle does."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest and where its members are. Digests are not checked yet."""

    path: Path
    manifest: Mapping[str, Any]
    members: Mapping[str, StoredFile]

    @property
    def weights(self) -> tuple[Path, ...]:
        """The weight files, as paths that `locate` knows."""
        return tuple(self.path / name for name in sorted(self.members) if name.endswith(WEIGHT_SUFFIXES))

    @property
    def small(self) -> list[str]:
        """Members that are unpacked."""
        return sorted(set(self.members) - {path.name for path in self.weights} - {MANIFEST})

    def _digest_of(self, name: str) -> str:
        return str(self.manifest["files"][name]["blake3"])

    def read(self, name: str) -> bytes:
        """A small member, checked."""
        member = self.members[name]
        if member.size > MOST_SMALL_BYTES:
            raise _damaged(self.path, f"{name} has {member.size:,} bytes; at most {MOST_SMALL_BYTES:,} are unpacked")
        with self.path.open("rb") as file:
            file.seek(member.start)
            data = file.read(member.size)
        if blake3(data).hexdigest() != self._digest_of(name):
            raise _tampered(self.path, name)
        return data

    def unpack(self) -> Path:
        """The folder in the cache that has all small members; made if it is not there."""
        small = self.small
        identity = blake3(json.dumps([(name, self._digest_of(name)) for name in small]).encode()).hexdigest()[:32]
        folder = cache_dir("bundles", identity)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                made = Path(scratch) / "files"
                made.mkdir()
                for name in small:
                    (made / name).write_bytes(self.read(name))
                try:
                    made.rename(folder)
                except OSError:
                    if not folder.is_dir():  # otherwise another process was faster
                        raise
        for name in small:
            if blake3((folder / name).read_bytes()).hexdigest() != self._digest_of(name):
                raise CheckpointError(f"{folder / name} is not what {self.path} has: remove {folder}")
        return folder

    def check(self, always: bool = True) -> None:
        """Compare the digests of all weights. Not `always`: only if this state of the file was not checked before."""
        state = f"{self.path} {self.path.stat().st_size} {self.path.stat().st_mtime_ns} {self.path.stat().st_ino}"
        mark = cache_dir("bundles", f"checked-{blake3(state.encode()).hexdigest()[:32]}")
        if not always and mark.is_file():
            return
        with self.path.open("rb") as file:
            for path in self.weights:
                member = self.members[path.name]
                file.seek(member.start)
                if _copy(file, None, member.size) != self._digest_of(path.name):
                    raise _tampered(self.path, path.name)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a usable bundle: {what}")


def _tampered(path: Path, name: str) -> CheckpointError:
    return _damaged(path, f"{name} does not have the digest that {MANIFEST} lists (damaged or changed)")


def read_bundle(path: Path) -> Bundle:
    """Open a bundle and check its structure. Cached until the file changes."""
    state = path.stat()
    return _read_bundle(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_bundle(path: Path, size: int, mtime_ns: int) -> Bundle:
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_MEMBERS:
                raise _damaged(path, f"it has {len(entries):,} members; at most {MOST_MEMBERS:,}")
            members: dict[str, StoredFile] = {}
            for entry in entries:
                if entry.filename in members:
                    raise _damaged(path, f"the member {entry.filename!r} appears twice")
                members[entry.filename] = _place(path, file, entry, size, mtime_ns)
            manifest = _read_manifest(path, file, members)
    except (zipfile.BadZipFile, struct.error, EOFError, ValueError, NotImplementedError) as error:
        raise _damaged(path, f"it is cut short, or not a bundle ({error})") from None
    ordered = sorted(members.values(), key=lambda member: member.start)
    for one, following in itertools.pairwise(ordered):
        if following.start < one.end:
            raise _damaged(path, f"members overlap at byte {following.start:,}")
    return Bundle(path, manifest, members)


def _place(path: Path, file: BinaryIO, entry: zipfile.ZipInfo, size: int, mtime_ns: int) -> StoredFile:
    """Where a member's bytes are."""
    name = entry.filename
    if not is_plain(name):
        raise _damaged(path, f"the member {name!r} is not a plain file name")
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
        raise _damaged(path, f"the member {name} is compressed or encrypted")
    file.seek(entry.header_offset)
    magic, *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if magic != MAGIC or start + entry.file_size > size:
        raise _damaged(path, f"the member {name} would end at byte {start + entry.file_size:,} of {size:,}")
    if name.endswith(WEIGHT_SUFFIXES) and start % mmap.ALLOCATIONGRANULARITY:
        raise _damaged(
            path,
            f"the weights {name} begin at byte {start:,}, and this machine maps multiples of "
            f"{mmap.ALLOCATIONGRANULARITY:,}: unzip it into a folder and give that",
        )
    return StoredFile(path, start, entry.file_size, mtime_ns)


def is_plain(name: str) -> bool:
    """Whether a name is that of a file in the same folder, on any system."""
    bad = set('/\\:\0<>|"*?')
    return bool(name) and name not in (".", "..") and not bad & set(name) and len(name) <= 255 and name.isprintable()


def _read_manifest(path: Path, file: BinaryIO, members: Mapping[str, StoredFile]) -> Mapping[str, Any]:
    if (member := members.get(MANIFEST)) is None or member.size > MOST_MANIFEST_BYTES:
        raise _damaged(path, f"it has no {MANIFEST}: `quire bundle` writes bundles")
    file.seek(member.start)
    manifest = json.loads(file.read(member.size))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise _damaged(path, f"{MANIFEST} lists no files")
    if manifest.get("format") != FORMAT:
        raise _damaged(
            path,
            f"its format is {manifest.get('format')!r}, written by quire {manifest.get('quire')}; this version reads "
            f"format {FORMAT}",
        )
    listed = manifest["files"]
    if set(listed) != set(members) - {MANIFEST}:
        different = sorted(set(listed) ^ (set(members) - {MANIFEST}))
        raise _damaged(path, f"{MANIFEST} and the archive list different files: {', '.join(different[:5])}")
    for name, entry in listed.items():
        if not isinstance(entry, dict) or entry.get("bytes") != members[name].size:
            raise _damaged(path, f"{name} has {members[name].size:,} bytes, which is not what {MANIFEST} lists")
    return manifest


# Writing


def write_bundle(
    output: Path,
    sources: Mapping[str, Path],
    model: str,
    version: str,
    done: Callable[[int], None] = lambda count: None,
) -> Mapping[str, Any]:
    """Write these files, by the names they get, into one bundle; returns its manifest. `done` is called with the size
    of each piece that was written. The file appears under its name only when it is complete."""
    files: dict[str, Any] = {}
    for name, source in sources.items():
        if not is_plain(name):
            raise CheckpointError(f"{source}: the name {name!r} cannot be in a bundle")
        with source.open("rb") as file:
            size = source.stat().st_size
            files[name] = {"bytes": size, "blake3": _copy(file, None, size)}
    manifest = {"format": FORMAT, "quire": version, "model": model, "files": files}
    partial = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), json.dumps(manifest, indent=1))
            for name, source in sources.items():
                _add(archive, name, source, files[name], done)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def _add(
    archive: zipfile.ZipFile, name: str, source: Path, listed: Mapping[str, Any], done: Callable[[int], None]
) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.file_size = listed["bytes"]
    is_large = listed["bytes"] * 1.05 > zipfile.ZIP64_LIMIT
    if name.endswith(WEIGHT_SUFFIXES):
        assert archive.fp is not None
        # The header is 30 bytes, the name, 20 bytes for sizes of 64 bits, and this padding.
        before = archive.fp.tell() + _LOCAL_HEADER.size + len(name.encode()) + (20 if is_large else 0)
        padding = -(before + 4) % ALIGNMENT
        entry.extra = struct.pack("<HH", PADDING_ID, padding) + bytes(padding)
    with source.open("rb") as file, archive.open(entry, "w", force_zip64=is_large) as member:
        if _copy(file, member.write, listed["bytes"], done) != listed["blake3"]:
            raise CheckpointError(f"{source} changed while it was bundled")


def _copy(
    file: BinaryIO,
    write: Callable[[bytes], object] | None,
    size: int,
    done: Callable[[int], None] = lambda count: None,
) -> str:
    """Read `size` bytes, write them if there is where to, and return their digest."""
    digest = blake3(max_threads=blake3.AUTO)
    while size:
        chunk = file.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise EOFError("the file ends too early")
        digest.update(chunk)
        if write is not None:
            write(chunk)
            done(len(chunk))
        size -= len(chunk)
    return digest.hexdigest()
