"""Which number format the weights and activations take."""

from __future__ import annotations

import torch

from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform

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
    quantized weights.
    """
    if asked != "auto":
        return NAMES[asked]
    on_cpu = platform.device.type == "cpu"
    if files.gguf is not None:
        return torch.float32 if on_cpu else torch.bfloat16
    own = NAMES.get(model.dtype or "float32", torch.float32)
    if on_cpu and (own is torch.float16 or not platform.has_bfloat16):
        return torch.float32
    return torch.bfloat16 if own is torch.float32 and not on_cpu else own
