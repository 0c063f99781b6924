"""How many threads an engine on a CPU has: by its setting, its environment, its affinity and its container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.platforms import cpu

CORES = 6


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that may run on six cores, torch with as many threads, and a folder of control groups."""
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    monkeypatch.setattr(cpu, "OWN_CGROUPS", tmp_path / "own")
    torch.set_num_threads(CORES)
    yield tmp_path
    torch.set_num_threads(threads)


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.")).write_text(text)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", CORES), ("50000 100000", 1), ("100000 100000", 1), ("250000 100000", 3), ("900000 100000", CORES)],
)
def test_the_quota_of_a_container_counts(machine: Path, limit: str, cores: int) -> None:
    (machine / "own").write_text("0::/\n")
    put(machine, cpu_max=limit)
    assert cpu.usable_cores() == cores


def test_the_tightest_of_nested_groups_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/system.slice/quire.service\n")
    put(machine / "system.slice", cpu_max="200000 100000")
    put(machine / "system.slice/quire.service", cpu_max="400000 100000")
    assert cpu.usable_cores() == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", CORES), ("150000", 2)])
def test_the_quota_of_older_groups_counts(machine: Path, quota: str, cores: int) -> None:
    (machine / "own").write_text("5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n")
    put(machine / "cpu,cpuacct/box", cpu_cfs_quota_us=quota, cpu_cfs_period_us="100000")
    put(machine / "memory/box", cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")
    assert cpu.usable_cores() == cores


def test_without_control_groups_the_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu._cpu_quota() == math.inf and cpu.usable_cores() == CORES
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cpu.usable_cores() == 2


def test_threads_are_those_wanted_or_the_environments_or_the_cores(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "own").write_text("0::/\n")
    put(machine, cpu_max="200000 100000")
    cpu.set_threads(5)
    assert torch.get_num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    cpu.set_threads()
    assert torch.get_num_threads() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    cpu.set_threads()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)  # fewer, chosen by the program
    cpu.set_threads()
    assert torch.get_num_threads() == 1


def test_an_engine_has_the_threads_of_its_setting(machine: Path, tiny_model: Path) -> None:
    with LLM(str(tiny_model), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=32, threads=3):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("threads", [-1, 1.5, "two", True])
def test_threads_that_are_no_count_are_refused(threads: object) -> None:
    with pytest.raises(ConfigError, match="threads must be an integer of at least 0"):
        EngineConfig(threads=threads)  # type: ignore[arg-type]
