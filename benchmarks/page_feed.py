"""What the page's feed costs: throughput of a server with viewers and without, in turn.

python benchmarks/page_feed.py                      # the default model, ten viewers at 4 Hz
python benchmarks/page_feed.py --viewers 10 --hz 10 --rounds 8
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ADMIN = "bench"


class Viewers:
    """Reads the feed in threads until it is left."""

    def __init__(self, url: str, count: int, hz: int) -> None:
        self.frames = self.bytes = 0
        self.cost_ms = 0.0
        """What the views of one viewer took of the engine's time; all viewers share them."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(url, hz, number)) for number in range(count)]

    def _read(self, url: str, hz: int, number: int) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"}
        with (
            httpx.Client(timeout=30) as client,
            client.stream("GET", f"{url}/admin/feed?hz={hz}", headers=headers) as answer,
        ):
            for piece in answer.iter_raw():
                self.bytes += len(piece)
                self.frames += piece.count(b"\n\n")
                if not number:
                    self.cost_ms += sum(float(one) for one in re.findall(rb'"cost_ms":([\d.]+)', piece))
                if self._stop.is_set():
                    return

    def __enter__(self) -> Viewers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def own_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children so far."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own_seconds(pid) + sum(cpu_seconds(int(one)) for one in children)


def generate(url: str, requests: int, tokens: int) -> float:
    """Tokens a second of so many requests at once."""
    body = {"prompt": [f"Story {number}: once" for number in range(requests)], "max_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    return float(answer.json()["usage"]["completion_tokens"]) / (time.perf_counter() - begin)


def idle_share(url: str, pid: int, viewers: int, hz: int, seconds: float) -> float:
    """CPU seconds a second that viewers take of a server that does nothing else."""
    with Viewers(url, viewers, hz):
        time.sleep(1.0)
        before, began = cpu_seconds(pid), time.perf_counter()
        time.sleep(seconds)
        return (cpu_seconds(pid) - before) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--hz", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--idle-seconds", type=float, default=15.0)
    args = parser.parse_args()
    command = [sys.executable, "-m", "quire.cli.main", "serve", *([args.model] if args.model else [])]
    server = subprocess.Popen(
        [*command, "--port", "0", "--admin-key", ADMIN], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stderr is not None
        url = next(line.split()[-2].rstrip("/") for line in server.stderr if "page" in line and "http" in line)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        generate(url, args.requests, args.tokens)  # warm
        idle = [idle_share(url, server.pid, count, args.hz, args.idle_seconds) for count in (0, 1, args.viewers)]
        without, watched, read = [], [], 0
        engine, front, seconds = ({False: 0.0, True: 0.0} for _ in range(3))
        cost_ms = 0.0
        for number in range(args.rounds):
            for is_watched in (False, True) if number % 2 else (True, False):
                with Viewers(url, args.viewers if is_watched else 0, args.hz) as viewers:
                    time.sleep(0.5)
                    own, before, began = own_seconds(server.pid), cpu_seconds(server.pid), time.perf_counter()
                    rate = generate(url, args.requests, args.tokens)
                    own = own_seconds(server.pid) - own
                    front[is_watched] += own
                    engine[is_watched] += cpu_seconds(server.pid) - before - own
                    seconds[is_watched] += time.perf_counter() - began
                cost_ms += viewers.cost_ms
                (watched if is_watched else without).append(rate)
                read += viewers.bytes
    finally:
        server.terminate()
        server.wait(60)
    pairs = [one / two - 1 for one, two in zip(watched, without, strict=True)]
    shares = ", ".join(f"{100 * share:.2f} %" for share in idle)
    print(f"an idle server takes of one core, with no viewer, one, and {args.viewers}: {shares}")
    print(f"without viewers: {statistics.median(without):.1f} tokens/s (median of {args.rounds})")
    print(f"{args.viewers} viewers at {args.hz} Hz: {statistics.median(watched):.1f} tokens/s, {read >> 10} KiB read")
    print(f"views took {cost_ms / 10 / seconds[True]:.2f} % of the engine's time")
    more = front[True] / seconds[True] - front[False] / seconds[False]
    print(f"CPU time of the engine: {engine[True] / engine[False] - 1:+.1%}; of the front: {more:+.2%} of one core")
    print(f"difference: {statistics.median(pairs):+.1%} (median of pairs; from {min(pairs):+.1%} to {max(pairs):+.1%})")


if __name__ == "__main__":
    main()
