"""GPTQ (arXiv 2210.17323): rounds a matrix column by column, and moves each column's error to those not yet rounded.

The error is measured on the layer's output: tr(E H E^T), where H is the mean of x x^T over the layer's inputs.
"""

from __future__ import annotations

import torch

from quire.quantization.rounding import Rounded, group_scales, integer_codes

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to the diagonal."""
BLOCK = 128
"""Columns whose corrections reach the rest of the matrix in one product."""
MAX_DAMPING = 10.0


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
    """As `round_groups`, for a weight [out, in] and H [in, in].

    `by_importance`: columns with large inputs are rounded first ("activation order"). Scales are fixed beforehand, so
    that groups stay as they are in the file ("actorder: weight" in compressed-tensors). `search`: as in `round_groups`.
    """
    # Weighting the search by the inputs' sizes makes outputs err more (by 9 % on the default model): the columns that
    # follow take up what clipped values lose, whatever their size.
    scale, zero = group_scales(weight, bits, group, symmetric, scale_dtype, search)
    width = weight.shape[1]
    order = torch.arange(width, device=weight.device)
    if by_importance:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    inverse = _inverse_factor(hessian[order][:, order], damping)
    # Transposed, so that a column of the matrix is contiguous.
    left = weight.float().t()[order]
    spread = scale.float().t()[order // group]
    middle = torch.full_like(spread, float(1 << (bits - 1))) if zero is None else zero.float().t()[order // group]
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = torch.empty_like(left[start:stop])
        for column in range(start, stop):
            code = integer_codes(left[column], spread[column], middle[column], bits)
            restored = (code.float() - middle[column]) * spread[column]
            error = (left[column] - restored) / inverse[column, column]
            left[column + 1 : stop].addr_(inverse[column, column + 1 : stop], error, alpha=-1)
            codes[column], errors[column - start] = code, error
        left[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    unordered = torch.empty_like(codes)
    unordered[order] = codes
    return Rounded(unordered.t().contiguous(), scale, zero)


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
