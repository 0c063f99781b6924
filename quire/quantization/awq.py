"""Scaling of inputs before rounding, as AWQ does (arXiv 2306.00978).

Inputs that are large on average get finer weights: column j of a matrix is multiplied by s_j before it is rounded, and
what produces input j (a norm's gain, or the rows of the matrix before) is divided by it, so that nothing else changes.
The scales are s = rms(input)^ratio; the ratio with the least error of the layer's output is searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

RATIOS = tuple(step / 20 for step in range(20))
SMALLEST_INPUT = 1e-4
"""Inputs below this, relative to the largest, are taken to be this large."""


def search_input_scales(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    restore: Callable[[torch.Tensor], torch.Tensor],
    tie: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """The scales [in] for matrices [out, in] that read the same inputs; None if no scaling is better than none.

    hessian mean of x x^T over the inputs
    restore rounds a (scaled) matrix and returns its values
    tie     makes scales equal where the producer of the inputs has one row for several of them
    """
    size = hessian.diagonal().float().clamp_min(0).sqrt()
    if not float(size.max()) > 0:
        return None
    size = size.clamp_min(SMALLEST_INPUT * float(size.max()))
    if tie is not None:
        size = tie(size.square()).sqrt()
    best, least = None, float("inf")
    for ratio in RATIOS:
        scales = size.pow(ratio)
        scales = scales / (scales.max() * scales.min()).sqrt()
        errors = [restore(weight * scales) / scales - weight for weight in weights]
        error = sum(output_error(each, hessian) for each in errors)
        if error < least:
            best, least = scales, error
    return None if best is None or bool((best == 1).all()) else best


def output_error(error: torch.Tensor, hessian: torch.Tensor) -> float:
    """Mean squared error of a layer's output, summed over outputs, for an error [out, in] of its matrix."""
    return float(((error.float() @ hessian.float()) * error).sum())
