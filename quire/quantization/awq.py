"""Scaling of inputs before rounding, as AWQ (arXiv 2306.00978) and SmoothQuant (arXiv 2211.10438) do.

Column j of a matrix is multiplied by s_j before it is rounded, and what produces input j (a norm's gain, or the rows of
the matrix before) is divided by it, so that nothing else changes. AWQ gives large inputs finer weights: s grows with
the inputs' root mean square. SmoothQuant makes inputs that are rounded too more even: s grows with the inputs' largest
values, and shrinks with the weights'. How much is searched for: the least error of the layer's output wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

RATIOS = tuple(step / 20 for step in range(21))
SMALLEST = 1e-4
"""Inputs and weights below this, relative to the largest, are taken to be this large."""


def awq_candidates(rms: torch.Tensor) -> Iterable[torch.Tensor]:
    """Scales [in] to try, for inputs of this root mean square."""
    size = _positive(rms)
    return (_centred(size.pow(ratio)) for ratio in RATIOS[1:])


def smooth_candidates(peaks: torch.Tensor, weight_peaks: torch.Tensor) -> Iterable[torch.Tensor]:
    """Scales [in] to try, for the largest values of inputs and of the columns that meet them."""
    size, weight_size = _positive(peaks), _positive(weight_peaks)
    return (_centred(size.pow(ratio) / weight_size.pow(1 - ratio)) for ratio in RATIOS[4:])


def search_scales(
    candidates: Iterable[torch.Tensor], error: Callable[[torch.Tensor | None], float]
) -> torch.Tensor | None:
    """The scales with the least error; None if no scaling is at least as good. `error(None)`: without scales."""
    best, least = None, error(None)
    for scales in candidates:
        if (found := error(scales)) < least:
            best, least = scales, found
    return best


def output_error(error: torch.Tensor, hessian: torch.Tensor) -> float:
    """Mean squared error of a layer's output, summed over outputs, for an error [out, in] of its matrix; `hessian` is
    the mean of x x^T over its inputs."""
    return float(((error.float() @ hessian.float()) * error).sum())


def _positive(size: torch.Tensor) -> torch.Tensor:
    largest = float(size.max())
    return torch.ones_like(size) if largest <= 0 else size.clamp_min(SMALLEST * largest)


def _centred(scales: torch.Tensor) -> torch.Tensor:
    return scales / (scales.max() * scales.min()).sqrt()
