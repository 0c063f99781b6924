"""GPTQ checkpoints, packed here bit by bit from the layout's description."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.grouped import GptqFormat
from quire.quantization.schemes.registry import scheme_of
from tests.quantization.stored import check_cuts, load, pack, ranks, read, zeros

SHAPE = (192, 192)


def matrix(found: GptqFormat, shape=SHAPE, seed=0):
    """(tensors, values): random codes, zero points and scales in fp16."""
    random = torch.Generator().manual_seed(seed)
    height, width = shape
    group = found.group or width
    count = -(-width // group)
    codes = torch.randint(0, 1 << found.bits, shape, generator=random)
    zero = torch.full((height, count), 1 << (found.bits - 1))
    if found.zeros:
        zero = torch.randint(1, 1 << found.bits, (height, count), generator=random)
    scale = (torch.rand(height, count, generator=random) * 0.02 + 0.001).half()
    index = torch.arange(width) // group
    if found.ordered:
        index = index[torch.randperm(width, generator=random)]
    values = (codes - zero[:, index]).float() * scale[:, index].float()
    tensors = {
        "qweight": pack(codes, found.bits).t().contiguous(),
        "qzeros": pack(zero.t() - int(found.version == 1), found.bits),
        "scales": scale.t().contiguous(),
        "g_idx": index.int(),
    }
    return tensors, values


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_values_are_exact(bits, version, zeros, ordered):
    found = GptqFormat(bits, 32, zeros, ordered, version)
    tensors, values = matrix(found)
    weight = load(found, tensors, SHAPE)
    assert torch.equal(weight.dequantize(), values)
    in_bfloat16 = load(found, tensors, SHAPE, dtype=torch.bfloat16)
    scale = tensors["scales"].bfloat16().float().t()[:, tensors["g_idx"].long()]
    steps = values / tensors["scales"].float().t()[:, tensors["g_idx"].long()]
    assert torch.equal(in_bfloat16.dequantize(), (steps.round() * scale).bfloat16())


@pytest.mark.parametrize("bits", [3, 4])
def test_a_group_of_all_inputs(bits):
    found = GptqFormat(bits, None, True)
    tensors, values = matrix(found)
    assert torch.equal(load(found, tensors, SHAPE).dequantize(), values)
    check_cuts(found, tensors, SHAPE)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_parts_of_ranks(bits):
    found = GptqFormat(bits, 32, True)
    check_cuts(found, matrix(found)[0], SHAPE)


def test_values_of_3_bits_straddle_words():
    codes = torch.zeros(32, 32, dtype=torch.int64)
    codes[:, 10] = 5  # bits 30 to 32
    codes[:, 21] = 6  # bits 63 to 65
    packed = pack(codes, 3)
    assert packed.shape == (32, 3)
    assert packed[0].tolist() == [0b01 << 30, 0b1, 0b11]
    tensors, _ = matrix(GptqFormat(3, 32), (32, 32))
    tensors["qweight"] = packed.t().contiguous()
    weight = load(GptqFormat(3, 32), tensors, (32, 32))
    steps = weight.dequantize() / tensors["scales"].float().t()
    assert torch.equal((steps.round() + 4).long(), codes)


def test_symmetric_zero_points_of_version_1_are_stored_less_one():
    tensors, _ = matrix(GptqFormat(4, 32))
    assert set(tensors["qzeros"].flatten().tolist()) == {0x77777777}
    tensors, _ = matrix(GptqFormat(8, 32))
    assert set(tensors["qzeros"].flatten().tolist()) == {0x7F7F7F7F}


def test_a_zero_point_of_0_wraps_in_version_1():
    """Stored as 0 - 1: all ones in its nibble, and, where the packer let it spill, in those above."""
    found = GptqFormat(4, 32, zeros=True)
    tensors, _ = matrix(found, (8, 32))
    tensors["qzeros"] = torch.tensor([[-1 << 8 | 0x43]], dtype=torch.int32)  # z = 4, 5, 0, then spilled
    weight = load(found, tensors, (8, 32))
    assert weight.zero.flatten().tolist() == [4, 5, 0, 0, 0, 0, 0, 0]


def test_order_of_inputs_is_shared_by_fused_parts():
    found = GptqFormat(4, 32, ordered=True)
    first, values = matrix(found, seed=1)
    second, _ = matrix(found, seed=2)
    fused = found.allocate((2 * SHAPE[0], SHAPE[1]), torch.float32, zeros, (0, SHAPE[0]))
    load(found, first, SHAPE, into=fused)
    with pytest.raises(CheckpointError, match="g_idx: differs between matrices"):
        load(found, second, SHAPE, into=fused, at=SHAPE[0])
    second["g_idx"] = first["g_idx"]
    load(found, second, SHAPE, into=fused, at=SHAPE[0])
    assert torch.equal(fused.dequantize()[: SHAPE[0]], values)
    assert torch.equal(fused.dequantize()[SHAPE[0] :], load(found, second, SHAPE).dequantize())


def test_inputs_in_act_order_are_not_cut():
    found = GptqFormat(4, 32, ordered=True)
    with pytest.raises(ValueError, match="act-order"):
        found.check_cut(SHAPE, slice(None), slice(0, 96))
    check_cuts(found, matrix(found)[0], SHAPE, columns=())


def test_cuts_off_the_groups_are_refused_with_what_works():
    found = GptqFormat(4, 64)
    with pytest.raises(ValueError, match=r"inputs 0:96 of 192 .* groups of 64 .* over 1, 3 ranks"):
        found.check_cut(SHAPE, slice(None), slice(0, 96))
    with pytest.raises(ValueError, match=r"outputs 0:12 of 36 .* 8 outputs belong together; 36 outputs cannot"):
        found.check_cut((36, 192), slice(0, 12), slice(None))
    with pytest.raises(ValueError, match="inputs"):
        GptqFormat(3, None).check_cut(SHAPE, slice(None), slice(0, 48))


def test_a_description_that_lies_is_refused():
    tensors, _ = matrix(GptqFormat(4, 32, version=2))
    with pytest.raises(CheckpointError, match=r"qzeros: a zero point is 9.*checkpoint_format"):
        load(GptqFormat(4, 32), tensors, SHAPE)
    tensors, _ = matrix(GptqFormat(4, 32, ordered=True))
    with pytest.raises(CheckpointError, match="g_idx: the inputs are not in the order"):
        load(GptqFormat(4, 32), tensors, SHAPE)
    tensors["g_idx"][:3] = 0
    with pytest.raises(CheckpointError, match="g_idx: does not put 32 inputs into each group"):
        load(GptqFormat(4, 32, ordered=True), tensors, SHAPE)
    with pytest.raises(CheckpointError, match="g_idx: missing"):
        found = GptqFormat(4, 32, ordered=True)
        parts = read(found, tensors, SHAPE)
        del parts["g_idx"]
        found.place(parts, found.allocate(SHAPE, torch.float32, zeros), slice(0, SHAPE[0]))


def test_group_indices_may_be_missing():
    found = GptqFormat(4, 32)
    tensors, values = matrix(found)
    del tensors["g_idx"]
    assert torch.equal(load(found, tensors, SHAPE).dequantize(), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_fixed_values_of_random_weights(bits, version):
    found = GptqFormat(bits, 32, version=version, ordered=True)
    tensors, _ = matrix(found)
    made = {name: part.exact() for name, part in found.stored(SHAPE, slice(None), slice(None)).items() if part.exact}
    assert torch.equal(made["qzeros"], tensors["qzeros"])
    load(found, tensors | made, SHAPE)


def scheme(**config):
    return scheme_of({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, **config}})


def test_description():
    name = "model.layers.3.mlp.up_proj"
    assert scheme().format_of(name) == GptqFormat(4, 128)
    assert scheme(sym=False, desc_act=True).format_of(name) == GptqFormat(4, 128, True, True)
    assert scheme(group_size=-1, desc_act=True).format_of(name) == GptqFormat(4, None)
    assert scheme(checkpoint_format="gptq_v2").format_of(name) == GptqFormat(4, 128, version=2)
    assert scheme(format="gptq_v2", bits=3).format_of(name) == GptqFormat(3, 128, version=2)
    assert scheme().format_of("lm_head") is None
    assert scheme(lm_head=True).format_of("lm_head") == GptqFormat(4, 128)
    older = scheme_of({}, {"quantize_config.json": {"bits": 8, "group_size": 64, "sym": False}}.get)
    assert older.format_of(name) == GptqFormat(8, 64, True)


def test_exceptions_by_regular_expression():
    found = scheme(
        dynamic={
            r"-:.*\.layers\.0\..*": {},
            r"+:.*\.mlp\.down_proj": {"bits": 8, "group_size": 32, "desc_act": True},
            r".*\.mlp\..*": {"bits": 3, "sym": False},
            r"mlp": {"bits": 2},  # matched from the start: never
        }
    )
    assert found.format_of("model.layers.0.mlp.down_proj") is None  # the first that matches
    assert found.format_of("model.layers.1.mlp.down_proj") == GptqFormat(8, 32, ordered=True)
    assert found.format_of("model.layers.1.mlp.up_proj") == GptqFormat(3, 128, True)
    assert found.format_of("model.layers.1.self_attn.q_proj") == GptqFormat(4, 128)


@pytest.mark.parametrize("listed", [["self_attn.q_proj"], [["self_attn.q_proj"], ["mlp.gate"]]])
def test_listed_modules(listed):
    found = scheme(modules_in_block_to_quantize=listed)
    assert found.format_of("model.layers.1.self_attn.q_proj") == GptqFormat(4, 128)
    assert found.format_of("model.layers.1.self_attn.k_proj") is None


@pytest.mark.parametrize(
    "config, words",
    [
        ({"bits": 5}, "5 bits"),
        ({"checkpoint_format": "gptq_p"}, "'gptq_p'"),
        ({"format": "marlin"}, "'marlin'"),
        ({"pack_dtype": "int16"}, "int16"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"dynamic": {"+:.*": {"bits": 7}}}, "7 bits"),
    ],
)
def test_other_layouts_are_refused(config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        scheme(**config).format_of("model.layers.0.mlp.up_proj")


def test_a_bias_of_zeros_for_every_matrix_is_ignored():
    dtypes = {"model.layers.0.mlp.up_proj.qweight": "I32", "model.norm.weight": "F16"}
    found = scheme_of({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, dtypes=dtypes)
    assert found.ignores("model.layers.0.mlp.up_proj.bias")
    assert not found.ignores("model.norm.bias")


def test_auto_round_in_this_layout():
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    packing = {"packing_format": "auto_round:auto_gptq", "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}
    found = scheme_of({"quantization_config": config | packing})
    assert found.format_of("model.layers.1.mlp.up_proj") == GptqFormat(4, 128)
    assert found.format_of("model.layers.0.mlp.up_proj") is None
    for refused in ({"packing_format": "auto_round"}, packing | {"extra_config": {"x": {"bits": 8}}}):
        with pytest.raises(UnsupportedModelError, match="auto-round"):
            scheme_of({"quantization_config": config | refused})


def test_ranks_cover_everything():
    assert [(part.start, part.stop) for part in ranks(192, 3)] == [(0, 64), (64, 128), (128, 192)]
