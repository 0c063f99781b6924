"""GPTQ against a plain loop over columns in float64, and against rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from quire.quantization.awq import output_error
from quire.quantization.gptq import corrected, gptq_groups
from quire.quantization.rounding import group_scales, restore_groups, round_groups


def correlated(columns: int, seed: int = 0, tokens: int = 512) -> torch.Tensor:
    """Inputs [tokens, columns] that are sums of few sources, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randn(tokens, columns // 4, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns // 4, columns, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    return (sources @ mixing + noise) * torch.rand(columns, generator=generator, dtype=torch.float64).pow(3)


def moments(columns: int) -> torch.Tensor:
    x = correlated(columns)
    return (x.T @ x / len(x)).float()


def column_by_column(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int, order: list[int]
) -> torch.Tensor:
    """Codes by the rule of optimal brain surgery: after each column the others take up its error, by the inverse of H
    over the columns that are left."""
    left = weight.double().clone()
    damped = hessian.double() + torch.eye(len(hessian), dtype=torch.float64) * 0.01 * hessian.double().diagonal().mean()
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        step, middle = scale[:, column // group].double(), zero[:, column // group].double()
        codes[:, column] = ((left[:, column] / step).round() + middle).clamp(0, 15).long()
        error = left[:, column] - (codes[:, column] - middle) * step
        left[:, rest] -= torch.outer(error, inverse[0] / inverse[0, 0])
    return codes


@pytest.mark.parametrize("by_importance", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_the_plain_loop(symmetric, by_importance):
    weight = torch.randn(8, 160, generator=torch.Generator().manual_seed(1))  # more than one block of columns
    hessian = moments(160)
    found = gptq_groups(weight, hessian, 4, 32, symmetric, by_importance=by_importance)
    scale, zero = group_scales(weight, 4, 32, symmetric, search=True)
    assert torch.equal(found.scale, scale)
    middle = torch.full_like(scale, 8) if zero is None else zero
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist() if by_importance else list(range(160))
    wanted = column_by_column(weight, hessian, scale, middle, 32, order)
    # A value half-way between two codes may be rounded either way; what follows in its row then differs too.
    assert (found.codes.long() == wanted).float().mean() > 0.99


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_err_less_than_rounded_to_nearest(group, symmetric):
    weight = torch.randn(32, 192, generator=torch.Generator().manual_seed(2))
    hessian = moments(192)
    nearest = round_groups(weight, 4, group, symmetric, search=True, importance=hessian.diagonal())
    found = gptq_groups(weight, hessian, 4, group, symmetric)
    before = output_error(restore_groups(nearest, 4, group) - weight, hessian)
    after = output_error(restore_groups(found, 4, group) - weight, hessian)
    assert after < 0.5 * before
    # `output_error` is the mean square over tokens.
    x = correlated(192)
    error = (restore_groups(found, 4, group) - weight).double()
    assert after == pytest.approx(float((x @ error.T).square().sum(-1).mean()), rel=1e-3)


def test_errors_of_the_layers_before_are_corrected():
    """Inputs that lost a tenth of a source that other inputs still show."""
    exact = correlated(64)
    x = exact.clone()
    x[:, ::3] *= 0.9
    x += 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    hessian, cross = (x.T @ x / len(x)).float(), ((exact - x).T @ x / len(x)).float()
    found = corrected(weight, hessian, cross, damping=1e-6)
    wanted = torch.linalg.lstsq(x, exact @ weight.double().T).solution.T
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)
    errors = [(x @ each.double().T - exact @ weight.double().T).square().mean() for each in (weight, found)]
    assert errors[1] < 0.5 * errors[0]


def test_without_correlation_it_rounds_to_nearest():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    found = gptq_groups(weight, torch.eye(64), 4, 32, search=False)
    assert torch.equal(found.codes, round_groups(weight, 4, 32).codes)


def test_inputs_that_never_occur():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    hessian = moments(64)
    hessian[5], hessian[:, 5] = 0, 0
    found = gptq_groups(weight, hessian, 4, 32)
    assert restore_groups(found, 4, 32).isfinite().all()
    assert restore_groups(gptq_groups(weight, torch.zeros(64, 64), 4, 32), 4, 32).isfinite().all()


def test_moments_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="second moments"):
        gptq_groups(torch.randn(4, 32), torch.full((32, 32), float("nan")), 4, 32)
