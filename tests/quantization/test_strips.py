"""Integer formats in strips: the checkpoint's values bit by bit, for every rank, order of inputs and size."""

from __future__ import annotations

import pytest
import torch

from quire.errors import CheckpointError
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.strips import StripWeight
from quire.quantization.formats.grouped import AwqFormat, GptqFormat
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.formats.strips import StripFormat
from tests.quantization import test_awq as awq
from tests.quantization import test_gptq as gptq
from tests.quantization.stored import check_cuts, load, zeros

SHAPE = (192, 192)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(bits: int, ordered: bool, symmetric: bool) -> None:
    plain = GptqFormat(bits, 32, not symmetric, ordered)
    tensors, values = gptq.matrix(plain)
    found = StripFormat(plain)
    weight = load(found, tensors, SHAPE)
    assert isinstance(weight, StripWeight) and weight.bits == plain.held
    assert torch.equal(weight.dequantize(), values)
    if not ordered:
        check_cuts(found, tensors, SHAPE)


@pytest.mark.parametrize("group", [32, 64, None])
def test_awq(group: int | None) -> None:
    tensors, values = awq.matrix(group)
    found = StripFormat(AwqFormat(4, group))
    assert torch.equal(load(found, tensors, awq.SHAPE).dequantize(), values)
    check_cuts(found, tensors, awq.SHAPE, columns=(3,) if group == 64 else (2, 3))


@pytest.mark.parametrize("inputs", ["token", "none"])
def test_int8(inputs: str) -> None:
    codes = torch.randint(-128, 128, SHAPE, dtype=torch.int8)
    scale = torch.rand(192, 1) + 0.1
    found = StripFormat.of(ScaledFormat(torch.int8, inputs=inputs))
    tensors = {"weight": codes, "weight_scale": scale}
    weight = load(found, tensors, SHAPE)
    assert isinstance(weight, StripWeight) and torch.equal(weight.dequantize(), codes.float() * scale)
    # By token, if the checkpoint says so; else by shorter blocks, which err less.
    assert weight.block == (192 if inputs == "token" else 64)
    check_cuts(found, tensors, SHAPE)


def test_orders_that_differ_within_a_fused_weight_are_refused() -> None:
    found = StripFormat(GptqFormat(4, 32, True, True))
    weight = found.allocate((384, 192), torch.float32, zeros)
    for seed, at in ((0, 0), (0, 192)):
        load(found, gptq.matrix(found.stored_as, seed=seed)[0], SHAPE, into=weight, at=at)
    with pytest.raises(CheckpointError, match="g_idx: differs"):
        load(found, gptq.matrix(found.stored_as, seed=1)[0], SHAPE, into=weight, at=192)


def test_other_sizes_and_formats_are_held_as_before() -> None:
    plain = GptqFormat(4, 16, True)  # groups shorter than what is unpacked at once
    tensors, values = gptq.matrix(plain)
    weight = load(StripFormat(plain), tensors, SHAPE)
    assert isinstance(weight, GroupedWeight) and torch.equal(weight.dequantize(), values)
    for other in (ScaledFormat(), BlockFormat(), ScaledFormat(torch.int8, inputs="tensor"), None):
        assert StripFormat.of(other) == other
