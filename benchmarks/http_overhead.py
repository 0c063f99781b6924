"""Cost of HTTP: 16 concurrent streams from `quire serve` against `LLM.generate` on the same work, alternating.

python benchmarks/http_overhead.py             # five pairs; the server has two processes, this one reads the streams
python benchmarks/http_overhead.py --null      # the front alone, without a model: tokens a second of its CPU time
python benchmarks/http_overhead.py --null --against CHECKOUT      # the same, alternating with another checkout's server
python benchmarks/http_overhead.py --null --api-server-count 2    # two front processes on one port
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from async_overhead import check, offline
from front_overhead import ROOT, Load, http_load, null_server
from workloads import Work, mixed

from quire import LLM
from quire.cli.bench.load.client import Client
from quire.cli.bench.load.http import Host

BAR = 0.90
KEY = "benchmark"
SETTINGS = {"device": "cpu", "num_gpu_blocks_override": 768, "max_model_len": 1024}


class Served:
    """A server in its own processes."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        command = [
            sys.executable,
            "-m",
            "quire.cli.main",
            "serve",
            f"--port={self.port}",
            "--disable-log-stats",
            *flags,
        ]
        self._process = subprocess.Popen([*command, f"--port={self.port}", f"--admin-key={KEY}", "--log-level=warning"])
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until it is ready."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5)
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError("the server did not become ready")

    def forget(self) -> None:
        """Empty its prefix cache."""
        request = urllib.request.Request(
            f"{self.url}/admin/reset_prefix_cache", method="POST", headers={"Authorization": f"Bearer {KEY}"}
        )
        urllib.request.urlopen(request, timeout=10)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


async def streamed(served: Served, work: Work) -> float:
    """Seconds the work takes as concurrent streams."""
    client = Client(Host(served.url, {}), "/v1/completions")
    bodies = [
        json.dumps(
            {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}}
        ).encode()
        for prompt, count in zip(work.prompts, work.outputs, strict=True)
    ]  # fmt: skip
    begin = time.perf_counter()
    outcomes = await asyncio.gather(*(client.send(body) for body in bodies))
    seconds = time.perf_counter() - begin
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"{outcome.failure}: {outcome.detail}")
    check([outcome.output_tokens for outcome in outcomes], work)
    return seconds


def measure(args: argparse.Namespace) -> float:
    """The median of the pairs' ratios."""
    served = Served()
    try:
        here, work = LLM(**SETTINGS, disable_log_stats=True), mixed(args.quick)
        served.wait()
        gc.freeze()
        ratios = []
        for pair in range(args.pairs + 1):
            served.forget()
            alone, apart = offline(here, work), asyncio.run(streamed(served, work))
            if pair:  # the first is a warm-up
                ratios.append(alone / apart)
                rates = [work.output_tokens / seconds for seconds in (alone, apart)]
                print(f"LLM.generate {rates[0]:6.1f} tok/s   HTTP {rates[1]:6.1f} tok/s   {ratios[-1]:.3f}", flush=True)
        here.shutdown()
    finally:
        served.stop()
    ratio = statistics.median(ratios)
    print(f"median of {len(ratios)} pairs: {ratio:.3f} (bar: {BAR})")
    return ratio


def front_alone(args: argparse.Namespace, checkout: Path, fronts: int) -> Load:
    """Streams through the real server, whose engine computes nothing and makes `--pace` steps a second."""
    with null_server(args.pace, args.model, checkout, fronts) as address:
        return http_load(address, args.route, args.streams, args.output_tokens, args.prompt_words)


def measure_front(args: argparse.Namespace) -> int:
    """Tokens a second of the fronts' CPU time; with `--against`, and the ratio to another checkout's."""
    rates: list[float] = []
    ratios: list[float] = []
    for _ in range(args.pairs):
        load = front_alone(args, ROOT, args.api_server_count)
        rates.append(load.tokens_per_cpu_second)
        print(f"fronts: {args.api_server_count}; {load}", flush=True)
        if args.against is not None:
            other = front_alone(args, args.against.resolve(), args.against_api_server_count)
            ratios.append(rates[-1] / other.tokens_per_cpu_second)
            print(f"  against: {other}\n  ratio {ratios[-1]:.2f}", flush=True)
    print(f"median of {len(rates)}: {statistics.median(rates):,.0f} tokens a second per front core")
    if ratios:
        print(f"median ratio: {statistics.median(ratios):.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    null = parser.add_argument_group("the front alone")
    null.add_argument("--null", action="store_true", help="an engine that computes nothing; only the front is measured")
    null.add_argument("--model", default="smollm2-135m", help="whose tokenizer and chat template to use")
    null.add_argument("--route", choices=("chat", "completions"), default="chat")
    null.add_argument("--streams", type=int, default=64)
    null.add_argument("--prompt-words", type=int, default=64)
    null.add_argument("--output-tokens", type=int, default=256)
    null.add_argument("--pace", type=float, default=50.0, help="tokens per second of each stream; 0: as fast as it can")
    null.add_argument("--api-server-count", type=int, default=1, help="front processes")
    null.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    null.add_argument("--against-api-server-count", type=int, default=1, help="its front processes")
    args = parser.parse_args()
    if args.null:
        return measure_front(args)
    ratio = measure(args)
    return 0 if args.quick or ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
