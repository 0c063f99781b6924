"""Loads the C++ kernels: compiled ahead of time into the package, or on first use.

No torch headers and no build system: a few files, one compiler call each, some seconds once per machine. Packages built
by `make wheel` have a library for every level of instructions (`levels.py`), and compile only if CXX names a compiler.
Without either `library()` is None, and callers use torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quire.kernels.cpu.levels import FLAGS, FOLDER, HEADERS, QUIET, SOURCES, compile_library, cpu_flags, prebuilt
from quire.kernels.cpu.tape import Tape
from quire.paths import cache_dir

logger = logging.getLogger(__name__)

# A kernel takes one pointer, to its arguments packed 8 bytes each in the order of its C++ struct: q (pointer or int64)
# or d (double). Converting them one by one, ctypes would take 0.5 to 1 us.
_LAYOUTS = {
    "linear": "10q",
    "low_rank": "14q",
    "attend": "19qddq",
    "ngram": "15q",
    "rms_norm": "6qdq",
    "add_rms_norm": "8qdq",
    "copy_stream": "9q",
    "silu_mul": "6q",
    "prepare_qkv": "16qdq",
    "embedding": "6q",
    "route": "9q",
    "experts": "13q",
    "packed_linear": "18q",
    "packed_experts": "41q",
    "packed_embedding": "12q",
}
# Calls of about a microsecond keep the GIL: after releasing it, reacquiring can take a whole switch interval.
_HOLD_GIL = {
    "ngram",
    "rms_norm",
    "add_rms_norm",
    "copy_stream",
    "silu_mul",
    "prepare_qkv",
    "embedding",
    "route",
    "packed_embedding",
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_TOKEN_KERNELS = {"ngram"}
"""Kernels over token ids, in int32."""


Kernel = tuple[Callable[[bytes], None], Callable[..., bytes]]


class Library:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._releasing = ctypes.CDLL(str(path))
        self._holding = ctypes.PyDLL(str(path))
        self._kernels: dict[str, dict[torch.dtype, Kernel]] = {}

    def kernel(self, name: str) -> dict[torch.dtype, Kernel]:
        """(run, pack) by dtype: call run(pack(...)) with data pointers and sizes as ints.

        Look the pair up for each call: while a tape records, it is replaced by a recording one.
        """
        if name not in self._kernels:
            self._kernels[name] = self._bind(name)
        return self._kernels[name]

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Kernels called inside run as usual and are recorded on the tape."""
        replay = self._releasing["quire_replay"]
        replay.argtypes, replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
        tape = Tape(replay)
        original = {name: dict(kernels) for name, kernels in self._kernels.items()}
        for kernels in self._kernels.values():
            kernels.update({dtype: (tape.recording(run), pack) for dtype, (run, pack) in kernels.items()})
        try:
            yield tape
        finally:
            for name, kernels in original.items():
                self._kernels[name].update(kernels)

    def _bind(self, name: str) -> dict[torch.dtype, Kernel]:
        handle = self._holding if name in _HOLD_GIL else self._releasing
        pack = struct.Struct(_LAYOUTS[name]).pack
        kernels: dict[torch.dtype, Kernel] = {}
        suffixes = {torch.int32: "i32"} if name in _TOKEN_KERNELS else _SUFFIXES
        for dtype, suffix in suffixes.items():
            run = handle[f"quire_{name}_{suffix}"]
            run.argtypes, run.restype = [ctypes.c_char_p], None
            kernels[dtype] = (run, pack)
        return kernels


@functools.cache
def library() -> Library | None:
    """The kernels, compiled if necessary; None, with one warning, where that is not possible."""
    try:
        return Library(_library_path())
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning(
            "native CPU kernels are off, torch's are used instead (several times slower at small batches): %s. "
            "Install a package with compiled kernels, or g++ or clang++, or point CXX at a C++17 compiler.",
            str(detail).strip()[-2000:],
        )
        return None


def _library_path() -> Path:
    """The package's own library, or that of this source, compiler and CPU; built now unless it is cached."""
    if not os.environ.get("CXX") and (ready := prebuilt()) is not None:
        return ready
    compiler = _compiler()
    flags = [*FLAGS, *_architecture(compiler)]
    sources = b"".join((FOLDER / name).read_bytes() for name in (*SOURCES, *HEADERS))
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    identity = [sources, version, " ".join([*compiler, *flags]).encode(), _cpu().encode()]
    key = hashlib.sha256(b"\0".join(identity)).hexdigest()[:20]
    target = _cache() / f"kernels-{key}.so"
    if not target.exists():
        compile_library(compiler, [*flags, *QUIET], target)
    return target


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise RuntimeError(f"CXX is {named!r}, which is not an executable")
        return command
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError("no g++ or clang++ on PATH")


def _architecture(compiler: list[str]) -> list[str]:
    """The flag that means "for this CPU" (GCC and older Clang spell it differently on ARM), unless CXX names one.

    CXX="g++ -march=x86-64-v3" builds the kernels as a machine without AVX-512 would.
    """
    if any(argument.startswith(("-march=", "-mcpu=")) for argument in compiler):
        return []
    for flag in ("-march=native", "-mcpu=native"):
        probe = [*compiler, flag, "-x", "c++", "-E", os.devnull]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return [flag]
    return []


def _cpu() -> str:
    """What -march=native depends on: a cache on a shared disk may serve different CPUs."""
    return f"{platform.machine()} {platform.processor()} {' '.join(sorted(cpu_flags()))}"


def _cache() -> Path:
    """The folder of compiled libraries; a temporary one if the user's cache is not writable."""
    folder = cache_dir("kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="quire-kernels-"))
