"""GPTQ (arXiv 2210.17323): rounds a matrix column by column, and moves each column's error to those not yet rounded.

The error is measured on the layer's output: tr(E H E^T), where H is the mean of x x^T over the layer's inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.quantization.rounding import Rounded, group_scales

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to the diagonal."""
BLOCK = 128
"""Columns whose corrections reach the rest of the matrix in one product."""
MAX_DAMPING = 10.0


def corrected(
    weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, damping: float = DAMPING
) -> torch.Tensor:
    """The weight [out, in] that comes nearest to the outputs of the model before anything was rounded.

    Inputs x differ from the exact ones by the errors of the layers before; `cross` is the mean of (exact - x) x^T. The
    correction is the regression of weight (exact - x) on x, as in GPTAQ (arXiv 2504.02692).
    """
    damped = hessian.float() + torch.eye(len(hessian), device=hessian.device) * (damping * hessian.diagonal().mean())
    return weight.float() + torch.linalg.solve(damped, (weight.float() @ cross.float()).t()).t()


def gptq_groups(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    damping: float = DAMPING,
    by_importance: bool = True,
    search: bool = True,
) -> Rounded:
    """As `round_groups`, for a weight [out, in] and H [in, in]. `search`: as there."""
    # Weighting the search by the inputs' sizes makes outputs err more (by 9 % on the default model): the columns that
    # follow take up what clipped values lose, whatever their size.
    scale, zero = group_scales(weight, bits, group, symmetric, scale_dtype, search)
    middle = torch.full_like(scale, float(1 << (bits - 1)), dtype=torch.float32) if zero is None else zero.float()

    def nearest(steps: torch.Tensor, column: int) -> torch.Tensor:
        own = middle[:, column // group]
        return (steps.round() + own).clamp(0, 2**bits - 1) - own

    steps = gptq_steps(weight, hessian, scale.float().repeat_interleave(group, 1), nearest, damping, by_importance)
    return Rounded((steps + middle.repeat_interleave(group, 1)).to(torch.uint8), scale, zero)


def gptq_steps(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    spread: torch.Tensor,
    nearest: Callable[[torch.Tensor, int], torch.Tensor],
    damping: float = DAMPING,
    by_importance: bool = True,
) -> torch.Tensor:
    """The values that codes stand for, in units of their scales; float32, like weight [out, in].

    spread  [out, in]: the scale of each value
    nearest of values in units of their scales and the number of their column [out]: the nearest that a code stands for
    by_importance: columns with large inputs are rounded first ("activation order"). Scales are fixed beforehand, so
            that groups stay as they are in the file ("actorder: weight" in compressed-tensors)
    """
    width = weight.shape[1]
    order = torch.arange(width, device=weight.device)
    if by_importance:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    inverse = _inverse_factor(hessian[order][:, order], damping)
    # Transposed, so that a column of the matrix is contiguous.
    left, scale = weight.float().t()[order], spread.float().t()[order]
    steps = torch.empty_like(left)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = torch.empty_like(left[start:stop])
        for place, column in enumerate(order[start:stop].tolist(), start):
            steps[place] = nearest(left[place] / scale[place], column)
            error = (left[place] - steps[place] * scale[place]) / inverse[place, place]
            left[place + 1 : stop].addr_(inverse[place, place + 1 : stop], error, alpha=-1)
            errors[place - start] = error
        left[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    unordered = torch.empty_like(steps)
    unordered[order] = steps
    return unordered.t().contiguous()


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of H's inverse. Damping grows tenfold until H is positive definite."""
    wide = hessian.float().clone()
    mean = float(wide.diagonal().mean())
    if mean <= 0:  # the layer saw no input other than zero
        return torch.eye(len(wide), device=wide.device)
    while damping <= MAX_DAMPING:
        damped = wide + torch.eye(len(wide), device=wide.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(factor.isfinite().all()):
                return factor
        damping *= 10
    raise ValueError("the inputs of this layer have no usable second moments: are the activations finite?")
