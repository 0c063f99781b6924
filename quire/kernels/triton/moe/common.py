"""Configurations, shapes and routings of mixtures of experts. A *pair* is a token and one of its chosen experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class GemmTile(NamedTuple):
    """The tile shape of one GEMM."""

    n: int
    """Outputs per program (with a gate: gate features, and as many up features)."""
    k: int = 0
    """Inputs per loop iteration (`tile`)."""
    warps: int = 4
    stages: int = 0
    """Software-pipeline stages (`tile`)."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A kernel for the experts, and its tile shapes."""

    kernel: str
    """`vector`: each pair by itself; `tile`: the tokens of an expert together. In few bits also `stream`, `scratch` and
    `hopper`, see `quantized/experts.py`."""
    gate_up: GemmTile
    down: GemmTile
    block_m: int = 0
    """Pairs per program (`tile`, `scratch`), or of an item (`hopper`)."""
    tma: bool = False
    """Whether TMA loads the weights, rather than the threads (`tile`)."""


class ExpertsShape(NamedTuple):
    """The experts of a layer."""

    experts: int
    top_k: int
    width: int
    hidden: int


@dataclass(frozen=True)
class ChosenExperts:
    """The routing of a step's tokens: what `route` returned."""

    top_k: int
    weights: torch.Tensor
    """[tokens, top_k] float32."""
    experts: torch.Tensor
    """[tokens, top_k] int32."""
