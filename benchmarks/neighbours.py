"""Time a token of one request, alone and beside busy processes, for this checkout and optionally another one.

    python benchmarks/neighbours.py [--against CHECKOUT] [--model M] [--tokens 64] [--rounds 5] [--busy 0,1,2]

Each checkout has a process of its own with the model loaded; they generate in turn, each round with every number of
busy processes, and the median over the rounds counts. Beside N busy processes on C cores a program of C threads that
loses no time gets C / (C + N) of the cores it gets alone; the column `lost` is the rest of the slowdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

SERVE = """
import json, os, sys, time
from quire import LLM, SamplingParams
model, settings, temperature = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
with LLM(model, device="cpu", max_model_len=1024, disable_log_stats=True, **settings) as llm:
    def generate(tokens):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, top_p=0.9, seed=1, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(["The sea"], params, use_tqdm=False)
        return time.perf_counter() - start
    generate(16)
    print("ready", flush=True)
    for line in sys.stdin:
        tokens = int(line)
        first, all = generate(1), generate(tokens + 1)
        print((all - first) / tokens, flush=True)
"""


class Engine:
    """A process with the model, of one checkout."""

    def __init__(self, checkout: Path, model: str, settings: str, temperature: float) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-c", SERVE, model, settings, str(temperature)]
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while self._read() != "ready":
            pass

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the engine ended with {self._process.wait()}")
        return line.strip()

    def token_seconds(self, tokens: int) -> float:
        """Seconds a token, without the prompt's."""
        assert self._process.stdin is not None
        print(tokens, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """`count` processes that each compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--settings", default="{}", help="engine settings, as JSON")
    parser.add_argument("--against-settings", help="those of the other engine; unset: the same")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", default="0,1,2")
    options = parser.parse_args()
    counts = [int(count) for count in options.busy.split(",")]
    engines = {"this": Engine(HERE, options.model, options.settings, options.temperature)}
    if options.against or options.against_settings:
        other = options.against_settings or options.settings
        engines["other"] = Engine(options.against or HERE, options.model, other, options.temperature)
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in engines for count in counts}
    for _ in range(options.rounds):
        for count in counts:
            for name, engine in engines.items():
                with busy_processes(count):
                    times[name, count].append(engine.token_seconds(options.tokens))
    for engine in engines.values():
        engine.close()
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}, settings {json.loads(options.settings)}")
    for count in counts:
        cells = []
        for name in engines:
            seconds, alone = (statistics.median(times[name, n]) for n in (count, counts[0]))
            lost = seconds / alone / ((cores + count) / (cores + counts[0]))
            cells.append(f"{name} {seconds * 1e3:7.2f} ms ({seconds / alone:5.2f}x, lost {lost:4.2f}x)")
        if "other" in engines:
            each = (statistics.median(times[name, count]) for name in ("this", "other"))
            cells.append(f"this / other {next(each) / next(each):5.2f}")
        print(f"{count} busy: " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
