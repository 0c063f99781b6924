"""Kernels compiled ahead of time: which library a machine gets, a package without a compiler, and other machines."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import build, levels
from quire.kernels.cpu.ops import CpuOps

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
OLD = {"avx2", "fma", "f16c", "bmi2", "movbe"}
SKYLAKE = OLD | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", SKYLAKE | {"avx512_vnni", "avx_vnni"}, "avx512-vnni"),
        ("x86_64", SKYLAKE, "avx512"),
        ("x86_64", OLD | {"avx_vnni"}, "avx2-vnni"),
        ("x86_64", OLD, "avx2"),
        ("x86_64", OLD - {"fma"}, "x86-64"),
        ("aarch64", {"asimd", "asimddp"}, "dotprod"),
        ("aarch64", {"asimd"}, "armv8"),
        ("riscv64", set(), None),
    ],
)
def test_a_machine_gets_the_best_library_it_runs(
    machine: str, flags: set[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "PREBUILT", tmp_path)
    monkeypatch.setattr(levels, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert levels.prebuilt() is None
    for level in levels.LEVELS:
        (tmp_path / f"{level.name}.so").touch()
    found = levels.prebuilt()
    assert (None if found is None else found.stem) == expected


def test_the_packages_library_is_used_unless_a_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, too."""
    own = next(level for level in levels.LEVELS if levels.runs_on(level, platform.machine(), levels.cpu_flags()))
    monkeypatch.setattr(levels, "PREBUILT", tmp_path)
    (tmp_path / f"{own.name}.so").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_compiler", lambda: pytest.fail("compiles"))
    assert build._library_path() == tmp_path / f"{own.name}.so"
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.undo()
    monkeypatch.setattr(levels, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        build._library_path()


RUN = """
import torch
from quire.kernels.cpu.build import library
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.weights.strips import StripWeight
found = library()
assert found is not None and found.path.parent.name == "prebuilt", found
weight = StripWeight.allocate((40, 256), torch.float32, lambda s, d: torch.zeros(s, dtype=d), 4, 128)
codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8)
weight.write(slice(0, 40), codes, torch.ones(40, 2))
x = torch.randint(-127, 128, (9, 256))
x[:, ::32] = 127
assert torch.equal(CpuOps().linear(x.float(), weight), (x @ (codes.long() - 8).T).float())
print(found.path)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_runs_without_a_compiler(tmp_path: Path) -> None:
    """Built as `make wheel` does, installed beside nothing, with no program on PATH."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "benchmarks", "build", "dist", "*.egg-info")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    environment = os.environ | {"QUIRE_PREBUILT_KERNELS": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, env=environment, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    made = {path.stem for path in (tmp_path / "site/quire/kernels/cpu/prebuilt").iterdir()}
    assert made == {level.name for level in levels.LEVELS if level.machine == platform.machine()}
    bare = {"PATH": str(tmp_path / "nothing"), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run([sys.executable, "-c", RUN], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    x, weight = torch.randn(5, 96), torch.randn(40, 96)
    for path in (tmp_path / "site/quire/kernels/cpu/prebuilt").iterdir():
        level = next(level for level in levels.LEVELS if level.name == path.stem)
        if levels.runs_on(level, platform.machine(), levels.cpu_flags()):
            ops = CpuOps()
            ops._linear = build.Library(path).kernel("linear")
            torch.testing.assert_close(ops.linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("level", "multiplies"), [("armv8", 4), ("dotprod", 4)])
def test_products_on_arm_are_exact(level: str, multiplies: int, tmp_path: Path) -> None:
    """NEON without and with dot products, under emulation; the whole library compiles for both."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    (found,) = [each for each in levels.LEVELS if each.name == level]
    levels.compile_levels([compiler], tmp_path, "aarch64", [level])
    sources = [str(levels.FOLDER / name) for name in ("packed.cpp", "strips.cpp", "pool.cpp")]
    driver = [str(HERE / "strips_driver.cpp"), f"-I{levels.FOLDER}", "-static", "-o", str(tmp_path / "driver")]
    flags = [*levels.FLAGS, *found.flags, "-w"]
    subprocess.run([compiler, *flags, *sources, *driver], check=True, capture_output=True)
    cpu = "cortex-a53" if level == "armv8" else "max"
    ran = subprocess.run([emulator, "-cpu", cpu, str(tmp_path / "driver")], capture_output=True, text=True)
    assert ran.stdout.split() == ["exact", str(multiplies), "4"], ran.stdout + ran.stderr
