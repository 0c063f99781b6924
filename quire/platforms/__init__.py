"""What a device is and has. Kernels are named here by path, so that this room needs none of them."""

from __future__ import annotations

import logging

from quire.errors import ConfigError
from quire.platforms.base import Platform

logger = logging.getLogger(__name__)


def choose(device: str) -> Platform:
    """The platform for `device`: cpu, cuda, or auto."""
    from quire.platforms.cpu import CpuPlatform

    if device == "cpu":
        return CpuPlatform()
    from quire.platforms.cuda import CudaPlatform, driver_version, explain, why_unusable

    why = why_unusable()
    if not why:
        try:
            return CudaPlatform()
        except RuntimeError as error:  # a card that is there and does not answer
            why = explain(str(error))
    if device == "cuda":
        raise ConfigError(f"device is 'cuda', but {why}; device='cpu' runs without a GPU", "device", device)
    if driver_version():  # whoever has a driver has a GPU, and expects it to be used
        logger.warning("the CPU is used: %s", why)
    return CpuPlatform()
