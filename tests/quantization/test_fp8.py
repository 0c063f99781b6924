"""FP8 checkpoints: one scale, a scale per output, 128x128 blocks."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.registry import scheme_of
from tests.quantization.stored import check_cuts, load, zeros

FP8 = torch.float8_e4m3fn
E8M0 = getattr(torch, "float8_e8m0fnu", None)


def blocks(shape, block=(128, 128), seed=0):
    """(codes, scales, values)."""
    random = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=random) * 100).to(FP8)
    scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=random) * 0.01 + 1e-4
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return codes, scale, codes.float() * scale[rows][:, columns]


def test_blocks_multiply_despite_their_name():
    codes, scale, values = blocks((300, 200))
    weight = load(BlockFormat(), {"weight": codes, "weight_scale_inv": scale}, (300, 200))
    assert torch.equal(weight.dequantize(), values)
    assert weight.block == (128, 128)


def test_scales_of_blocks_in_four_dimensions():
    codes, scale, values = blocks((256, 384))
    found = BlockFormat(scale="weight_scale")
    tensors = {"weight": codes, "weight_scale": scale[:, None, :, None].contiguous()}
    assert torch.equal(load(found, tensors, (256, 384)).dequantize(), values)
    check_cuts(found, tensors, (256, 384), rows=(2,), columns=(3,))


@pytest.mark.skipif(E8M0 is None, reason="torch has no float8_e8m0fnu")
def test_scales_that_are_powers_of_two():
    codes, _, _ = blocks((256, 256))
    exponent = torch.tensor([[0, 120], [130, 254]], dtype=torch.uint8)
    values = codes.double() * torch.exp2(exponent.double() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = BlockFormat()
    tensors = {"weight": codes, "weight_scale_inv": exponent.view(E8M0)}
    scale = load(found, tensors, (256, 256)).scale.double()
    assert torch.equal(scale, torch.exp2(exponent.double() - 127))
    weight = load(found, tensors, (256, 256), columns=slice(128, 256), rows=slice(0, 128))
    assert torch.equal(weight.dequantize().double(), values[:128, 128:])
    exponent[0, 1] = 255
    with pytest.raises(CheckpointError, match="weight_scale_inv: 1 of 4 scales are NaN"):
        load(found, tensors, (256, 256))


def test_parts_that_begin_inside_a_block():
    """Blocks of a fused weight get fewer rows, with the same scales: head_dim 64, or a width of 576."""
    found = BlockFormat()
    heights = (576, 192, 192)
    fused = found.allocate((960, 256), torch.float32, zeros, (0, 576, 768))
    assert fused.block == (64, 128)
    expected, at = [], 0
    for seed, height in enumerate(heights):
        codes, scale, values = blocks((height, 256), seed=seed)
        load(found, {"weight": codes, "weight_scale_inv": scale}, (height, 256), into=fused, at=at)
        expected.append(values)
        at += height
    assert torch.equal(fused.dequantize(), torch.cat(expected))


def test_parts_of_ranks():
    codes, scale, values = blocks((768, 768))
    found, tensors = BlockFormat(), {"weight": codes, "weight_scale_inv": scale}
    check_cuts(found, tensors, (768, 768))
    # One head of 64 outputs for each rank, inside a block.
    for rank in range(4):
        rows = slice(64 * rank, 64 * rank + 64)
        fused = found.allocate((192, 768), torch.float32, zeros, (0, 128))
        load(found, tensors, (768, 768), rows=rows, into=fused, at=128)
        assert torch.equal(fused.dequantize()[128:], values[rows])
    with pytest.raises(ValueError, match=r"inputs 192:384 .* blocks of 128 inputs .* over 1, 2, 3, 6 ranks"):
        found.check_cut((768, 768), slice(None), slice(192, 384))
    with pytest.raises(ValueError, match=r"outputs 192:384 .* over 1, 2, 3, 6 ranks"):
        found.check_cut((768, 768), slice(192, 384), slice(None))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale(shape):
    codes, _, _ = blocks((32, 48))
    found = ScaledFormat(per="tensor")
    tensors = {"weight": codes, "weight_scale": torch.full(shape, 0.013)}
    assert torch.equal(load(found, tensors, (32, 48)).dequantize(), codes.float() * torch.tensor(0.013))
    check_cuts(found, tensors, (32, 48))


@pytest.mark.parametrize("shape", [(32, 1), (32,)])
def test_a_scale_per_output(shape):
    codes, _, _ = blocks((32, 48))
    scale = torch.rand(32) + 0.1
    tensors = {"weight": codes, "weight_scale": scale.reshape(shape)}
    found = ScaledFormat(per="channel")
    assert torch.equal(load(found, tensors, (32, 48)).dequantize(), codes.float() * scale[:, None])
    check_cuts(found, tensors, (32, 48), rows=(2, 4))


def test_fused_parts_keep_their_scales():
    found = ScaledFormat(per="tensor")
    fused = found.allocate((64, 48), torch.float32, zeros, (0, 32))
    expected = []
    for index, scale in enumerate((0.5, 0.003)):
        codes, _, _ = blocks((32, 48), seed=index)
        load(found, {"weight": codes, "weight_scale": torch.tensor(scale)}, (32, 48), into=fused, at=32 * index)
        expected.append(codes.float() * torch.tensor(scale))
    assert torch.equal(fused.dequantize(), torch.cat(expected))


def test_static_scales_of_fused_parts_must_be_equal():
    found = ScaledFormat(per="tensor", inputs="tensor")
    fused = found.allocate((64, 48), torch.float32, zeros, (0, 32))
    codes, _, _ = blocks((32, 48))
    tensors = {"weight": codes, "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(0.25)}
    load(found, tensors, (32, 48), into=fused)
    load(found, tensors, (32, 48), into=fused, at=32)
    assert fused.input_scale.tolist() == [0.25]
    with pytest.raises(CheckpointError, match="input_scale: differs .*: 0.25 and 0.5"):
        load(found, tensors | {"input_scale": torch.tensor(0.5)}, (32, 48), into=fused, at=32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_scales_that_cannot_be(name, value):
    codes, _, _ = blocks((32, 48))
    found = ScaledFormat(per="tensor", inputs="tensor")
    tensors = {"weight": codes, "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(0.25)}
    with pytest.raises(CheckpointError, match=f"{name}: 1 of 1 scales"):
        load(found, tensors | {name: torch.tensor(value)}, (32, 48))


def test_zero_points_of_symmetric_codes_are_zero():
    codes, _, _ = blocks((32, 48))
    found = ScaledFormat(per="tensor")
    tensors = {"weight": codes, "weight_scale": torch.tensor(1.0), "weight_zero_point": torch.zeros(32, 1).to(FP8)}
    load(found, tensors, (32, 48))
    with pytest.raises(CheckpointError, match="weight_zero_point: is not zero"):
        load(found, tensors | {"weight_zero_point": torch.ones(1, dtype=torch.int8)}, (32, 48))


def test_codes_that_are_nan():
    codes, scale, _ = blocks((32, 48))
    codes.view(torch.uint8)[3, 4] = 0xFF
    with pytest.raises(CheckpointError, match="weight: has NaN"):
        load(BlockFormat(), {"weight": codes, "weight_scale_inv": scale}, (32, 48))
    with pytest.raises(CheckpointError, match="weight: has NaN"):
        load(ScaledFormat(per="tensor"), {"weight": codes, "weight_scale": torch.tensor(1.0)}, (32, 48))


def scheme(dtypes=None, method="fp8", **config):
    return scheme_of({"quantization_config": {"quant_method": method, **config}}, dtypes=dtypes)


def test_description():
    name = "model.layers.0.mlp.up_proj"
    assert scheme(activation_scheme="dynamic").format_of(name) == ScaledFormat(per="tensor", inputs="token")
    assert scheme(activation_scheme="static").format_of(name) == ScaledFormat(per="tensor", inputs="tensor")
    assert scheme(weight_block_size=[128, 128]).format_of(name) == BlockFormat((128, 128))
    assert scheme(weight_block_size=[128, 128], scale_fmt="ue8m0").format_of(name) == BlockFormat((128, 128))
    assert scheme(method="fbgemm_fp8", activation_scale_ub=1200.0).format_of(name).per == "channel"
    assert scheme().format_of("lm_head") is None
    # transformers' names of single scales.
    dtypes = {f"{name}.weight": "F8_E4M3", f"{name}.weight_scale_inv": "F32", f"{name}.activation_scale": "F32"}
    found = scheme(dtypes, activation_scheme="static").format_of(name)
    assert (found.scale, found.input_scale) == ("weight_scale_inv", "activation_scale")


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_skipped_modules_are_named_exactly(key):
    found = scheme(**{key: ["model.layers.0.mlp.gate", "vision_tower", "down_proj"]})
    assert found.format_of("model.layers.0.mlp.gate") is None
    assert found.format_of("model.layers.0.mlp.gate_proj") is not None
    assert found.format_of("model.layers.0.mlp.down_proj") is not None
    assert found.format_of("vision_tower.blocks.0.mlp.up_proj") is None  # within a module that is named


def test_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="static activations"):
        scheme(weight_block_size=[128, 128], activation_scheme="static")
    with pytest.raises(UnsupportedModelError, match="e5m2"):
        scheme(fmt="e5m2")
    with pytest.raises(UnsupportedModelError, match="'sometimes'"):
        scheme(activation_scheme="sometimes")
    with pytest.raises(CheckpointError, match="weight_block_size"):
        scheme(weight_block_size=[128])
