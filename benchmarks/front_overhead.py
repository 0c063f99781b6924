"""Cost of the front process: CPU time per streamed token, and the delay it adds to the first token.

python benchmarks/front_overhead.py                     # chat, 64 streams; checks the two targets
python benchmarks/front_overhead.py --route completions
python benchmarks/front_overhead.py --python            # AsyncLLM alone, without HTTP
python benchmarks/front_overhead.py --python --replicas 2

The engine is benchmarks/null_engine.py in its own process; this process is the client. Streams are paced: every step
yields a token for each, every token is one event, and the front's time is its CPU time as the kernel counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

WANTED_TOKENS = 15_000
"""Per second of the front's CPU time."""
WANTED_TTFT = 0.002
"""Seconds that the front may add to the median time to first token, at a quarter of that load."""


@dataclass
class Load:
    """Results of many paced streams."""

    tokens: int
    events: int
    seconds: float
    front: float
    """CPU seconds of the front process."""

    @property
    def tokens_per_cpu_second(self) -> float:
        """Tokens merged into another token's event, because something was slow, are not counted."""
        return min(self.tokens, self.events) / self.front

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens in {self.events:,} events over {self.seconds:.1f} s; the front ran "
            f"{self.front:.2f} s: {1e6 / self.tokens_per_cpu_second:.1f} µs a token, "
            f"{self.tokens_per_cpu_second:,.0f} tokens a CPU second"
        )


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, with nanosecond resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def front_seconds(pid: int) -> float:
    """CPU time of a server's front processes: its own, and those it has started besides engines."""
    fronts = [int(child) for child in _children(pid) if b"quire.server.fronts" in _command(child)]
    return cpu_seconds(pid) + sum(map(cpu_seconds, fronts))


def _children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def null_server(
    pace: float, model: str, checkout: Path = ROOT, fronts: int = 1, **settings: object
) -> Iterator[tuple[str, int, int]]:
    """Starts a server of a checkout with so many fronts; yields host, port and process id. `settings`: the engine's."""
    environment = {**os.environ, "NULL_ENGINE_PACE": str(pace), "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / "benchmarks" / "null_server.py"), model]
    command += ["0", str(fronts), json.dumps(settings)] if fronts != 1 or settings else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            address = urlsplit(line.strip())
            yield str(address.hostname), int(address.port or 80), process.pid
        finally:
            process.terminate()


class Stream:
    """One streaming request, read as cheaply as Python allows. A connection can be used for several in sequence."""

    def __init__(
        self,
        host: str,
        port: int,
        route: str,
        max_tokens: int,
        connection: socket.socket | None = None,
        prompt: str = "Once upon a time",
    ) -> None:
        fields: dict[str, object] = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        if route == "chat":
            path, content = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
        else:
            path, content = "/v1/completions", {"prompt": prompt}
        body = json.dumps({**content, **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.events = 0
        self.first: float | None = None
        """Seconds until the first event with text."""
        self.is_over = False
        self._tail = b""
        self._keeps = connection is not None
        self.socket = socket.create_connection((host, port)) if connection is None else connection
        self.begin = time.perf_counter()
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def read(self) -> None:
        """Read what has arrived."""
        data = self.socket.recv(1 << 16)
        now = time.perf_counter()
        if not data:
            raise SystemExit("the server closed the connection")
        if not self.events and data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server returned an error: {data.decode(errors='replace')}")
        data = self._tail + data
        if self.first is None and b"data: {" in data:
            self._find_first(data, now)
        # Events end in an empty line; nothing else in a body does.
        self.events += data.count(b"\n\n")
        self._tail = data[-1:] if data.endswith(b"\n") and not data.endswith(b"\n\n") else b""
        if data.endswith(b"0\r\n\r\n"):  # the last chunk
            self.is_over = True
            if not self._keeps:
                self.socket.close()

    def _find_first(self, data: bytes, now: float) -> None:
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    self.first = now - self.begin
                    return


def read_all(streams: list[Stream]) -> None:
    """Read until all have ended."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                key.data.read()
                if key.data.is_over:
                    selector.unregister(key.fileobj)


def http_load(address: tuple[str, int, int], route: str, streams: int, tokens: int, words: int = 4) -> Load:
    """Many concurrent streams with prompts of `words` words, and the CPU time they cost the server's fronts."""
    host, port, pid = address
    read_all([Stream(host, port, route, 20) for _ in range(streams)])  # warm-up
    ran, begin = front_seconds(pid), time.perf_counter()
    opened = [Stream(host, port, route, tokens, prompt=f"{number}" + " word" * words) for number in range(streams)]
    read_all(opened)
    return Load(
        streams * tokens,
        sum(stream.events for stream in opened),
        time.perf_counter() - begin,
        front_seconds(pid) - ran,
    )


def http_first_tokens(address: tuple[str, int, int], route: str, streams: int, probes: int, tokens: int) -> float:
    """Median seconds to the first token of single requests next to paced streams, which another process reads."""
    host, port, _ = address
    background = multiprocessing.get_context("fork").Process(
        target=keep_reading, args=(host, port, route, streams, tokens), daemon=True
    )
    background.start()
    times = []
    try:
        time.sleep(1.0)
        with socket.create_connection((host, port)) as connection, realtime_priority():
            for _ in range(probes):
                time.sleep(0.02)
                probe = Stream(host, port, route, 2, connection)
                read_all([probe])
                times.append(probe.first or float("nan"))
        assert background.is_alive(), "the background streams were not read"
    finally:
        background.kill()
        background.join()
    return statistics.median(times)


@contextmanager
def realtime_priority() -> Iterator[None]:
    """Run this process at real-time priority if permitted: the server is measured, not the client."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def keep_reading(host: str, port: int, route: str, streams: int, tokens: int) -> None:
    """Keep `streams` streams open: one that ends is replaced."""
    with selectors.DefaultSelector() as selector:
        for _ in range(streams):
            stream = Stream(host, port, route, tokens)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while True:
            for key, _ in selector.select():
                key.data.read()
                if key.data.is_over:
                    selector.unregister(key.fileobj)
                    stream = Stream(host, port, route, tokens)
                    selector.register(stream.socket, selectors.EVENT_READ, stream)


def engine_first_tokens(model: str, streams: int, probes: int, pace: float) -> float:
    """The same for the engine process alone: from the message that adds a request to the one with its first token."""
    from quire.config import EngineConfig
    from quire.engine import ipc
    from quire.engine.remote import RemoteEngine
    from quire.loading.hub import find_model
    from quire.loading.model_config import read_model_config
    from quire.messages.frames import FrameSplitter
    from quire.messages.request import NewRequest
    from quire.messages.sampling import SamplingParams

    os.environ["NULL_ENGINE_PACE"] = str(pace)
    config = EngineConfig(model=model)
    files = find_model(config)
    engine = RemoteEngine(config, files, read_model_config(files, None), "benchmarks.null_engine")
    engine.wait_until_ready()
    engine._socket.setblocking(True)
    frames = FrameSplitter()
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def add(name: str, limit: int) -> None:
        engine._socket.sendall(ipc.encode(ipc.Add(NewRequest(name, [5, 6, 7], params, limit))))

    for i in range(streams):
        add(f"stream-{i}", engine.info.max_model_len)
    times = []
    with realtime_priority():
        for i in range(probes):
            time.sleep(0.02)
            begin = time.perf_counter()
            add(f"probe-{i}", 4)
            seen = False
            while not seen:
                for payload in frames.feed(engine._socket.recv(1 << 20)):
                    message = ipc.decode_up(payload)
                    if isinstance(message, ipc.Outputs):
                        seen = seen or any(key[0] == f"probe-{i}" for key in message.outputs.keys)
            times.append(time.perf_counter() - begin)
    engine.kill()
    return statistics.median(times)


def python_load(model: str, streams: int, tokens: int, pace: float, replicas: int = 1) -> Load:
    """`AsyncLLM.generate` without HTTP, in this process, with `replicas` engines."""
    from quire.api.async_llm import AsyncLLM
    from quire.messages.sampling import RequestOutputKind, SamplingParams

    class NullLLM(AsyncLLM):
        engine_module = "benchmarks.null_engine"

    async def read(llm: AsyncLLM, count: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        return sum([1 async for _ in llm.generate([5, 6, 7], params)])

    async def work() -> Load:
        several = {"data_parallel_size": replicas} if replicas > 1 else {}
        async with NullLLM(model, **several) as llm:
            await asyncio.gather(*(read(llm, 20) for _ in range(streams)))
            ran, begin = _own_seconds(), time.perf_counter()
            events = sum(await asyncio.gather(*(read(llm, tokens) for _ in range(streams))))
            return Load(streams * tokens, events, time.perf_counter() - begin, _own_seconds() - ran)

    os.environ["NULL_ENGINE_PACE"] = str(pace)
    return asyncio.run(work())


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and chat template to use")
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--pace", type=float, default=100.0, help="tokens per second of each stream")
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--python", action="store_true", help="AsyncLLM alone")
    parser.add_argument("--replicas", type=int, default=1, help="with --python: number of engines")
    args = parser.parse_args()
    tokens = int(args.seconds * args.pace)
    if args.python:
        print("AsyncLLM:", python_load(args.model, args.streams, tokens, args.pace, args.replicas))
        return 0
    with null_server(args.pace, args.model) as address:
        load = http_load(address, args.route, args.streams, tokens)
    print("HTTP:", load)
    pace = WANTED_TOKENS / 4 / args.streams
    own = engine_first_tokens(args.model, args.streams, args.probes, pace)
    with null_server(pace, args.model) as address:
        through = http_first_tokens(address, args.route, args.streams, args.probes, tokens=2000)
    print(
        f"first token next to {WANTED_TOKENS / 4:,.0f} tokens/s: {1000 * through:.2f} ms through HTTP, "
        f"{1000 * own:.2f} ms by the engine alone: {1000 * (through - own):.2f} ms added"
    )
    good = load.tokens_per_cpu_second >= WANTED_TOKENS and through - own < WANTED_TTFT
    print(
        f"wanted: {WANTED_TOKENS:,} tokens a CPU second, under {1000 * WANTED_TTFT:.0f} ms added: "
        f"{'met' if good else 'NOT MET'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
