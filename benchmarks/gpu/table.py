"""The table of docs/performance.md, from one command on a GPU.

    python benchmarks/gpu/table.py                                       # everything
    python benchmarks/gpu/table.py --models qwen3-0.6b --workloads bs1 nano
    python benchmarks/gpu/table.py --settings '{"enforce_eager": true}' --json eager.json

Models are folders with a config.json (names in benchmarks/gpu/models, or paths) and get random weights: speed is
measured, not text. Every model runs in its own process. Results are medians of --repeats runs, each from an empty
prefix cache, with the smallest and the largest beside. Each run adds its results to the JSON file and prints the table
of all that is in it.

    start       seconds from the start of the process until the engine is ready: cold (no compiled kernels, no tuning,
                empty cache folders) and a second time
    bs1         one request, 512 in, 256 out: milliseconds a token
    nano        256 requests, 100 to 1,024 in, 100 to 1,024 out: output tokens a second
    decode256   256 requests, 128 in, 512 out: output tokens a second
    prefill     128 requests, 2,048 in, 1 out: tokens a second

and, if named, the workloads of `measure.py` that are not in the table: a few requests at once (bs8, bs32:
milliseconds a step), and request features beside plain requests (plain, filtered, listed, penalised, logprobs; prompts,
prompt_logprobs).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import TABLE, WORKLOADS

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
BARS = HERE / "bars.json"
PACKAGES = ("quire", "torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class Measure:
    """The unit of a result, and how it is judged."""

    unit: str
    lower_is_better: bool = False
    digits: int = 0

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f} {self.unit}"

    def reaches(self, value: float, bar: float) -> bool:
        return value <= bar if self.lower_is_better else value >= bar


MEASURES = {
    "start, cold": Measure("s", lower_is_better=True, digits=1),
    "start, second": Measure("s", lower_is_better=True, digits=1),
    "bs1": Measure("ms/token", lower_is_better=True, digits=3),
    "nano": Measure("tok/s"),
    "decode256": Measure("tok/s"),
    "prefill": Measure("tok/s"),
}
"""The table's rows."""
STEPS = {name: Measure("ms/step", lower_is_better=True, digits=3) for name in ("bs8", "bs32")}
ALL = {**MEASURES, **STEPS, **{name: Measure("tok/s") for name in WORKLOADS if name not in {*MEASURES, *STEPS}}}


def result_of(workload: str, run: dict[str, float]) -> float:
    """The number a workload is judged by."""
    work = WORKLOADS[workload]
    if ALL[workload].lower_is_better:
        return 1000 * run["seconds"] * work.requests / run["out_tokens"]
    tokens = run["in_tokens"] + run["out_tokens"] if work.outputs == (1, 1) else run["out_tokens"]
    return tokens / run["seconds"]


# Running


class Results:
    """The results so far, in a file that grows with every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"figures": {}}
        self.data["versions"] = versions()
        self.data["command"] = " ".join(sys.argv)

    def add(self, model: str, name: str, values: list[float], **more: Any) -> None:
        """Replace the results of a workload."""
        entry = {"values": values, "median": statistics.median(values), "unit": ALL[name].unit}
        entry["date"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
        self.data["figures"].setdefault(model, {})[name] = {**entry, **more}
        self._path.write_text(json.dumps(self.data, indent=2) + "\n")

    def record_engine(self, model: str, engine: dict[str, Any]) -> None:
        self.data.setdefault("engines", {})[model] = engine


def versions() -> dict[str, str]:
    """Versions of the software that was measured."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "commit": _commit()}


def _commit() -> str:
    try:
        result = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return "unknown"
    return result.stdout.strip() or "unknown"


def measure(model: Path, workloads: list[str], args: argparse.Namespace, **caches: str) -> Iterator[dict[str, Any]]:
    """The JSON lines that the measuring process prints, as they arrive."""
    command = [sys.executable, str(HERE / "measure.py"), str(model), *workloads, "--repeats", str(args.repeats)]
    command += ["--settings", json.dumps(args.settings), *(["--quick"] if args.quick else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **caches})
    if process.stdout is None:
        raise RuntimeError("the measuring process has no pipe")
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
        else:
            print(line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"measuring {model.name} ended with status {process.returncode}; see above")


def measure_starts(model: Path, results: Results, args: argparse.Namespace) -> None:
    """One cold start, then --repeats starts with the caches that it filled."""
    with tempfile.TemporaryDirectory(prefix="quire-start-") as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "QUIRE_CACHE": f"{folder}/quire"}
        starts = []
        for number in range(1 + args.repeats):
            for line in measure(model, [], args, **caches):
                starts.append(line["start"])
                results.record_engine(model.name, line["engine"])
            print(f"  {model.name}: start {number + 1}: {starts[-1]:.1f} s", flush=True)
    results.add(model.name, "start, cold", starts[:1])
    results.add(model.name, "start, second", starts[1:])


def measure_workloads(model: Path, names: list[str], results: Results, args: argparse.Namespace) -> None:
    """All of a model's workloads in one process."""
    runs: dict[str, list[dict[str, float]]] = {}
    for line in measure(model, names, args):
        if "start" in line:
            results.record_engine(model.name, line["engine"])
            print(f"  {model.name}: ready after {line['start']:.1f} s on {line['engine']['device']}", flush=True)
            continue
        name = line.pop("workload")
        runs.setdefault(name, []).append(line)
        values = [result_of(name, run) for run in runs[name]]
        print(f"  {model.name}: {name}: {ALL[name].show(values[-1])} in {line['seconds']:.2f} s", flush=True)
        results.add(model.name, name, values, runs=runs[name], settings=args.settings)


# Printing


def table(data: dict[str, Any], bars: dict[str, Any]) -> str:
    """All results so far, beside their bars and goals."""
    rows = [("model", "workload", "median", "spread", "bar", "goal", "")]
    for model, entries in data["figures"].items():
        for name, how in ALL.items():
            if (entry := entries.get(name)) is None:
                continue
            held = bars.get(model, {}).get(name, {})
            bar, goal = held.get("bar"), held.get("goal")
            low, high = min(entry["values"]), max(entry["values"])
            spread = f"{low:,.{how.digits}f}–{high:,.{how.digits}f}" if len(entry["values"]) > 1 else ""
            shown = ["" if value is None else how.show(value) for value in (bar, goal)]
            rows.append((model, name, how.show(entry["median"]), spread, *shown, verdict(entry["median"], how, held)))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    words, numbers = range(2), range(2, 7)
    return "\n".join(
        "  ".join([*(f"{row[i]:<{widths[i]}}" for i in words), *(f"{row[i]:>{widths[i]}}" for i in numbers)]).rstrip()
        for row in rows
    )


def verdict(value: float, how: Measure, held: dict[str, float | None]) -> str:
    """The highest mark a result reaches."""
    for mark in ("goal", "bar"):
        if (bar := held.get(mark)) is not None and how.reaches(value, bar):
            return mark
    return "MISS" if held.get("bar") is not None else ""


def find_model(name: str) -> Path:
    """A folder, by its path or by its name in models/."""
    for path in (Path(name), MODELS / name):
        if (path / "config.json").is_file():
            return path.resolve()
    known = ", ".join(sorted(path.name for path in MODELS.iterdir()))
    raise SystemExit(f"no model {name!r}: give a folder with a config.json, or one of {known}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", default=["start", *TABLE], choices=["start", *WORKLOADS])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload (default: 3)")
    parser.add_argument("--json", type=Path, default=Path("gpu-table.json"), help="default: gpu-table.json")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further engine settings")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    args = parser.parse_args()
    models = [find_model(name) for name in args.models]
    results = Results(args.json)
    for model in models:
        if "start" in args.workloads:
            measure_starts(model, results, args)
        names = [name for name in args.workloads if name != "start"]
        if names:
            measure_workloads(model, names, results, args)
    print(f"\n{table(results.data, {} if args.quick else json.loads(BARS.read_text()))}")
    if args.quick:
        print("\n--quick: sizes are tiny and these results mean nothing")
    print(f"written to {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
