"""What every layer is built from, and the checkpoint tensors it declares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.kernels.base import Ops
from quire.kernels.kv import KVFormat
from quire.kernels.weights.base import QuantizedWeight
from quire.layers.attention.base import AttentionBackend
from quire.loading.model_config import ModelConfig
from quire.loading.weights import AnyTarget
from quire.platforms.base import MemoryArena
from quire.quantization.formats.base import Scheme


@dataclass(frozen=True)
class BuildContext:
    """The model's shape, this process's rank, and the kernels it runs on."""

    config: ModelConfig
    ranks: Ranks
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    max_model_len: int
    experts: ExpertRanks | None = None
    """The ranks that whole experts are spread over; None: each rank has a part of every expert."""
    scheme: Scheme | None = None
    """What the checkpoint says about matrices in few bits; None: it has none."""
    kv_format: KVFormat = None  # type: ignore[assignment]  # __post_init__ sets it
    """How the KV cache is stored; unset: in `dtype`."""
    memory: MemoryArena = field(init=False)
    """Where the weights go."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", MemoryArena(self.device))
        object.__setattr__(self, "kv_format", self.kv_format or KVFormat(self.dtype))

    def parameter(self, *shape: int) -> nn.Parameter:
        """Memory for a weight; the checkpoint fills it."""
        return nn.Parameter(self.memory.zeros(shape, self.dtype), requires_grad=False)


@runtime_checkable
class WeightedLayer(Protocol):
    """A layer that holds weights."""

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The checkpoint tensors that fill its weights, named relative to the module that owns the layer."""
        ...


@runtime_checkable
class MatrixLayer(Protocol):
    """A layer whose matrices may be in few bits: they are made once the layer's name in the model is known."""

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrices. `owner`: the full name of the module that owns the layer."""
        ...


def create_weights(model: nn.Module, build: BuildContext) -> None:
    """Make the matrices of every layer, in the formats that the checkpoint has them in."""
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            module.create_weights(build, path.rpartition(".")[0])


def quantized_weights(model: nn.Module) -> list[QuantizedWeight]:
    """Every weight in few bits."""
    found = {id(held): held for module in model.modules() for held in vars(module).values()}
    return [held for held in found.values() if isinstance(held, QuantizedWeight)]


def collect_targets(model: nn.Module) -> dict[str, list[AnyTarget]]:
    """Every checkpoint tensor `model` needs, by its full Hugging Face name, with the places its parts go."""
    collected: dict[str, list[AnyTarget]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, WeightedLayer):
            continue
        owner = path.rpartition(".")[0]
        for name, targets in module.targets().items():
            if owner:
                targets = [_prefixed(target, owner) for target in targets]
            collected.setdefault(f"{owner}.{name}" if owner else name, []).extend(targets)
    return collected


def _prefixed(target: AnyTarget, owner: str) -> AnyTarget:
    if not target.layouts:
        return target
    return replace(target, layouts=tuple(layout.under(owner) for layout in target.layouts))
