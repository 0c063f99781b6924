"""Rounding to nearest, against a search over all codes in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire.quantization.rounding import (
    Rounded,
    fp4_codes,
    restore_groups,
    round_blocks,
    round_channels,
    round_groups,
    round_mxfp4,
    round_nvfp4,
)

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def matrix(rows: int = 6, columns: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    weight[0, 3] = 9.0  # an outlier
    return weight


def every_e4m3() -> torch.Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return values[values.isfinite()].unique()


def nearest(values: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Distance of each value to the nearest choice."""
    return (values.double().unsqueeze(-1) - choices).abs().amin(-1)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
def test_channels_take_the_nearest_code(code, scale_dtype):
    weight = matrix()
    codes, scale = round_channels(weight, code, scale_dtype)
    assert codes.dtype == code and scale.dtype == scale_dtype and scale.shape == (6,)
    largest = 127.0 if code is torch.int8 else 448.0
    wanted = (weight.abs().amax(-1) / largest).to(scale_dtype)
    assert torch.equal(scale, wanted)
    choices = torch.arange(-127, 128).double() if code is torch.int8 else every_e4m3()
    steps = weight.double() / scale.double().unsqueeze(-1)
    torch.testing.assert_close((codes.double() - steps).abs(), nearest(steps, choices), atol=1e-4, rtol=0)


def test_blocks_have_a_scale_for_each_128_by_128():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    codes, scale = round_blocks(weight)
    assert scale.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            part = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            assert scale[row, column] == weight[part].abs().max() / 448
            steps = weight[part].double() / scale[row, column].double()
            error = (codes[part].double() - steps).abs()
            torch.testing.assert_close(error, nearest(steps, every_e4m3()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 64])
def test_groups_follow_the_rule(bits, symmetric, group):
    weight = matrix()
    codes, scale, zero = round_groups(weight, bits, group, symmetric)
    top = 2**bits - 1
    assert codes.dtype == torch.uint8 and (zero is None) == symmetric
    for row in range(weight.shape[0]):
        for index in range(weight.shape[1] // group):
            part = weight[row, index * group : (index + 1) * group].double()
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            if symmetric:
                step, middle = max(-low, high) / (top / 2), 2 ** (bits - 1)
            else:
                step = (high - low) / top
                assert zero is not None
                middle = int(zero[row, index])
                assert middle == round(-low / float(scale[row, index]))
            assert float(scale[row, index]) == pytest.approx(step, rel=1e-6)
            choices = (torch.arange(top + 1) - middle).double() * float(scale[row, index])
            chosen = choices[codes[row, index * group : (index + 1) * group].long()]
            torch.testing.assert_close((chosen - part).abs(), nearest(part, choices), atol=1e-6, rtol=0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_searched_scale_errs_less_in_every_group(symmetric):
    weight = matrix(8, 128, seed=3)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(4))

    def errors(rounded: Rounded) -> torch.Tensor:
        error = (restore_groups(rounded, 4, 32) - weight).square() * importance
        return error.unflatten(-1, (-1, 32)).sum(-1)

    plain = errors(round_groups(weight, 4, 32, symmetric))
    searched = errors(round_groups(weight, 4, 32, symmetric, search=True, importance=importance))
    assert (searched <= plain + 1e-9).all()
    assert searched.sum() < 0.95 * plain.sum()


def test_fp4_ties_go_to_even():
    middles = (FP4[1:] + FP4[:-1]) / 2
    assert fp4_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert fp4_codes(-middles).tolist() == [0, 10, 10, 12, 12, 14, 14]
    assert fp4_codes(torch.tensor([0.2, -0.2, 100.0, -100.0])).tolist() == [0, 0, 7, 15]


def test_mxfp4_scales_by_the_rule_of_ocp():
    weight = matrix(4, 64)
    weight[1] = 0
    weight[2, :32] = torch.full((32,), 2.0**-60)
    codes, exponents = round_mxfp4(weight)
    for row in range(4):
        for index in range(2):
            part = weight[row, 32 * index : 32 * index + 32].double()
            peak = float(part.abs().max())
            wanted = math.floor(math.log2(peak)) - 2 if peak else -127
            assert int(exponents[row, index]) - 127 == wanted
            chosen = codes[row, 32 * index : 32 * index + 32].long()
            values = FP4[chosen & 7] * torch.where(chosen > 7, -1.0, 1.0) * 2.0**wanted
            signed = torch.cat([FP4, -FP4]) * 2.0**wanted
            torch.testing.assert_close((values - part).abs(), nearest(part, signed), atol=0, rtol=1e-6)


def test_nvfp4_has_one_divisor_a_matrix():
    weight = matrix(4, 64)
    codes, scale, divisor = round_nvfp4(weight)
    assert float(divisor) == pytest.approx(448 * 6 / 9.0)
    wanted = weight.unflatten(-1, (-1, 16)).abs().amax(-1) / 6 * divisor
    assert torch.equal(scale.float(), wanted.to(torch.float8_e4m3fn).float())
    step = (scale.double() / divisor.double()).repeat_interleave(16, -1)
    values = FP4[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0) * step
    steps = weight.double() / step
    distance = nearest(steps, torch.cat([FP4, -FP4]))
    torch.testing.assert_close((values - weight).abs() / step, distance, atol=1e-4, rtol=0)
    shared = round_nvfp4(weight[1:], weight.abs().max())
    assert torch.equal(shared[0], codes[1:]) and shared[2] == divisor


def test_a_matrix_of_zeros_stays_zero():
    zeros = torch.zeros(4, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for code in (torch.int8, torch.float8_e4m3fn):
            codes, scale = round_channels(zeros, code, dtype)
            assert not codes.float().any() and (scale > 0).all()
        for symmetric in (True, False):
            rounded = round_groups(zeros, 4, 32, symmetric, dtype, search=True)
            assert not restore_groups(rounded, 4, 32).any() and (rounded.scale > 0).all()
    assert not round_mxfp4(zeros)[0].any()
    codes, scale, divisor = round_nvfp4(zeros)
    assert not codes.any() and divisor.isfinite()


def test_experts_are_rounded_like_single_matrices():
    stack = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(5))
    for round_one in (
        lambda w: round_channels(w, torch.float8_e4m3fn),
        lambda w: round_groups(w, 4, 32)[:2],
        lambda w: round_groups(w, 4, 32, symmetric=False, search=True),
        round_blocks,
        round_mxfp4,
    ):
        whole = round_one(stack)
        for expert in range(3):
            for together, alone in zip(whole, round_one(stack[expert]), strict=True):
                assert torch.equal(together[expert].float(), alone.float())


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="groups of 128 do not divide 64"):
        round_groups(matrix(), 4, 128)
