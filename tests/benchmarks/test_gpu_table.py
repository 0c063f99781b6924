"""The script behind docs/performance.md: it runs, its pieces add up, and its metrics are judged correctly."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.loading.hub import resolve
from quire.loading.model_config import read_model_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("table")
    finally:
        sys.path.remove(str(FOLDER))


def test_it_runs_in_pieces_that_add_up(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    for workloads in (["bs1"], ["nano", "prefill", "listed", "logprobs", "prompt_logprobs"]):
        command = [sys.executable, FOLDER / "table.py", "--quick", "--repeats", "2", "--json", file]
        settings = ["--settings", '{"device": "cpu", "num_gpu_blocks_override": 64}']
        ran = subprocess.run(
            [*command, *settings, "--models", tiny_model, "--workloads", *workloads], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
    figures = json.loads(file.read_text())["figures"][tiny_model.name]
    assert list(figures) == ["bs1", "nano", "prefill", "listed", "logprobs", "prompt_logprobs"]
    assert all(len(entry["values"]) == 2 and entry["median"] > 0 for entry in figures.values())
    assert figures["prefill"]["runs"][0]["out_tokens"] == 4
    assert all(name in ran.stdout for name in ("bs1", "nano", "prefill", "ms/token"))


@pytest.mark.parametrize(
    ("workload", "run", "expected"),
    [
        ("bs1", {"seconds": 0.5, "in_tokens": 512, "out_tokens": 250}, 2.0),
        ("nano", {"seconds": 2.0, "in_tokens": 1000, "out_tokens": 600}, 300.0),
        ("prefill", {"seconds": 2.0, "in_tokens": 1000, "out_tokens": 2}, 501.0),
        ("bs8", {"seconds": 1.0, "in_tokens": 4096, "out_tokens": 2000}, 4.0),
        ("logprobs", {"seconds": 2.0, "in_tokens": 1000, "out_tokens": 600}, 300.0),
        ("prompt_logprobs", {"seconds": 2.0, "in_tokens": 1000, "out_tokens": 2}, 501.0),
    ],
)
def test_metrics(script: ModuleType, workload: str, run: dict[str, float], expected: float) -> None:
    assert script.result_of(workload, run) == pytest.approx(expected)


def test_low_is_good_for_times_and_high_for_rates(script: ModuleType) -> None:
    held = {"bar": 10.0, "goal": 5.0}
    time, rate = script.MEASURES["bs1"], script.MEASURES["nano"]
    assert [script.verdict(value, time, held) for value in (4, 7, 11)] == ["goal", "bar", "MISS"]
    assert [script.verdict(value, rate, {"bar": 5.0, "goal": 10.0}) for value in (4, 7, 11)] == ["MISS", "bar", "goal"]
    assert script.verdict(1, rate, {"bar": None}) == ""


def test_the_table_shows_median_spread_and_targets(script: ModuleType) -> None:
    data = {"figures": {"m": {"nano": {"values": [900.0, 1000.0, 1100.0], "median": 1000.0}}}}
    line = script.table(data, {"m": {"nano": {"bar": 950, "goal": 2000}}}).splitlines()[1]
    assert " ".join(line.split()) == "m nano 1,000 tok/s 900–1,100 950 tok/s 2,000 tok/s bar"


def test_the_targets_name_what_is_measured(script: ModuleType) -> None:
    bars = json.loads((FOLDER / "bars.json").read_text())
    for model, entries in bars.items():
        assert (FOLDER / "models" / model / "config.json").is_file()
        assert set(entries) == set(script.MEASURES)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-4b", "llama-3.2-1b", "mixtral-8x7b"])
def test_the_models_can_be_read(name: str) -> None:
    model = read_model_config(resolve(str(FOLDER / "models" / name)))
    assert model.dtype == "bfloat16" and model.num_kv_heads == 8
