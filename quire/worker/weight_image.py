"""Weights as they lie in a CPU's memory, in a file: later starts map it, and processes that do share its pages."""

from __future__ import annotations

import bisect
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.weights.base import QuantizedWeight
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig, weights_fingerprint
from quire.platforms.base import MemoryArena, Platform

logger = logging.getLogger(__name__)

_MAGIC = b"quire weights 1\n"
"""Begins every file. The number changes when a layout of `kernels/weights` does."""
_HEADER = 4096
"""Bytes before the weights: a page, so that they begin at one."""


class WeightImage:
    """One model's file, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: np.ndarray | None = None
        """The file's weights, mapped; changes to them stay in this process."""
        self._digest = b""
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER)
            if header.startswith(_MAGIC) and len(header) == _HEADER and path.stat().st_size > _HEADER:
                self._digest = header[len(_MAGIC) : len(_MAGIC) + 32]
                self.data = np.memmap(path, np.uint8, "c", offset=_HEADER)
        except OSError:
            pass  # none yet, or not readable: the checkpoint is

    @classmethod
    def find(
        cls, config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, max_model_len: int
    ) -> WeightImage | None:
        """The image of this model and configuration; None: weights are not kept."""
        if config.weight_cache is None:
            return None
        kind = files.kind if config.load_format == "auto" else config.load_format
        plain = config.num_ranks == 1 and config.speculation is None and not config.enable_expert_parallel
        if platform.device.type != "cpu" or not plain or kind in (None, "dummy"):
            return None
        folder = Path(config.weight_cache).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"weight_cache {config.weight_cache!r} cannot be made a folder: {error}",
                "weight_cache",
                config.weight_cache,
            ) from None
        settings = (config.dtype, config.quantization, config.cpu_weights, config.kv_cache_dtype, config.model_impl)
        known = weights_fingerprint(files, model, config.load_format, config.seed)
        key = blake3(known + repr((max_model_len, *settings)).encode()).hexdigest()
        return cls(folder / f"weights-{key[:32]}.bin")

    def fills(self, model: nn.Module, memory: MemoryArena) -> bool:
        """Whether the model, built over the mapped file, has its weights: each tensor where it was when saved."""
        return (
            _is_all_here(model, memory)
            and self.data is not None
            and memory.used == len(self.data)
            and _digest(model, memory) == self._digest
        )

    def save(self, model: nn.Module, memory: MemoryArena) -> None:
        """Write the weights under a temporary name, then rename: another process may be writing the same."""
        if not _is_all_here(model, memory):
            logger.info("weights are not kept: a part of this model has memory of its own")
            return
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix="writing-")
            with os.fdopen(handle, "wb") as file:
                file.write((_MAGIC + _digest(model, memory)).ljust(_HEADER, b"\0"))
                for offset, held in memory.held:
                    file.seek(_HEADER + offset)
                    file.write(held.data)
                file.truncate(_HEADER + memory.used)
            os.replace(name, self.path)
            logger.info("weights kept for later starts: %s (%.0f MiB)", self.path, memory.used / 2**20)
        except OSError as error:
            logger.warning("weights could not be kept in %s: %s", self.path.parent, error)


def _weights(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every weight's tensors: module, name, tensor."""
    for path, module in model.named_modules():
        for name, held in (vars(module) | dict(module._parameters)).items():
            if isinstance(held, QuantizedWeight):
                yield from ((path, f"{name} {part}", tensor) for part, tensor in held.tensors.items())
            elif isinstance(held, nn.Parameter):
                yield path, name, held


def _is_all_here(model: nn.Module, memory: MemoryArena) -> bool:
    """Whether every weight is in this memory, whole or as a part of a tensor."""
    held = sorted((own.ctypes.data, own.ctypes.data + len(own)) for _, own in memory.held)
    starts = [start for start, _ in held]

    def is_here(tensor: torch.Tensor) -> bool:
        at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
        return not tensor.numel() or (at >= 0 and tensor.data_ptr() + tensor.nbytes <= held[at][1])

    return all(is_here(tensor) for _, _, tensor in _weights(model))


def _digest(model: nn.Module, memory: MemoryArena) -> bytes:
    """Of every weight's name, place, shape and dtype."""
    places = memory.places
    table = [
        (path, name, places.get(tensor.data_ptr()), tuple(tensor.shape), str(tensor.dtype))
        for path, name, tensor in _weights(model)
    ]
    return blake3(repr(table).encode()).digest()
