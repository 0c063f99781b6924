"""Machines that are small, uneven or limited: a process finds out what it has, runs with it, or says in one line why
not."""

from __future__ import annotations

import logging
import os
import platform as system
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ModelTooLargeError
from quire.platforms import cpu
from quire.resource_limits import out_of_memory_reason

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Eight cores, and folders instead of the kernel's."""
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cpu, "DEVICES", tmp_path / "devices")
    yield tmp_path
    torch.set_num_threads(threads)


def put(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


# Cores


def test_alike_cores_all_count(machine: Path) -> None:
    assert cpu.usable_cores() == 8
    for core in range(8):
        put(machine / f"devices/system/cpu/cpu{core}/cpu_capacity", 1024)
    assert cpu.usable_cores() == 8


def test_of_intels_hybrid_chips_the_performance_cores_count_once(machine: Path) -> None:
    """Two performance cores of two threads each, four efficiency cores."""
    put(machine / "devices/cpu_core/cpus", "0-3")
    put(machine / "devices/cpu_atom/cpus", "4-7")
    for core in range(4):
        put(
            machine / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list",
            "0-1" if core < 2 else "2,3",
        )
    assert cpu.fast_cores(frozenset(range(8))) == {0, 2}
    assert cpu.usable_cores() == 2


def test_of_arms_chips_those_near_the_fastest_count(machine: Path) -> None:
    for core, capacity in enumerate([250, 250, 250, 250, 760, 760, 760, 1024]):
        put(machine / f"devices/system/cpu/cpu{core}/cpu_capacity", capacity)
    assert cpu.fast_cores(frozenset(range(8))) == {4, 5, 6, 7}


def test_a_process_on_slow_cores_alone_uses_all_of_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine / "devices/cpu_core/cpus", "0-3")
    put(machine / "devices/cpu_atom/cpus", "4-7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})
    assert cpu.usable_cores() == 3


def test_half_a_core_is_one_thread(machine: Path) -> None:
    put(machine / "own", "0::/box")
    put(machine / "cgroup/box/cpu.max", "50000 100000")
    torch.set_num_threads(8)
    cpu.set_threads()
    assert torch.get_num_threads() == 1


def test_a_running_engine_follows_its_cores(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    torch.set_num_threads(4)
    watch = cpu.CoreWatch(clock=lambda: now[0])
    put(machine / "own", "0::/")
    put(machine / "cgroup/cpu.max", "150000 100000")
    watch.tick()
    assert torch.get_num_threads() == 4  # not looked yet
    now[0] += cpu.CORES_SECONDS
    with caplog.at_level(logging.INFO):
        watch.tick()
    assert torch.get_num_threads() == 2
    assert "may use 2 cores now: 2 threads instead of 4" in caplog.text
    put(machine / "cgroup/cpu.max", "max 100000")
    now[0] += cpu.CORES_SECONDS
    watch.tick()
    assert torch.get_num_threads() == 4  # as it began, not more
    torch.set_num_threads(3)  # the program's own choice stays
    put(machine / "cgroup/cpu.max", "100000 100000")
    now[0] += cpu.CORES_SECONDS
    watch.tick()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(4)
    fixed = cpu.CoreWatch(wanted=4, clock=lambda: now[0])
    now[0] += cpu.CORES_SECONDS
    fixed.tick()
    assert torch.get_num_threads() == 4


def test_an_engine_whose_cores_change_draws_the_same_tokens(
    machine: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CORES_SECONDS", 0.0)
    monkeypatch.setattr("quire.engine.memory_watch.MEASURE_SECONDS", 0.0)
    put(machine / "own", "0::/")
    put(machine / "cgroup/cpu.max", "200000 100000")
    torch.set_num_threads(2)
    llm = make_llm()
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (before,) = llm.generate(["the world"], params)
    put(machine / "cgroup/cpu.max", "50000 100000")
    (after,) = llm.generate(["the world"], params)
    assert torch.get_num_threads() == 1
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


# Memory


def test_the_tightest_group_of_either_version_limits_memory(machine: Path) -> None:
    platform = cpu.CpuPlatform()
    free, total = platform.free_memory(), platform.total_memory()
    assert (platform.usable_memory(), platform.memory_limits()) == (total, "")
    put(machine / "own", "0::/a/b")
    put(machine / "cgroup/a/memory.max", GIB)
    put(machine / "cgroup/a/memory.current", 700 << 20)
    put(machine / "cgroup/a/memory.stat", f"inactive_file {100 << 20}")
    put(machine / "cgroup/a/b/memory.max", "max")
    assert platform.usable_memory() == GIB
    assert platform.free_memory() == GIB - (600 << 20) < free
    assert platform.memory_limits() == "its container has 1.00 GiB"
    put(machine / "own", "4:memory:/box\n0::/")
    put(machine / "cgroup/memory/box/memory.limit_in_bytes", GIB // 2)
    put(machine / "cgroup/memory/box/memory.usage_in_bytes", 200 << 20)
    put(machine / "cgroup/memory/box/memory.stat", f"total_inactive_file {50 << 20}")
    assert platform.free_memory() == GIB // 2 - (150 << 20)


def test_ulimit_limits_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = {resource.RLIMIT_AS: used + (100 << 20)}
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1) if which in limits else real(which))
    platform = cpu.CpuPlatform()
    assert 50 << 20 < platform.free_memory() < 150 << 20
    assert platform.memory_limits().startswith("ulimit leaves 0.")


def test_weights_that_do_not_fit_are_refused_in_one_line(
    machine: Path, make_llm: Callable[..., LLM], tiny_model: Path
) -> None:
    put(machine / "own", "0::/")
    put(machine / "cgroup/memory.max", 200 << 10)
    with pytest.raises(
        ModelTooLargeError, match=r"the weights need .*MiB, and .* free here \(its container has"
    ) as found:
        make_llm()
    assert "\n" not in str(found.value)
    assert "use a smaller model or one in few bits, or allow more memory" in str(found.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 64.0 MiB for an array"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried…\nmore"
        ),
    ],
)
def test_running_out_of_memory_at_start_is_one_line(error: Exception) -> None:
    reason = out_of_memory_reason(error)
    assert reason.startswith("there is too little memory to start") and "\n" not in reason
    assert out_of_memory_reason(ValueError("no")) == out_of_memory_reason(ImportError("no module")) == ""


def test_a_command_with_too_little_memory_says_so(tiny_model: Path) -> None:
    """300 MB of address space: torch itself cannot be loaded."""
    command = [sys.executable, "-m", "quire.cli.main", "generate", "hi", "--model", str(tiny_model), "--device", "cpu"]
    limit = 300_000_000
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("quire: error: there is too little memory to start, ulimit -v allows 0.28 GiB")


# Instruction sets


def test_a_processor_without_avx2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = cpu.CpuPlatform()
    monkeypatch.setattr(system, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: {"sse4_2", "avx"})
    assert platform.why_slow() == (
        "this processor has no AVX2: quire runs, several times slower than on one that has it"
    )
    monkeypatch.setattr(cpu, "cpu_flags", lambda: {"avx2"})
    assert platform.why_slow() == ""
    monkeypatch.setattr(cpu, "cpu_flags", lambda: set())  # not said
    assert platform.why_slow() == ""
    monkeypatch.setattr(system, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: {"asimd"})
    assert platform.why_slow() == ""


@pytest.mark.slow
@pytest.mark.skipif(system.machine() != "x86_64", reason="compiles for x86-64 without AVX")
def test_kernels_for_the_first_64_bit_processors_draw_the_same_tokens(tiny_model: Path) -> None:
    command = [
        sys.executable, "-m", "quire.cli.main", "generate", "the world", "--model", str(tiny_model), "--device", "cpu",
        "--dtype", "float32", "--temperature", "0", "--max-tokens", "12", "--ignore-eos",
    ]  # fmt: skip

    def text(**environment: str) -> str:
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
        return ran.stdout

    assert text(CXX="g++ -march=x86-64", ATEN_CPU_CAPABILITY="default") == text()
