"""NVFP4 as ModelOpt stores it, and gpt-oss's experts in MXFP4."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.fp4 import Fp4Format, Mxfp4Experts
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.registry import scheme_of
from tests.quantization.stored import check_cuts, load, zeros

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODULE = "model.layers.0.mlp.up_proj"


def modelopt(algorithm="NVFP4", dtypes=None, **more):
    config = {"quant_method": "modelopt", "quant_algo": algorithm, **more}
    return scheme_of({"quantization_config": config}, dtypes=dtypes)


def nvfp4(shape=(32, 96)):
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, shape, generator=random)
    scale = (torch.rand(shape[0], shape[1] // 16, generator=random) * 400).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.000123)
    values = CODES[codes] * scale.float().repeat_interleave(16, 1) * factor
    tensors = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }
    return tensors, values


def test_modelopt_multiplies_by_its_second_scale():
    found = modelopt().format_of(MODULE)
    tensors, values = nvfp4()
    assert torch.equal(load(found, tensors, (32, 96)).dequantize(), values)
    check_cuts(found, tensors, (32, 96))
    tensors["weight_scale"][0, 0] = 0  # what e4m3 makes of a group of tiny values
    assert not load(found, tensors, (32, 96)).dequantize()[0, :16].any()


def test_the_other_library_reads_the_same():
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    tensors, values = nvfp4()
    moved = convert.ModelOptNvfp4Converter().process({f"m.{name}": tensor for name, tensor in tensors.items()})
    tensors = {name.removeprefix("m."): tensor for name, tensor in moved.items()}
    weight = load(Fp4Format(True), tensors, (32, 96))
    torch.testing.assert_close(weight.dequantize(), values, rtol=2**-22, atol=0)  # 1 / (1 / x)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_scales_that_cannot_be(value):
    tensors, _ = nvfp4()
    found = modelopt().format_of(MODULE)
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        load(found, tensors | {"weight_scale_2": torch.tensor(value)}, (32, 96))
    if value:
        tensors["weight_scale"][1, 1] = value
        with pytest.raises(CheckpointError, match="weight_scale: 1 of 192"):
            load(found, tensors, (32, 96))


def test_cuts():
    found = modelopt().format_of(MODULE)
    with pytest.raises(ValueError, match=r"groups of 16 inputs .* over 1, 2, 3, 6 ranks"):
        found.check_cut((32, 96), slice(None), slice(0, 24))
    with pytest.raises(ValueError, match="40 inputs"):
        found.check_cut((32, 40), slice(None), slice(None))


def test_both_places_of_modelopts_description():
    newer = modelopt("NVFP4", ignore=["lm_head", "model.layers.1*"], group_size=16)
    older = scheme_of(
        {},
        {
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "nvfp4", "exclude_modules": ["lm_head", "model.layers.1*"]},
            }
        }.get,
    )
    for found in (newer, older):
        assert found.format_of(MODULE) == Fp4Format(
            True, "weight", "weight_scale_2", False, "input_scale", "fp4", "ModelOpt"
        )
        assert found.format_of("model.layers.1.mlp.up_proj") is None
        assert found.format_of("model.layers.10.mlp.up_proj") is None  # a wildcard is one
    assert "weight only" in newer.format_of(MODULE).describe()


def test_modelopts_algorithms():
    assert modelopt("FP8").format_of(MODULE) == ScaledFormat(per="tensor", inputs="tensor", label="ModelOpt")
    assert modelopt("fp8_per_channel_per_token").format_of(MODULE).per == "channel"
    assert modelopt("FP8_PB_WO").format_of(MODULE) == BlockFormat(scale="weight_scale", label="ModelOpt")
    assert modelopt("MXFP8").format_of(MODULE).block == (1, 32)
    assert modelopt("W4A16_NVFP4").format_of(MODULE).activations == "none"
    mixed = modelopt("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "FP8"}})
    assert mixed.format_of(MODULE).inputs == "tensor"
    assert mixed.format_of("model.layers.0.mlp.gate_proj") is None
    for algorithm in ("W4A8_AWQ", "INT8_SQ", "NVFP4_AWQ"):
        with pytest.raises(UnsupportedModelError, match=algorithm):
            modelopt(algorithm)
    with pytest.raises(UnsupportedModelError, match="groups of 32"):
        modelopt("NVFP4", group_size=32)


def gpt_oss(experts=3, height=64, width=96):
    """(tensors, values): blocks as gpt-oss has them."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (experts, height, width), generator=random)
    scales = torch.randint(110, 129, (experts, height, width // 32), generator=random, dtype=torch.uint8)
    values = CODES[codes] * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).unflatten(2, (-1, 16))
    return blocks, scales, values


def load_stack(found, tensors, shape, experts=slice(None), rows=slice(None), columns=slice(None)):
    found.check_cut(shape, rows, columns)
    weight = found.allocate(torch.empty(shape, device="meta")[experts, rows, columns].shape, torch.float32, zeros)
    parts = {}
    for name, part in found.stored(shape, experts, rows, columns).items():
        assert part.shape == tensors[name].shape and tensors[name].dtype in part.dtypes
        parts[name] = tensors[name][part.keep]
    found.place(parts, weight)
    return weight.dequantize()


def test_stacked_experts():
    blocks, scales, values = gpt_oss()
    found = Mxfp4Experts("down_proj")
    tensors = {"down_proj_blocks": blocks, "down_proj_scales": scales}
    shape = tuple(values.shape)
    assert torch.equal(load_stack(found, tensors, shape), values)
    assert torch.equal(load_stack(found, tensors, shape, slice(1, 3)), values[1:3])
    assert torch.equal(load_stack(found, tensors, shape, columns=slice(32, 64)), values[..., 32:64])
    with pytest.raises(ValueError, match="96 inputs can be split over 1, 3 ranks"):
        found.check_cut(shape, slice(None), slice(0, 48))
    scales[1, 2, 0] = 255
    with pytest.raises(CheckpointError, match="down_proj_scales: 1 of"):
        load_stack(found, tensors, shape)


def test_gate_and_up_are_taken_apart():
    blocks, scales, values = gpt_oss()
    found = Mxfp4Experts("gate_up_proj", interleaved=True)
    tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    got = load_stack(found, tensors, tuple(values.shape), rows=slice(16, 48))
    gate, up = values[:, 16:48:2], values[:, 17:48:2]
    assert torch.equal(got, torch.cat((gate, up), dim=1))
    with pytest.raises(ValueError, match="a gate and an up"):
        found.check_cut(tuple(values.shape), slice(1, 33), slice(None))


def test_description_of_gpt_oss():
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}}
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert scheme_of(config).experts_of(stack) == Mxfp4Experts("gate_up_proj", interleaved=True)
    assert scheme_of(config).experts_of("model.layers.0.mlp.experts.down_proj") == Mxfp4Experts("down_proj")
    assert scheme_of(config).format_of("model.layers.0.self_attn.q_proj") is None
    dense = scheme_of(config, dtypes={stack: "BF16"})
    assert dense.experts_of(stack) is None
    assert "stored in 16 bits" in dense.disagreements[0]
    packed = scheme_of(config, dtypes={f"{stack}_blocks": "U8", f"{stack}_scales": "U8"})
    assert packed.experts_of(stack) is not None
