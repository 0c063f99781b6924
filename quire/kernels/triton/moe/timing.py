"""Times experts as a step runs them, for `tuning.py`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from quire.kernels.triton.compiler import Compilers
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape
from quire.kernels.triton.moe.layout import arrange
from quire.kernels.triton.moe.tile import tile_down, tile_gate_up
from quire.kernels.triton.moe.vector import vector_down, vector_gate_up
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer

log = logging.getLogger(__name__)

ROUTINGS = 8
"""Routings that are rotated over: the experts of a few tokens should not be in L2."""


class ExpertTensors(NamedTuple):
    """The experts' weights of one layer."""

    gate_up: torch.Tensor
    down: torch.Tensor


def random_experts(shape: ExpertsShape, dtype: torch.dtype, device: str = "cuda") -> ExpertTensors:
    """Weights scaled as in a model: for activations about 1 outputs are about 1."""
    gate_up = torch.empty(shape.experts, 2 * shape.width, shape.hidden, dtype=dtype, device=device)
    down = torch.empty(shape.experts, shape.hidden, shape.width, dtype=dtype, device=device)
    return ExpertTensors(gate_up.normal_(std=shape.hidden**-0.5), down.normal_(std=shape.width**-0.5))


def random_logits(shape: ExpertsShape, tokens: int, dtype: torch.dtype, used: int = 0) -> torch.Tensor:
    """Logits by which all experts are equally likely, or, with `used`, every token chooses among the first `used`."""
    logits = torch.randn(tokens, shape.experts, dtype=dtype, device="cuda")
    if used:
        logits[:, :used] += 100.0
    return logits


class GraphExpertsTimer:
    """Times a configuration as a step runs it: in a CUDA graph, the experts not in L2."""

    def __init__(self, layers: int = 0) -> None:
        """`layers`: layers of weights rotated over; 0: as many as exceed L2."""
        self._layers = layers
        self._graphs, self._few_graphs = GraphTimer(), GraphTimer(replays=2)
        self._weights: tuple[object, list[ExpertTensors]] | None = None

    def __call__(
        self, shape: ExpertsShape, tokens: int, dtype: torch.dtype, config: ExpertsConfig, part: str = ""
    ) -> float:
        """Microseconds; infinity if it does not compile or does not fit."""
        logits = [random_logits(shape, tokens, dtype) for _ in range(ROUTINGS)]
        return self.time(shape, logits, dtype, config, part)

    def time(
        self, shape: ExpertsShape, logits: list[torch.Tensor], dtype: torch.dtype, config: ExpertsConfig, part: str = ""
    ) -> float:
        """The same, for these logits."""
        tokens, layers = logits[0].shape[0], self.weights(shape, dtype)
        x = torch.randn(tokens, shape.hidden, dtype=dtype, device="cuda")
        routed = [moe.route(one, shape.top_k, True, None) for one in logits]
        features = torch.randn(tokens * shape.top_k, shape.width, dtype=dtype, device="cuda")
        count = len(layers)
        launches = -(-ROUTINGS // count) * count
        layouts = None
        if config.kernel == "tile" and part:
            layouts = [arrange(chosen, shape.experts, config.block_m) for _, chosen in routed]

        def run(index: int) -> None:
            gate_up, down = layers[index % count]
            weights, chosen = routed[index % len(routed)]
            if not part:
                moe.experts(x, weights, chosen, gate_up, down, config)
            elif layouts is None:
                routing = ChosenExperts(shape.top_k, weights, chosen)
                if part == "gate_up":
                    vector_gate_up(x, routing, gate_up, config.gate_up, None)
                else:
                    vector_down(features, routing, down, config.down)
            elif part == "gate_up":
                tile_gate_up(x, layouts[index % len(routed)], gate_up, shape.top_k, config)
            else:
                tile_down(features, layouts[index % len(routed)], down, shape.top_k, config)

        try:
            run(0)
            torch.cuda.synchronize()
        except (CompilationError, OutOfResources, PTXASError) as error:
            log.warning("%s of %d tokens cannot be computed by %s: %s", part or "experts", tokens, config, error)
            return float("inf")

        def chain() -> None:
            for index in range(launches):
                run(index)

        graphs = self._graphs if tokens <= 1024 else self._few_graphs  # milliseconds each: few replays are enough
        return graphs.replay(chain) / launches

    def weights(self, shape: ExpertsShape, dtype: torch.dtype) -> list[ExpertTensors]:
        """The layers rotated over; those of the last call if they fit, since generating them takes longest."""
        if self._weights is None or self._weights[0] != (shape, dtype):
            self._weights = None  # freed before the next are generated
            size = 3 * shape.experts * shape.width * shape.hidden * dtype.itemsize
            count = self._layers or max(1, -(-4 * COLD_BYTES // size))
            self._weights = (shape, dtype), [random_experts(shape, dtype) for _ in range(count)]
        return self._weights[1]


def compile_experts(shape: ExpertsShape, experts: ExpertTensors, configs: Iterable[ExpertsConfig]) -> int:
    """Compile the kernels of these configurations in parallel; returns the number of tasks."""
    tasks = moe.launches(experts.gate_up, experts.down, shape.top_k, True, shape.experts, configs)
    Compilers(list(tasks.values()), f"experts {experts.gate_up.dtype} {shape} {sorted(map(str, tasks))}").wait()
    return len(tasks)
