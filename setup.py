"""With QUIRE_PREBUILT_KERNELS=1 (`make wheel`) the package gets CPU kernels for every level of instructions."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools below 70.1
    from wheel.bdist_wheel import bdist_wheel

PREBUILD = os.environ.get("QUIRE_PREBUILT_KERNELS") == "1"


class BuildKernels(build_py):
    """Compiles the kernels beside the copied sources."""

    def run(self) -> None:
        super().run()
        if not PREBUILD or self.editable_mode:
            return
        spec = importlib.util.spec_from_file_location("levels", "quire/kernels/cpu/levels.py")
        levels = importlib.util.module_from_spec(spec)
        sys.modules["levels"] = levels  # for its dataclasses
        spec.loader.exec_module(levels)
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        only = os.environ.get("QUIRE_PREBUILT_LEVELS", "").split()
        levels.compile_levels(compiler, Path(self.build_lib) / "quire/kernels/cpu/prebuilt", only=only)


class PlatformWheel(bdist_wheel):
    """Kernels are loaded with ctypes: any Python 3, this platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.plat_name_supplied |= PREBUILD


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
