"""The threads of the native CPU kernels: every piece runs once, none waits for another, and processes end and fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import build
from quire.kernels.cpu.ops import CpuOps

SOURCES = Path(build.__file__).parent


def compile_driver(folder: Path, *flags: str) -> Path:
    """pool_driver.cpp with the pool."""
    try:
        compiler = build._compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    driver = Path(__file__).with_name("pool_driver.cpp")
    program = folder / "driver"
    files = [str(driver), str(SOURCES / "pool.cpp"), "-o", str(program)]
    subprocess.run([*compiler, "-std=c++17", "-O1", "-pthread", f"-I{SOURCES}", *flags, *files], check=True)
    return program


def test_pieces_run_once_and_none_waits_for_another(tmp_path: Path) -> None:
    """Any number of pieces and threads, callers at once, pieces in pieces, a held piece, and forks."""
    ran = subprocess.run([compile_driver(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ok\n")


@pytest.mark.slow
def test_the_sanitizer_finds_no_race(tmp_path: Path) -> None:
    program = compile_driver(tmp_path, "-fsanitize=thread", "-g")
    ran = subprocess.run([program, "without fork"], capture_output=True, text=True, timeout=600)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel places memory where the sanitizer cannot have it")
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr


ENDS = """
import ctypes, os, sys, threading, torch
from quire.kernels.cpu.ops import CpuOps
torch.set_num_threads(3)
ops, x, weight = CpuOps(), torch.randn(20, 576), torch.randn(960, 576)
expected = ops.linear(x, weight)
if sys.argv[1] == "fork":
    child = os.fork()
    same = torch.equal(ops.linear(x, weight), expected)
    if child == 0:
        os._exit(0 if same else 1)
    assert same and os.waitpid(child, 0)[1] == 0
elif sys.argv[1] == "daemon" and ops.is_native:
    # A thread that computes until the interpreter is gone. It calls the kernel and nothing of torch: at its exit Python
    # ends daemon threads that ask for its lock, and one that asks inside torch aborts the process.
    run, pack = ops._linear[torch.float32]
    out = torch.empty(20, 960)
    for tensor in (x, weight, out):  # the thread's last call may outlive the module that holds them
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
    call = pack(x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), 20, 960, 576, 576, 576, 3)
    def compute():
        while True:
            run(call)
    threading.Thread(target=compute, daemon=True).start()
    for _ in range(20):
        assert torch.equal(ops.linear(x, weight), expected)
print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["fork", "daemon"])
def test_a_process_with_threads_ends_and_forks(how: str) -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr


def test_the_kernels_use_no_second_openmp_runtime() -> None:
    """Their pool is their own: threads of OpenMP would wait for each other at every kernel's end."""
    if (native := build.library()) is None:
        pytest.skip("no C++ compiler on this machine")
    assert b"GOMP" not in native.path.read_bytes() and b"kmpc" not in native.path.read_bytes()


def test_threads_start_as_they_are_wanted() -> None:
    """As many as `torch.set_num_threads` says, the caller included, and none for work that is not worth it."""
    if not (ops := CpuOps()).is_native:
        pytest.skip("no C++ compiler on this machine")
    if not (tasks := Path("/proc/self/task")).exists():
        pytest.skip("threads are not counted here")
    x, weight = torch.ones(200, 64), torch.ones(960, 64)
    child = os.fork()  # a process in which no pool has been used yet
    if child == 0:
        started = []
        for threads, rows in ((4, 1), (4, 200), (2, 200), (6, 200)):
            torch.set_num_threads(threads)  # starts threads of torch's own
            before = len(os.listdir(tasks))
            ops.linear(x[:rows], weight)
            started.append(len(os.listdir(tasks)) - before)
        os._exit(0 if started == [0, 3, 0, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0
