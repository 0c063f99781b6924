"""Compiling for a card that is not there, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton import compiler
from quire.kernels.triton.thin_candidates import Shape
from quire.kernels.triton.thin_parts import Config
from quire.kernels.triton.tuning import Job

JOBS = [
    Job(Shape("norm_linear", 512, 256), 1, torch.bfloat16, Config("vector", 4, warps=2), True),
    Job(Shape("linear", 512, 256), 16, torch.bfloat16, Config("tile", 64, 16, 64, 4, 4), False),
]


def compile_in_process(cache: Path) -> set[str]:
    """Names of the machine code in Triton's cache afterwards."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    order = {"arch": 90, "sms": 132, "jobs": [compiler.encode(job) for job in JOBS]}
    subprocess.run(
        [sys.executable, "-m", "quire.kernels.triton.compiler"], input=json.dumps(order), text=True, check=True,
        env=environment | {"TRITON_CACHE_DIR": str(cache)}, timeout=120,
    )  # fmt: skip
    return {str(path) for path in cache.rglob("*.cubin")}


def test_jobs_survive_the_journey() -> None:
    assert [compiler.decode(json.loads(json.dumps(compiler.encode(job)))) for job in JOBS] == JOBS


def test_a_process_without_a_card_compiles_for_hopper_once(tmp_path: Path) -> None:
    made = compile_in_process(tmp_path)
    assert len(made) == len(JOBS)
    assert compile_in_process(tmp_path) == made


class FakeProcess:
    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self, timeout: float | None = None) -> int:
        return self.code


@pytest.mark.parametrize("code", [0, 1], ids=["done", "failed"])
def test_a_stamp_is_left_when_all_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    started: list[int] = []
    monkeypatch.setattr(compiler, "_start", lambda jobs: (started.append(len(jobs)), FakeProcess(code))[1])
    jobs = [JOBS[0]._replace(rows=rows) for rows in range(1, 20)]
    compiler.Compilers(jobs).wait()
    assert sum(started) == len(jobs)
    again = compiler.Compilers(jobs)
    assert again.is_needed == (code != 0)
    assert compiler.Compilers(jobs[:-1]).is_needed


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "PATIENCE", 0.2)
    sleepers: list[subprocess.Popen[str]] = []

    def start(jobs: object) -> subprocess.Popen[str]:
        sleepers.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True))
        return sleepers[-1]

    monkeypatch.setattr(compiler, "_start", start)
    jobs = [JOBS[0]._replace(rows=rows) for rows in range(1, 20)]
    compiler.Compilers(jobs).wait()
    assert sleepers
    assert all(sleeper.returncode not in (None, 0) for sleeper in sleepers)
    assert compiler.Compilers([]).is_needed


def test_a_few_jobs_are_not_worth_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_start", lambda jobs: pytest.fail("a process was started"))
    compiler.Compilers(JOBS).wait()
