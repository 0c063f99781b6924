"""`quire env`: versions, devices and caches, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

from quire import __version__
from quire.cli.engine_flags import add_common
from quire.cli.parser import Parser
from quire.cli.terminal import table
from quire.cli.values import readable_bytes
from quire.paths import cache_dir

WHAT = "Show versions, devices, CPU features and caches, for a bug report. No secrets are printed."
EXAMPLES = "\n  quire env\n"
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "numpy", "msgspec",
)  # fmt: skip
CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
VARIABLES = (
    "QUIRE_CACHE", "QUIRE_CPU_KVCACHE_SPACE", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR", "CXX",
)  # fmt: skip
WIDTH = 18
"""Characters of the first column."""


def configure(parser: Parser) -> None:
    """The flags of `quire env`."""
    parser.describe(run, WHAT, EXAMPLES)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    print(table(_version_rows(), "versions", WIDTH))
    print(table(_device_rows(), "devices", WIDTH))
    print(table(_cache_rows(), "caches and kernels", WIDTH))
    if variables := [(name, os.environ[name]) for name in VARIABLES if name in os.environ]:
        print(table(variables, "environment", WIDTH))
    return 0


def _version_rows() -> list[tuple[str, str]]:
    rows = [("quire", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    for package in PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    return rows


def _device_rows() -> list[tuple[str, str]]:
    import torch

    from quire.platforms import choose
    from quire.platforms.cpu import cpu_flags
    from quire.platforms.cuda import driver_version, why_unusable

    cpu = choose("cpu")
    features = [feature for feature in CPU_FEATURES if feature in cpu_flags()]
    rows = [
        ("cpu", cpu.describe()),
        ("features", " ".join(features) or "unknown"),
        ("free memory", readable_bytes(cpu.free_memory())),
    ]
    if driver := driver_version():
        rows.append(("NVIDIA driver", driver))
    if why := why_unusable():
        return [*rows, ("cuda", f"cannot be used: {why}")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{gpu.name}, {readable_bytes(gpu.total_memory)}, sm_{gpu.major}{gpu.minor}"))
    return [*rows, ("torch's CUDA", str(torch.version.cuda)), ("GPU kernels", _gpu_kernels())]


def _gpu_kernels() -> str:
    from quire.errors import ConfigError
    from quire.platforms import choose

    try:
        return choose("cuda").ops
    except ConfigError as error:
        return str(error)


def _cache_rows() -> list[tuple[str, str]]:
    from quire.kernels.cpu.build import library

    native = library()  # builds it if necessary, to see whether that works
    return [
        ("cache", str(cache_dir())),
        (
            "native CPU kernels",
            f"built: {native.path}" if native else "not built: torch is used instead (see the warning)",
        ),
        ("interpreter", sys.executable),
    ]
