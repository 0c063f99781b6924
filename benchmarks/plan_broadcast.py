"""How long a plan takes to reach every rank: over sockets alone, and through the ring of shared memory.

python benchmarks/plan_broadcast.py

Readers are processes that do what a rank does with a message: decode the frame, read the ring, answer with a byte. Both
methods alternate within one run, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

from quire.executor import wire
from quire.executor.rank import RankLink
from quire.executor.shared_ring import RingReader, RingWriter
from quire.messages.frames import unframe

SIZES = (1 << 10, 16 << 10, 64 << 10, 1 << 20)


def read(descriptor: int, ring: int, reader: int, readers: int) -> None:
    """A reader's process."""
    link = RankLink(socket.socket(fileno=descriptor), RingReader.inherit(ring, readers, reader))
    while True:
        for message in link.receive(None):
            if isinstance(message, wire.ShutdownRank):
                return
            link.send_bytes(b"!")


class Readers:
    """Reader processes with their sockets and the ring."""

    def __init__(self, count: int) -> None:
        self.ring = RingWriter(count)
        self.sockets = []
        self.processes = []
        for reader in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                numbers = [theirs.fileno(), self.ring.fileno(), reader, count]
                command = [sys.executable, __file__, "--reader", *map(str, numbers)]
                self.processes.append(subprocess.Popen(command, pass_fds=numbers[:2]))
            self.sockets.append(ours)

    def send(self, message: wire.Down, shared: bool) -> None:
        data = wire.encode(message)
        if shared:
            at = self.ring.put(unframe(data))
            if at is None:
                raise RuntimeError("the ring is full although everything was read")
            data = wire.encode(wire.Shared(at, len(unframe(data))))
        for sock in self.sockets:
            sock.sendall(data)

    def seconds(self, message: wire.Down, shared: bool) -> float:
        """From sending until all readers have answered."""
        begin = time.perf_counter()
        self.send(message, shared)
        for sock in self.sockets:
            sock.recv(1)
        return time.perf_counter() - begin

    def end(self) -> None:
        self.send(wire.ShutdownRank(), shared=False)
        for process in self.processes:
            process.wait()
        self.ring.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--reader", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read(*arguments.reader)
        return
    print("ranks   plan, KiB   sockets, µs   ring, µs   sockets ÷ ring")
    for count in arguments.readers:
        readers = Readers(count)
        for size in SIZES:
            message = wire.Step(os.urandom(size))
            times: dict[bool, list[float]] = {False: [], True: []}
            for i in range(2 * arguments.rounds + 20):
                seconds = readers.seconds(message, shared=bool(i % 2))
                if i >= 20:
                    times[bool(i % 2)].append(seconds)
            plain, shared = (1e6 * statistics.median(times[way]) for way in (False, True))
            print(f"{count:5d} {size / 1024:11.0f} {plain:13.0f} {shared:10.0f} {plain / shared:16.2f}", flush=True)
        readers.end()


if __name__ == "__main__":
    main()
