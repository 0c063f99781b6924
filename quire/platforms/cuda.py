"""An NVIDIA GPU: with which kernels it is used and, where it cannot be, why not in one line."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import warnings
from pathlib import Path

import torch

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

FAST = ("quire.kernels.triton.ops.TritonOps", "triton")
PLAIN = ("quire.kernels.reference.TorchOps", "torch")
"""Kernels by dotted path, and the attention backend that goes with them."""
LEAST_FOR_FAST = (8, 0)
"""Compute capability the Triton kernels are written for: bfloat16 products, asynchronous copies."""
LEAST = (7, 0)

Capability = tuple[int, int]


class CudaPlatform:
    """The current CUDA device."""

    pipeline_depth = 1

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        capability = (properties.major, properties.minor)
        _refuse_unsupported(properties.name, capability)
        self.ops, self.attention = choose_kernels(properties.name, capability)
        large = properties.total_memory >= 70 * 2**30
        self.max_num_seqs = 1024 if large else 256
        self.max_num_batched_tokens = 16384 if large else 8192

    @property
    def has_bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def free_memory(self) -> int:
        """Memory torch keeps for later use is given back first: it counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]


def choose_kernels(name: str, capability: Capability) -> tuple[str, str]:
    """Ours in Triton, or plain torch where they cannot run, with a warning that says why."""
    if capability < LEAST_FOR_FAST:
        why = f"{name} has compute capability {_dotted(capability)}, and quire's own kernels need 8.0"
    elif importlib.util.find_spec("triton") is None:
        why = 'triton is not installed (pip install "quire[cuda]")'
    else:
        return FAST
    logger.warning("torch's kernels are used, which are several times slower: %s", why)
    return PLAIN


def why_unusable() -> str:
    """Why torch can use no CUDA device here; empty if it can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one with it (https://pytorch.org)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says in many lines what we say in one
        if torch.cuda.is_available():
            return ""
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return explain(str(error))
    return "torch sees no GPU"


def explain(said: str) -> str:
    """torch's words, with what was found and what is needed."""
    driver = driver_version()
    shown = f"the NVIDIA driver ({driver})" if driver else "the NVIDIA driver"
    if found := re.search(r"too old \(found version (\d+)\)", said):
        serves = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
        return (
            f"{shown} serves CUDA up to {serves}, and this torch ({torch.__version__}) needs {torch.version.cuda}: "
            "update the driver, or install a torch built for an older CUDA"
        )
    if "no NVIDIA driver" in said:
        return "there is no NVIDIA driver here"
    if "No CUDA GPUs" in said:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"{shown} shows no GPU" + (f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else "")
    return f"CUDA does not start: {said.splitlines()[0] if said else 'torch does not say why'}"


def driver_version() -> str:
    """The NVIDIA driver's version; empty if there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""


def _refuse_unsupported(name: str, capability: Capability) -> None:
    if capability < LEAST:
        raise ConfigError(
            f"{name} has compute capability {_dotted(capability)}, and quire needs {_dotted(LEAST)} or later; "
            "use device='cpu'",
            "device",
            "cuda",
        )
    built_for = torch.cuda.get_arch_list()
    if not runs_on(capability, built_for):
        raise ConfigError(
            f"this torch ({torch.__version__}) has no code for {name} (sm_{capability[0]}{capability[1]}), only for "
            f"{' '.join(built_for)}; install one that has, or use device='cpu'",
            "device",
            "cuda",
        )


def runs_on(capability: Capability, built_for: list[str]) -> bool:
    """Whether code for these architectures runs: sm_86 on 8.6 to 8.9, compute_86 (compiled when loaded) on later."""
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        least = divmod(int(digits[0]), 10)
        if least <= capability and (kind == "compute" or least[0] == capability[0]):
            return True
    return not built_for


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
