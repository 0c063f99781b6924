"""Compiling for a GPU that is not present, in another process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import build

from quire.kernels.triton import compiler, launch
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe.common import ExpertsConfig, GemmTile
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.common import GemmConfig
from quire.kernels.triton.skinny_gemm.tuning import GemmKernel

KERNELS = [
    GemmKernel(GemmShape("norm_linear", 512, 256), 1, torch.bfloat16, GemmConfig("vector", 4, warps=2), True),
    GemmKernel(GemmShape("linear", 512, 256), 16, torch.bfloat16, GemmConfig("tile", 64, 16, 64, 4, 4), False),
]


def compile_gemms() -> None:
    compiler.compile_tasks(90, 132, [kernel.compile for kernel in KERNELS])


def compile_experts() -> None:
    """The kernels of mixtures of experts: vectors, tiles loaded by TMA, routing, layout and sum."""
    gate_up = torch.empty(16, 256, 128, dtype=torch.bfloat16, device="meta")
    configs = [
        ExpertsConfig("vector", GemmTile(2, warps=1), GemmTile(2, warps=1)),
        ExpertsConfig("tile", GemmTile(64, 64, 4, 3), GemmTile(64, 64, 4, 3), 16, True),
    ]
    tasks = moe.launches(gate_up, gate_up.new_empty(16, 128, 128), 4, True, 16, configs)
    compiler.compile_tasks(90, 132, list(tasks.values()))


def compile_in_process(cache: Path, what: str = "compile_gemms") -> set[str]:
    """Names of the machine code in Triton's cache afterwards."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", f"from tests.kernels import test_compiler; test_compiler.{what}()"],
        check=True, env=environment | {"TRITON_CACHE_DIR": str(cache)}, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return {str(path) for path in cache.rglob("*.cubin")}


def test_a_process_without_a_gpu_compiles_for_hopper_once(tmp_path: Path) -> None:
    made = compile_in_process(tmp_path)
    assert len(made) == len(KERNELS)
    assert compile_in_process(tmp_path) == made


def test_mixtures_of_experts_compile_for_hopper(tmp_path: Path) -> None:
    # Routing, sum, the first GEMM as vectors with the norm fused and without, the second, both in tiles, one kernel
    # that counts and three that sort.
    assert len(compile_in_process(tmp_path, "compile_experts")) == 2 + 2 + 1 + 2 + 1 + 3


Script = Callable[[int], object]


def many(script: Script) -> list[compiler.Task]:
    return [functools.partial(script, number) for number in range(19)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated GPU to compile for, and a folder for stamps."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_device", lambda: (90, 132))
    return tmp_path


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_stamp_is_written_when_everything_is_compiled(cache: Path, fails: bool) -> None:
    def task(number: int) -> None:
        (cache / f"task-{number}").touch()
        if fails and number == 3:
            raise ValueError

    compiler.Compilers(many(task), "a").wait()
    assert len(list(cache.glob("task-*"))) == 19
    again = compiler.Compilers(many(task), "a")
    again.wait()
    assert again.is_needed == fails
    assert compiler.Compilers([], "b").is_needed


def test_a_compiler_that_hangs_is_killed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.2)
    began = time.monotonic()
    compilers = compiler.Compilers(many(lambda _: time.sleep(60)), "a")
    compilers.wait()
    assert time.monotonic() - began < 30
    assert compiler.Compilers([], "a").is_needed
    for fork in compilers._processes:
        with pytest.raises(ProcessLookupError):
            os.kill(fork._pid, 0)


def test_a_few_tasks_start_no_process(cache: Path) -> None:
    compiler.Compilers(many(lambda _: (cache / "started").touch())[:2], "a").wait()
    assert not (cache / "started").exists()


# Launchers made by several threads

MODULE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""


def load_module(number: int) -> Any:
    return build.compile_module_from_src(MODULE.format(number=number), "__triton_launcher", [], [], [])


def wrong_launchers(kind: type, rounds: int) -> int:
    """How many of the launchers that four threads make belong to another kernel."""

    def wrong(number: int) -> int:
        return sum(kind(number).launch() != number for _ in range(rounds))

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(wrong, range(4)))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launchers as Triton makes them: a module each, all of one name. No GPU is needed to create them."""

    def make(launcher: Any, number: int) -> None:
        module = load_module(number)
        time.sleep(0)  # let another thread run
        launcher.launch = module.launch

    monkeypatch.setattr(CudaLauncher, "__init__", make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("modules")
def test_a_thread_gets_the_launcher_of_its_own_kernel() -> None:
    assert wrong_launchers(launch.SafeLauncher, 300) == 0


def test_a_module_loaded_again_overwrites_the_last_of_its_name() -> None:
    """Why there is a `SafeLauncher`; it can be removed when this fails."""
    load_module(7)
    last = load_module(8)
    load_module(7)
    assert last.launch() == 7
