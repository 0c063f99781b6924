"""Platforms: a kind of device, one file each. Kernels are named by dotted path, so that this package imports none."""

from __future__ import annotations

import logging

from quire.errors import ConfigError
from quire.platforms.base import Platform, PlatformUnavailableError
from quire.registry import resolve

logger = logging.getLogger(__name__)

_KNOWN = {
    "cuda": "quire.platforms.cuda.CudaPlatform",
    "cpu": "quire.platforms.cpu.CpuPlatform",
}
"""By name, in the order in which `auto` tries them."""


def choose(device: str) -> Platform:
    """The platform called `device`, or found at that dotted path; auto: the first known one that can be used."""
    if device == "auto":
        return _first_available()
    kind: type[Platform] = resolve("device", device, _KNOWN)
    try:
        return kind()
    except PlatformUnavailableError as error:
        raise ConfigError(
            f"device is {device!r}, but {error}; device='cpu' runs without a GPU", "device", device
        ) from error


def _first_available() -> Platform:
    *preferred, fallback = _KNOWN
    for name in preferred:
        try:
            platform: Platform = resolve("device", name, _KNOWN)()
            return platform
        except PlatformUnavailableError as error:
            if error.is_expected:
                logger.warning("the CPU is used: %s", error)
    return choose(fallback)
