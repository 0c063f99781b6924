"""Each token through the experts that the router chose for it, by the kernel a configuration names.

Up to 8 tokens go pair by pair (`vector.py`), more are sorted by expert into tiles (`layout.py`, `tile.py`); `tuning.py`
chooses. None of them synchronizes with the host, so all can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape
from quire.kernels.triton.moe.layout import LARGE, SMALL, arrange
from quire.kernels.triton.moe.route import MAX_EXPERTS, route
from quire.kernels.triton.moe.tile import combine, tile_down, tile_experts, tile_gate_up
from quire.kernels.triton.moe.vector import vector_experts

Task = Callable[[], object]
"""Launches kernels."""


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    config: ExpertsConfig,
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`Ops.experts` by the kernel of `config`."""
    if config.kernel == "vector":
        routing = ChosenExperts(chosen.shape[1], weights, chosen)
        return vector_experts(x, routing, gate_up, down, config, variant=variant)
    return tile_experts(x, weights, chosen, gate_up, down, config, variant)


def shape_of(down: torch.Tensor, top_k: int) -> ExpertsShape:
    """The shape of experts whose second product has the stacked weights [experts, hidden, width]."""
    count, hidden, width = down.shape
    return ExpertsShape(count, top_k, width, hidden)


def launches(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    renormalise: bool,
    routed: int,
    configs: Iterable[ExpertsConfig],
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> dict[object, Task]:
    """Tasks that launch the kernels of these configurations, each once, for one token of zeros. `routed`: number of
    experts the router chooses among, on all ranks."""
    count, _, hidden = gate_up.shape
    width = down.shape[2]

    def zeros(*size: int, dtype: torch.dtype = gate_up.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=gate_up.device)

    def weights() -> torch.Tensor:
        return zeros(1, top_k, dtype=torch.float32)

    def chosen(tokens: int = 1) -> torch.Tensor:
        return zeros(tokens, top_k, dtype=torch.int32)

    def vector(config: ExpertsConfig, fused_norm: bool) -> None:
        norm = (zeros(hidden), 1e-6) if fused_norm else None
        routing = ChosenExperts(top_k, weights(), chosen())
        vector_experts(zeros(1, hidden), routing, gate_up, down, config, norm, variant)

    def gate_up_tiles(config: ExpertsConfig) -> None:
        layout = arrange(chosen(), count, config.block_m)
        tile_gate_up(zeros(1, hidden), layout, gate_up, top_k, config, variant.gate_up_bias, variant.activation)

    def down_tiles(config: ExpertsConfig) -> None:
        layout = arrange(chosen(), count, config.block_m)
        tile_down(zeros(top_k, width), layout, down, top_k, config, variant.down_bias)

    tasks: dict[object, Task] = {
        "route": lambda: route(
            zeros(1, routed), top_k, renormalise, zeros(routed, dtype=torch.int64), zeros(1, dtype=torch.int64)
        ),
        "combine": lambda: combine(zeros(top_k, hidden), weights(), chosen(), count),
    }
    for config in configs:
        if config.kernel == "vector":
            for fused_norm in (True, False):
                tasks[config, fused_norm] = functools.partial(vector, config, fused_norm)
        else:
            tasks["gate_up", config.gate_up, config.block_m, config.tma] = functools.partial(gate_up_tiles, config)
            tasks["down", config.down, config.block_m, config.tma] = functools.partial(down_tiles, config)
    for pairs in (1, SMALL + 1, LARGE + 1):  # one small program, one large one, several
        tokens = -(-pairs // top_k)
        tasks["arrange", pairs] = functools.partial(lambda tokens: arrange(chosen(tokens), count, 16), tokens)
    return tasks


__all__ = ["MAX_EXPERTS", "ChosenExperts", "experts", "launches", "route", "shape_of", "vector_experts"]
