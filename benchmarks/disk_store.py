"""The disk tier: block reads and writes against plain file IO, and ten thousand sessions.

python benchmarks/disk_store.py [--folder PATH] [--block-mib 0.7] [--blocks 256] [--sessions 10000]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.offload.io_threads import IOThreads
from quire.kvcache.prefix_cache import ContentKeys
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def blocks(folder: Path, block_bytes: int, count: int) -> None:
    """Megabytes a second of the store, of one big file, and of one file a block, interleaved on the same disk."""
    keys = [blake3(i.to_bytes(4, "little")).digest() for i in range(count)]
    payload = memoryview(bytearray(os.urandom(block_bytes)))
    into = memoryview(bytearray(block_bytes))
    buffers = [memoryview(bytearray(block_bytes)) for _ in range(4)]
    total = count * block_bytes / 1e6
    store = DiskStore.open(folder / "kv", b"benchmark", block_bytes, 2 * count * block_bytes + (1 << 26))
    io = IOThreads(store, threads=2)

    def one_file(write: bool) -> None:
        fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
        for i in range(count):
            if write:
                os.pwrite(fd, payload, i * block_bytes)
            else:
                os.preadv(fd, [into], i * block_bytes)
        os.close(fd)

    def file_a_block(write: bool) -> None:
        (folder / "files").mkdir(exist_ok=True)
        for key in keys:
            path = f"{folder}/files/{key.hex()}"
            if write:
                fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT)
                os.pwrite(fd, payload, 0)
                os.close(fd)
                os.rename(path + ".new", path)
            else:
                fd = os.open(path, os.O_RDONLY)
                os.preadv(fd, [into], 0)
                os.close(fd)

    def through_store(write: bool) -> None:
        for key in keys:
            assert store.write(key, payload) if write else store.read(key, into)

    def through_threads(write: bool) -> None:
        free, waiting = list(buffers), list(keys)
        while waiting or io.pending:
            while free and waiting:
                submit = io.submit_write if write else io.submit_read
                submit(waiting.pop(), free.pop())
            io.sleep(10)
            for task in io.poll():
                assert task.ok and task.buffer is not None
                free.append(task.buffer)

    ways = {"one plain file": one_file, "a file a block": file_a_block, "store": through_store}
    print(f"{count} blocks of {block_bytes / 2**20:.2f} MiB, MB/s (written into, read from the page cache)")
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for name, way in ways.items():
            rates.setdefault(f"{name}: write", []).append(total / timed(lambda way=way: way(True)))  # type: ignore[misc]
            rates.setdefault(f"{name}: read", []).append(total / timed(lambda way=way: way(False)))  # type: ignore[misc]
        store.discard(keys)
        rates.setdefault("store, 2 threads: write", []).append(total / timed(lambda: through_threads(True)))
        rates.setdefault("store, 2 threads: read", []).append(total / timed(lambda: through_threads(False)))
        store.discard(keys)
    for name, values in sorted(rates.items()):
        print(f"  {name:28} {statistics.median(values):8.0f}")
    io.close()
    through_store(True)
    store.close()
    begin = time.perf_counter()
    DiskStore.open(folder / "kv", b"benchmark", block_bytes, 2 * count * block_bytes + (1 << 26)).close()
    print(f"  open and close with {count} blocks: {1e3 * (time.perf_counter() - begin):.1f} ms")


def sessions(folder: Path, count: int) -> None:
    """Many sessions with a common beginning."""
    prompt, rng = list(range(512)), random.Random(0)
    keys = ContentKeys(16, b"benchmark")
    times: dict[int, list[float]] = {}
    store = SessionStore.open(folder / "sessions")
    begin = time.perf_counter()
    for i in range(count):
        tokens = prompt + [rng.randrange(50_000) for _ in range(32)]
        times.setdefault(i // (count // 4), []).append(
            timed(lambda i=i, t=tokens: store.create(f"agent-{i}", t, durable=False))
        )  # type: ignore[misc]
        store.set_kv(f"agent-{i}", len(tokens), b"benchmark")
    store.commit()
    wall = time.perf_counter() - begin
    print(f"{count} sessions of 512 common and 32 own tokens")
    print(f"  create and mark KV, one commit at the end: {wall:.2f} s")
    quarters = [f"{1e6 * statistics.median(values):.0f}" for _, values in sorted(times.items())]
    print(f"  median µs to create, by quarters: {' '.join(quarters[:4])}")
    durable = [timed(lambda i=i: store.append(f"agent-{i}", [1])) for i in range(50)]  # type: ignore[misc]
    print(f"  one durable append: {1e3 * statistics.median(durable):.2f} ms (median of 50)")
    stats = store.stats()
    print(f"  log {stats.log_bytes / 1e6:.1f} MB, {stats.log_bytes / count:.0f} B a session, {stats.chunks} chunks")
    store.close()
    begin = time.perf_counter()
    store = SessionStore.open(folder / "sessions")
    print(f"  open: {time.perf_counter() - begin:.2f} s")
    disk = DiskStore.open(folder / "kv-of-sessions", b"benchmark", 4096, 1 << 28)
    pinned = PinnedBlocks(store, disk, keys, b"benchmark")
    print(f"  pin the blocks of all: {timed(pinned.pin_all):.2f} s")
    names = [f"agent-{rng.randrange(count)}" for _ in range(500)]
    print(f"  tokens of one: {1e6 * statistics.median(timed(lambda n=n: store.tokens(n)) for n in names):.0f} µs")  # type: ignore[misc]
    cursors = [rng.randrange(count) for _ in range(200)]
    print(f"  a page of 100: {1e6 * statistics.median(timed(lambda c=c: store.page(c, 100)) for c in cursors):.0f} µs")  # type: ignore[misc]
    forks = [timed(lambda i=i: store.fork(f"agent-{i}", f"fork-{i}", durable=False)) for i in range(500)]  # type: ignore[misc]
    print(f"  a fork, before commit: {1e6 * statistics.median(forks):.0f} µs")
    disk.close()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to measure; a temporary folder unless given")
    parser.add_argument("--block-mib", type=float, default=0.7)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--sessions", type=int, default=10_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quire-disk-", dir=options.folder))
    try:
        blocks(folder, int(options.block_mib * 2**20), options.blocks)
        sessions(folder, options.sessions)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
