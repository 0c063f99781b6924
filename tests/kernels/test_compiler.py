"""Compiling for a card that is not there, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
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
    subprocess.run(
        [sys.executable, "-c", "from tests.kernels.test_compiler import JOBS, compiler; compiler.compile_jobs(90, 132, JOBS)"],
        check=True, env=environment | {"TRITON_CACHE_DIR": str(cache)}, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return {str(path) for path in cache.rglob("*.cubin")}


def test_a_process_without_a_card_compiles_for_hopper_once(tmp_path: Path) -> None:
    made = compile_in_process(tmp_path)
    assert len(made) == len(JOBS)
    assert compile_in_process(tmp_path) == made


MANY = [JOBS[0]._replace(rows=rows) for rows in range(1, 20)]

Replace = Callable[[Callable[..., object]], None]


@pytest.fixture
def replace_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replace:
    """A card to compile for, a place for stamps; what the forks do is for the test to say."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_card", lambda: (90, 132))
    return lambda task: monkeypatch.setattr(compiler, "compile_jobs", task)


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_stamp_is_left_when_all_is_compiled(replace_work: Replace, tmp_path: Path, fails: bool) -> None:
    def task(arch: int, sms: int, jobs: list[Job]) -> None:
        for job in jobs:
            (tmp_path / f"rows-{job.rows}").touch()
        if fails:
            raise ValueError

    replace_work(task)
    compiler.Compilers(MANY).wait()
    assert len(list(tmp_path.glob("rows-*"))) == len(MANY)
    again = compiler.Compilers(MANY)
    again.wait()
    assert again.is_needed == fails
    assert compiler.Compilers(MANY[:2]).is_needed


def test_a_compiler_that_hangs_is_given_up(replace_work: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PATIENCE", 0.2)
    replace_work(lambda *_: time.sleep(60))
    began = time.monotonic()
    compilers = compiler.Compilers(MANY)
    compilers.wait()
    assert time.monotonic() - began < 30
    assert compiler.Compilers([]).is_needed
    for fork in compilers._processes:
        with pytest.raises(ProcessLookupError):
            os.kill(fork._pid, 0)


def test_a_few_jobs_are_not_worth_a_process(replace_work: Replace, tmp_path: Path) -> None:
    replace_work(lambda *_: (tmp_path / "started").touch())
    compiler.Compilers(JOBS).wait()
    assert not (tmp_path / "started").exists()
