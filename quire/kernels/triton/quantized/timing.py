"""Times products with weights in few bits as a step runs them, for `tuning.py`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from quire.kernels.base import Ops
from quire.kernels.triton.quantized.registry import products_of
from quire.kernels.triton.skinny_gemm.timing import COLD_BYTES, GraphTimer
from quire.kernels.weights.base import QuantizedWeight

log = logging.getLogger(__name__)


def random_like(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    """A weight of the same kind on a device: codes of the full range, small positive scales."""
    tensors = {name: _random(name, tensor, device) for name, tensor in weight.tensors.items()}
    return weight.with_tensors(tensors, weight.shape)


def _random(name: str, like: torch.Tensor, device: str) -> torch.Tensor:
    shape, dtype = like.shape, like.dtype
    if name == "order":
        return torch.arange(len(like), dtype=dtype, device=device)
    if dtype is torch.uint8 and name == "scale":  # exponents
        return torch.randint(118, 124, shape, dtype=dtype, device=device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (torch.rand(shape, device=device) * 0.02 + 0.001).to(dtype)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
    if dtype.is_floating_point:  # no NaN; scales are positive
        codes = torch.where(codes & 0x7F == 0x7F, codes & 0x80, codes)
        codes = codes & 0x7F if name == "scale" else codes
    return codes.view(dtype)


class GraphProductTimer:
    """Times a product in a CUDA graph, after another one like it, its weights not in L2."""

    def __init__(self, ops: Ops, device: str = "cuda") -> None:
        self._ops, self._device = ops, device
        self._graphs = GraphTimer()
        self._weights: tuple[QuantizedWeight, list[QuantizedWeight]] | None = None

    def __call__(self, weight: QuantizedWeight, rows: int, gated: bool, config: Any) -> float:
        """Microseconds of a product by a configuration; infinity if it does not compile or does not fit."""
        products = products_of(weight)(self._ops, False, config)
        product = products.gated_linear if gated else products.linear
        weights = self._copies(weight)
        x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=self._device)
        try:
            product(x, weights[0])
        except (CompilationError, OutOfResources, PTXASError, ValueError) as error:
            log.info("%s rows cannot be computed by %s: %s", rows, config, error)
            return float("inf")
        estimate = 3.0 + weight.nbytes / 4e6 + rows * weight.numel() / 3e8
        return self._graphs.time(lambda each: product(x, each), weights, estimate)  # type: ignore[arg-type]

    def _copies(self, weight: QuantizedWeight) -> list[QuantizedWeight]:
        """Several weights of this kind; those of the last call if they fit, since generating them takes longest."""
        if self._weights is None or self._weights[0] is not weight:
            self._weights = None  # freed before the next are generated
            count = -(-COLD_BYTES // weight.nbytes)
            self._weights = weight, [random_like(weight, self._device) for _ in range(count)]
        return self._weights[1]
