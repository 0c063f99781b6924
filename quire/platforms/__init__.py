"""What a device is and has. Kernels are named here by path, so that this room needs none of them."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.platforms.base import Platform


def choose(device: str) -> Platform:
    """The platform for `device`: cpu, cuda, or auto."""
    import torch

    from quire.platforms.cpu import CpuPlatform
    from quire.platforms.cuda import CudaPlatform

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; use device='cpu'", "device", device)
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return CudaPlatform()
    return CpuPlatform()
