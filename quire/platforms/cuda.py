"""NVIDIA GPUs: which kernels run on a card and, if it cannot be used, why, in one line."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Set
from pathlib import Path

import torch

from quire.errors import ConfigError
from quire.platforms.base import PlatformUnavailableError

logger = logging.getLogger(__name__)

FAST = ("quire.kernels.triton.ops.TritonOps", "triton")
PLAIN = ("quire.kernels.reference.TorchOps", "torch")
"""Dotted path of the kernels, and the attention backend to use with them."""
LEAST_FOR_FAST = (8, 0)
"""Compute capability the Triton kernels are written for: bfloat16 products, asynchronous copies."""
LEAST = (7, 0)
LARGE_BYTES = 70 * 2**30
"""Cards with this much memory get larger default limits."""
LARGE_CARDS = frozenset({"A100-80G", "H100", "H200", "H20", "GH200", "B200", "B300", "GB200", "GB300"})
"""Cards of that size, by Ray's names."""

Capability = tuple[int, int]


class CudaPlatform:
    """The current CUDA device."""

    pipeline_depth = 1
    collectives = "nccl"

    def __init__(self) -> None:
        if why := why_unusable():
            raise PlatformUnavailableError(why, is_expected=bool(driver_version()))
        try:
            self._open()
        except RuntimeError as error:  # the card exists and does not respond
            raise PlatformUnavailableError(explain(str(error)), is_expected=bool(driver_version())) from error

    def _open(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        capability = (properties.major, properties.minor)
        _refuse_unsupported(properties.name, capability)
        self.ops, self.attention = choose_kernels(properties.name, capability)
        self.max_num_seqs, self.max_num_batched_tokens = _default_limits(properties.total_memory >= LARGE_BYTES)

    @property
    def has_bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def free_memory(self) -> int:
        """Memory that torch caches is released first: it counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]


class RemoteCudaPlatform:
    """GPUs of other machines, for an engine that plans for them and computes nothing itself."""

    device = torch.device("cuda")
    # Only the shapes of layers are read here, and these kernels exist on any machine.
    ops, attention = PLAIN
    collectives = "nccl"
    pipeline_depth = 1
    has_bfloat16 = True

    def __init__(self, cards: Set[str] = frozenset()) -> None:
        """`cards`: kinds of cards the cluster has, by Ray's names."""
        self.max_num_seqs, self.max_num_batched_tokens = _default_limits(bool(cards) and cards <= LARGE_CARDS)

    def describe(self) -> str:
        return "GPUs of a Ray cluster"

    def free_memory(self) -> int:
        return 1 << 62

    def total_memory(self) -> int:
        return 1 << 62


def _default_limits(is_large: bool) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens)."""
    return (1024, 16384) if is_large else (256, 8192)


def choose_kernels(name: str, capability: Capability) -> tuple[str, str]:
    """Our Triton kernels, or plain torch if they cannot run, with a warning that says why."""
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
        warnings.simplefilter("ignore")  # torch's own warning has many lines
        if torch.cuda.is_available():
            return ""
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return explain(str(error))
    return "torch sees no GPU"


def explain(message: str) -> str:
    """torch's error message in one line, with what was found and what is needed."""
    driver = driver_version()
    driver_text = f"the NVIDIA driver ({driver})" if driver else "the NVIDIA driver"
    if found := re.search(r"too old \(found version (\d+)\)", message):
        newest = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
        return (
            f"{driver_text} supports CUDA up to {newest}, and this torch ({torch.__version__}) needs "
            f"{torch.version.cuda}: update the driver, or install a torch built for an older CUDA"
        )
    if "no NVIDIA driver" in message:
        return "there is no NVIDIA driver here"
    if "No CUDA GPUs" in message:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"{driver_text} shows no GPU" + (f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else "")
    return f"CUDA does not start: {message.splitlines()[0] if message else 'torch gives no reason'}"


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
