"""Which number format the weights and activations take."""

from __future__ import annotations

import functools
import logging

import torch

from quire.errors import ConfigError
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform

logger = logging.getLogger(__name__)

NAMES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def choose_dtype(asked: str, model: ModelConfig, files: ModelFiles, platform: Platform) -> torch.dtype:
    """What was asked for; or the checkpoint's own dtype where the device computes in it.

    A GGUF file names no dtype for its activations: a GPU takes bfloat16, a CPU float32, which keeps every bit of the
    quantized weights. A GPU without bfloat16 takes float16 in its place.
    """
    on_cpu = platform.device.type == "cpu"
    if asked != "auto":
        _refuse_missing(NAMES[asked], platform, on_cpu)
        return NAMES[asked]
    own = NAMES.get(model.dtype or "float32", torch.float32)
    if on_cpu:
        is_slow = own is torch.float16 or not platform.has_bfloat16
        return torch.float32 if is_slow or files.gguf is not None else own
    if own is torch.float16 and files.gguf is None:
        return own
    if platform.has_bfloat16:
        return torch.bfloat16
    _warn_once(f"{platform.describe()} has no bfloat16: float16 is used, whose range is smaller")
    return torch.float16


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _refuse_missing(dtype: torch.dtype, platform: Platform, on_cpu: bool) -> None:
    """A CPU computes in any format, if slowly; a GPU's kernels need the hardware."""
    if dtype is torch.bfloat16 and not on_cpu and not platform.has_bfloat16:
        raise ConfigError(
            f"dtype is bfloat16, which {platform.describe()} does not have (compute capability 8.0 does); "
            "use float16, float32 or auto",
            "dtype",
            "bfloat16",
        )
