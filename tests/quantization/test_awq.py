"""AWQ checkpoints, packed here from the layout's description; compressed-tensors' converter as a second reader."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.grouped import AwqFormat
from quire.quantization.schemes.registry import scheme_of
from tests.quantization.stored import check_cuts, load, zeros

SHAPE = (96, 192)
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where columns 0 to 7 are in a word."""


def pack(values):
    """Unsigned 4-bit values [rows, n] as int32 [rows, n / 8]."""
    words = sum(values.unflatten(1, (-1, 8))[..., column] << shift for column, shift in enumerate(SHIFTS))
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int().contiguous()


def matrix(group, shape=SHAPE):
    random = torch.Generator().manual_seed(0)
    height, width = shape
    count = -(-width // (group or width))
    codes = torch.randint(0, 16, shape, generator=random)
    zero = torch.randint(0, 16, (height, count), generator=random)
    scale = (torch.rand(height, count, generator=random) * 0.02 + 0.001).half()
    index = torch.arange(width) // (group or width)
    values = (codes - zero[:, index]).float() * scale[:, index].float()
    tensors = {"qweight": pack(codes.t()), "qzeros": pack(zero.t()), "scales": scale.t().contiguous()}
    return tensors, values


@pytest.mark.parametrize("group", [32, 64, None])
def test_values_are_exact(group):
    tensors, values = matrix(group)
    found = AwqFormat(4, group)
    assert torch.equal(load(found, tensors, SHAPE).dequantize(), values)
    check_cuts(found, tensors, SHAPE, columns=(3,) if group == 64 else (2, 3))


def test_the_order_of_a_word():
    """Nibble i holds column [0, 2, 4, 6, 1, 3, 5, 7][i]."""
    found = AwqFormat(4, 2)
    word = sum(column << (4 * nibble) for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    tensors = {
        "qweight": torch.tensor([[word], [word]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    assert load(found, tensors, (8, 2)).dequantize()[:, 0].tolist() == list(range(8))


def test_the_other_library_reads_the_same():
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    from compressed_tensors.compressors import PackedQuantizationCompressor

    tensors, _ = matrix(32)
    converter = convert.AutoAWQConverter.from_autoawq_config({"bits": 4, "group_size": 32, "zero_point": True})
    moved = converter.process({f"m.{name}": tensor for name, tensor in tensors.items()})
    group = converter._build_quant_config().config_groups["config_group_0"]
    packed = {name.removeprefix("m."): tensor for name, tensor in moved.items()}
    packed["weight_scale"] = packed["weight_scale"].float()
    expected = PackedQuantizationCompressor.decompress(packed, group)["weight"]
    assert torch.equal(load(AwqFormat(4, 32), tensors, SHAPE).dequantize(), expected)


def test_without_zero_points():
    tensors, _ = matrix(32)
    found = AwqFormat(4, 32, zeros=False)
    with pytest.raises(CheckpointError, match="qzeros: not all are 8"):
        load(found, tensors, SHAPE)
    tensors["qzeros"].fill_(0x88888888 - (1 << 32))
    expected = load(AwqFormat(4, 32), tensors, SHAPE).dequantize()
    assert torch.equal(load(found, tensors, SHAPE).dequantize(), expected)
    del tensors["qzeros"]
    assert torch.equal(load(found, tensors, SHAPE).dequantize(), expected)


def test_cuts_inside_a_word_are_refused():
    found = AwqFormat(4, 64)
    with pytest.raises(ValueError, match=r"outputs 4:8 .* words of 8 outputs"):
        found.check_cut(SHAPE, slice(4, 8), slice(None))
    with pytest.raises(ValueError, match=r"192 inputs can be split over 1, 3 ranks"):
        found.check_cut(SHAPE, slice(None), slice(0, 96))


def test_memory_is_the_files():
    tensors, _ = matrix(32, (256, 256))
    weight = load(AwqFormat(4, 32), tensors, (256, 256), dtype=torch.bfloat16)
    assert weight.nbytes <= 1.03 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_cannot_be(value):
    tensors, _ = matrix(32)
    tensors["scales"][1, 2] = value
    with pytest.raises(CheckpointError, match="scales: 1 of 576 scales"):
        load(AwqFormat(4, 32), tensors, SHAPE)


def test_scales_that_the_activations_dtype_cannot_hold():
    tensors, _ = matrix(32)
    tensors["scales"] = tensors["scales"].float() * 1e-9
    load(AwqFormat(4, 32), tensors, SHAPE, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="scales as float16"):
        load(AwqFormat(4, 32), tensors, SHAPE, dtype=torch.float16)


def test_fused_parts_and_stacks():
    tensors, values = matrix(32)
    found = AwqFormat(4, 32)
    stack = found.allocate((2, 2 * SHAPE[0], SHAPE[1]), torch.float32, zeros, (0, SHAPE[0]))
    load(found, tensors, SHAPE, into=stack[1], at=SHAPE[0])
    assert torch.equal(stack.dequantize()[1, SHAPE[0] :], values)
    assert not stack.dequantize()[0].any()


def scheme(**config):
    return scheme_of({"quantization_config": {"quant_method": "awq", **config}})


def test_description():
    found = scheme(
        bits=4, group_size=64, zero_point=True, version="gemm", modules_to_not_convert=["mlp.gate", "visual"]
    )
    assert found.format_of("model.layers.0.mlp.up_proj") == AwqFormat(4, 64)
    assert found.format_of("model.layers.0.mlp.gate_proj") is None  # contains the name
    assert found.format_of("visual.blocks.0.mlp.up_proj") is None
    assert found.format_of("lm_head") is None
    older = {"zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMM"}
    assert scheme_of({}, {"quant_config.json": older}.get).format_of("model.layers.0.mlp.up_proj") == AwqFormat(4, None)


@pytest.mark.parametrize("config", [{"version": "gemv"}, {"version": "gemv_fast"}, {"format": "llm-awq"}, {"bits": 8}])
def test_other_layouts_are_refused(config):
    with pytest.raises(UnsupportedModelError, match=f"awq: .*{next(iter(config.values()))}"):
        scheme(**config)
