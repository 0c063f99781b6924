"""Instruction levels that the kernels are compiled for ahead of time, and how they are compiled. Imports no torch: a
build of the package uses it (`make wheel`)."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PREBUILT = FOLDER / "prebuilt"
"""Libraries compiled ahead of time, by level; only in packages that were built with them."""
SOURCES = (
    *("attention.cpp", "elementwise.cpp", "experts.cpp", "linear.cpp", "low_rank.cpp"),
    *("ngram.cpp", "packed.cpp", "pool.cpp", "replay.cpp", "strips.cpp"),
)
HEADERS = ("outer.h", "packed.h", "pool.h", "simd.h")
# Contraction makes a * b + c one fused multiply-add, which the kernels rely on; -ffast-math would lose NaN.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
QUIET = ("-fvisibility=hidden", "-w")
_PORTABLE = ("-static-libstdc++", "-static-libgcc")


@dataclass(frozen=True)
class Level:
    """Instructions that a library may use."""

    name: str
    machine: str
    """As `platform.machine` names it."""
    flags: tuple[str, ...]
    """For the compiler."""
    needs: tuple[str, ...]
    """Of /proc/cpuinfo's flags."""


_V3 = ("avx2", "fma", "f16c", "bmi2", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = (
    Level("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
    Level("avx512", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("avx2-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
    Level("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64", "x86_64", ("-march=x86-64",), ()),
    Level("dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), ("asimddp",)),
    Level("armv8", "aarch64", ("-march=armv8-a",), ()),
)
"""The best of a machine first."""


def cpu_flags() -> frozenset[str]:
    """The flags of this machine's /proc/cpuinfo; empty where there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def runs_on(level: Level, machine: str, flags: Collection[str]) -> bool:
    """Whether such a machine has the level's instructions."""
    return level.machine == machine and set(level.needs) <= set(flags)


def prebuilt() -> Path | None:
    """The best library of this package that runs on this machine."""
    machine, flags = platform.machine(), cpu_flags()
    paths = (PREBUILT / f"{level.name}.so" for level in LEVELS if runs_on(level, machine, flags))
    return next((path for path in paths if path.exists()), None)


def compile_library(compiler: Sequence[str], flags: Sequence[str], target: Path, jobs: int = len(SOURCES)) -> None:
    """Build under a temporary name, then rename: another process may be building the same."""

    def call(*arguments: str) -> None:
        subprocess.run([*compiler, *arguments], capture_output=True, text=True, check=True)

    link = [flag for flag in flags if flag.startswith("-static")]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        objects = [f"{folder}/{name}.o" for name in SOURCES]
        with ThreadPoolExecutor(jobs) as pool:
            sources = [str(FOLDER / name) for name in SOURCES]
            list(pool.map(lambda pair: call(*flags, "-c", pair[0], "-o", pair[1]), zip(sources, objects, strict=True)))
        call("-shared", "-pthread", *link, *objects, "-o", f"{folder}/library")
        os.replace(f"{folder}/library", target)


def compile_levels(
    compiler: Sequence[str], folder: Path, machine: str = platform.machine(), only: Collection[str] = ()
) -> list[Path]:
    """Libraries for every level of a kind of machine (`only`: of those named), for any distribution of its system."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in LEVELS:
        if level.machine == machine and (not only or level.name in only):
            made.append(folder / f"{level.name}.so")
            compile_library(compiler, [*FLAGS, *level.flags, *QUIET, *_PORTABLE], made[-1], os.cpu_count() or 1)
    return made
