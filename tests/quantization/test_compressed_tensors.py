"""Checkpoints compressed by the compressed-tensors library, and its own answer of what they mean."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.fp4 import Fp4Format
from quire.quantization.formats.grouped import PackedFormat
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.compressed_tensors import PRESETS
from quire.quantization.schemes.registry import scheme_of
from tests.quantization import library
from tests.quantization.stored import check_cuts, load, pack, zeros

MODULE = "model.layers.0.mlp.up_proj"


def config_of(*groups, **more):
    named = {f"group_{index}": {"targets": ["Linear"], **group} for index, group in enumerate(groups)}
    shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quantization_config": {"config_groups": named, **shared, **more}}


def format_of(group, module=MODULE, **more):
    return scheme_of(config_of(group, **more)).format_of(module)


def compress(weights, shape, format, inputs=None, scale_dtype=torch.float32, seed=0):
    """(format, tensors, values): a random matrix, quantized and compressed by the library."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    tensors, meant = library.compress(values, weights, format, inputs, scale_dtype)
    return format_of({"weights": weights, "input_activations": inputs}, format=format), tensors, meant


INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_INPUTS = {**INT8_INPUTS, "type": "float"}


@library.needed
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_8_bit_weights(kind, strategy):
    inputs = {**INT8_INPUTS, "type": kind}
    weights = {"num_bits": 8, "type": kind, "strategy": strategy}
    found, tensors, values = compress(weights, (96, 192), f"{kind}-quantized", inputs, torch.bfloat16)
    assert isinstance(found, ScaledFormat) and found.inputs == "token"
    weight = load(found, tensors, (96, 192))
    assert torch.equal(weight.dequantize(), values)
    check_cuts(found, tensors, (96, 192))
    assert weight.nbytes <= 1.03 * sum(tensor.nbytes for tensor in tensors.values())


@library.needed
def test_fp8_blocks_with_ragged_edges():
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    found, tensors, values = compress(weights, (320, 200), "float-quantized", inputs)
    assert isinstance(found, BlockFormat)
    assert tensors["weight_scale"].shape == (3, 2)
    assert torch.equal(load(found, tensors, (320, 200)).dequantize(), values)


@library.needed
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, None])
def test_packed_integers(bits, symmetric, group):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    shape = (96, 192)
    found, tensors, values = compress(weights, shape, "pack-quantized", scale_dtype=torch.bfloat16)
    assert found == PackedFormat(bits, group, not symmetric)
    assert ("weight_zero_point" in tensors) is not symmetric
    weight = load(found, tensors, shape)
    assert torch.equal(weight.dequantize(), values)
    assert torch.equal(load(found, tensors, shape, dtype=torch.bfloat16).dequantize(), values.bfloat16())
    # Zero points of odd widths share words by 32.
    check_cuts(found, tensors, shape, rows=(2, 3) if symmetric or 32 % bits == 0 or bits == 6 else (3,))


@library.needed
@pytest.mark.parametrize("shape", [(40, 72), (33, 50)])
def test_packed_integers_that_fill_no_word(shape):
    for bits in (3, 4, 6):
        weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "channel"}
        found, tensors, values = compress(weights, shape, "pack-quantized")
        assert torch.equal(load(found, tensors, shape).dequantize(), values)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_odd_widths_packed_into_whole_words(bits):
    """As the library did before 2026: told apart by the width of the packed tensor."""
    shape, random = (60, 240), torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=random)
    zero = torch.randint(0, 1 << bits, (60, 2), generator=random)
    scale = torch.rand(60, 2, generator=random) + 0.01
    values = (codes - zero.repeat_interleave(120, 1)).float() * scale.repeat_interleave(120, 1)
    found = PackedFormat(bits, 120, zeros=True)
    for dense in (True, False):
        tensors = {
            "weight_packed": pack(codes, bits, dense),
            "weight_zero_point": pack(zero.t(), bits, dense).t().contiguous(),
            "weight_scale": scale,
            "weight_shape": torch.tensor(shape),
        }
        assert tensors["weight_packed"].shape[1] == (-(-240 * bits // 32) if dense else -(-240 // (32 // bits)))
        assert torch.equal(load(found, tensors, shape).dequantize(), values)


def test_groups_by_index():
    """actorder: group, which the library no longer writes."""
    shape, random = (16, 64), torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, shape, generator=random)
    scale = torch.rand(16, 2, generator=random) + 0.01
    index = (torch.arange(64) // 32)[torch.randperm(64, generator=random)].int()
    tensors = {"weight_packed": pack(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
    found = format_of({"weights": group}, format="pack-quantized")
    assert found == PackedFormat(4, 32, ordered=True)
    weight = load(found, tensors | {"weight_g_idx": index}, shape)
    assert torch.equal(weight.dequantize(), (codes - 8).float() * scale[:, index.long()])
    plain = format_of({"weights": group | {"actorder": "weight"}}, format="pack-quantized")
    assert plain == PackedFormat(4, 32)
    load(plain, tensors | {"weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}, shape)


@library.needed
def test_nvfp4_divides_by_its_global_scale():
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    weights |= {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    found, tensors, values = compress(weights, (32, 192), "nvfp4-pack-quantized")
    assert found.nvidia and found.divides
    assert tensors["weight_global_scale"].item() > 1
    weight = load(found, tensors, (32, 192))
    # The library rounds scale / global scale to float32 first: one unit in the last place. It returns bfloat16.
    assert torch.equal(weight.dequantize().bfloat16().float(), values)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    codes = unpack_fp4_from_uint8(tensors["weight_packed"], 32, 192, torch.float64)
    exact = codes * tensors["weight_scale"].double().repeat_interleave(16, 1) / tensors["weight_global_scale"].double()
    torch.testing.assert_close(weight.dequantize().double(), exact, rtol=2**-22, atol=0)
    check_cuts(found, tensors, (32, 192))


@library.needed
def test_parts_keep_their_global_scales():
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    weights |= {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    parts = [compress(weights, (32, 64), "nvfp4-pack-quantized", seed=seed) for seed in (1, 2)]
    found = parts[0][0]
    assert found == parts[1][0]
    assert parts[0][1]["weight_global_scale"] != parts[1][1]["weight_global_scale"]
    fused = found.allocate((64, 64), torch.bfloat16, zeros, (0, 32))
    for index, (_, tensors, _) in enumerate(parts):
        load(found, tensors, (32, 64), into=fused, at=32 * index)
    assert torch.equal(fused.dequantize().float(), torch.cat([values for _, _, values in parts]))


@library.needed
def test_mxfp4():
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    found, tensors, values = compress(weights, (32, 192), "mxfp4-pack-quantized")
    assert isinstance(found, Fp4Format) and not found.nvidia
    assert torch.equal(load(found, tensors, (32, 192)).dequantize(), values)
    check_cuts(found, tensors, (32, 192))
    with pytest.raises(ValueError, match="192 inputs can be split over 1, 2, 3, 6 ranks"):
        found.check_cut((32, 192), slice(None), slice(0, 48))


@library.needed
def test_mxfp8():
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
    found, tensors, values = compress(weights, (32, 192), "mxfp8-quantized", inputs)
    assert torch.equal(load(found, tensors, (32, 192)).dequantize(), values)
    check_cuts(found, tensors, (32, 192))


@library.needed
def test_presets_are_the_librarys():
    from compressed_tensors.quantization import preset_name_to_scheme

    for name, (weights, inputs) in PRESETS.items():
        theirs = preset_name_to_scheme(name, ["Linear"])
        for ours, args in ((weights, theirs.weights), (inputs, theirs.input_activations)):
            assert (ours is None) == (args is None), name
            if ours is not None:
                block = None if args.block_structure is None else tuple(args.block_structure)
                assert (ours.bits, ours.kind, ours.strategy, ours.symmetric, ours.dynamic, ours.group, ours.block) == (
                    args.num_bits, args.type, args.strategy, args.symmetric, bool(args.dynamic), args.group_size, block
                ), name  # fmt: skip


@library.needed
def test_targets_match_as_in_the_library():
    from compressed_tensors.utils.match import match_targets

    groups = {
        "re:.*mlp.*": 2,
        "Linear": 3,
        "model.layers.0.mlp.up_proj": 4,
        "re:.*attn.q": 5,
        "re:model.layers.1.*": 6,
        "up_proj": 7,
    }
    named = [{"targets": [target], "weights": {"num_bits": bits, "group_size": 32}} for target, bits in groups.items()]
    found = scheme_of(config_of(*named, format="pack-quantized"))
    for layer in (0, 1, 2):
        for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"):
            module = f"model.layers.{layer}.{name}"
            wanted = match_targets(module, torch.nn.Linear(1, 1), groups)[0]
            assert found.format_of(module).bits == groups[wanted], module


def test_ignored_modules():
    """By exact name or by a regular expression from the start; never by a fused name."""
    ignore = ["lm_head", "model.layers.0.self_attn.q_proj", "re:.*layers.1.mlp.*", "qkv_proj", "mlp"]
    found = scheme_of(config_of({"weights": {"num_bits": 4, "group_size": 32}}, format="pack-quantized", ignore=ignore))
    assert found.format_of("model.layers.0.self_attn.q_proj") is None
    assert found.format_of("model.layers.0.self_attn.k_proj") is not None
    assert found.format_of("model.layers.1.mlp.experts.7.gate_proj") is None
    assert found.format_of("model.layers.2.mlp.up_proj") is not None
    assert found.format_of("lm_head") is None


def test_mixed_precision_has_a_format_for_each_group():
    packed = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "group_size": 32}, "format": "pack-quantized"}
    floats = {
        "targets": ["re:.*self_attn.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": FP8_INPUTS,
        "format": "float-quantized",
    }
    found = scheme_of(config_of(packed, floats, format="mixed-precision"))
    assert found.format_of(MODULE) == PackedFormat(4, 32)
    assert found.format_of("model.layers.0.self_attn.k_proj") == ScaledFormat(label="compressed-tensors")
    assert found.format_of("model.layers.0.other") is None


def test_presets_in_place_of_groups():
    shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "float-quantized"}
    found = scheme_of({"quantization_config": {**shared, "config_groups": {"FP8_BLOCK": ["Linear"]}}})
    assert found.format_of(MODULE) == BlockFormat((128, 128), "weight_scale", label="compressed-tensors")
    with pytest.raises(UnsupportedModelError, match="W9A1"):
        scheme_of({"quantization_config": {**shared, "config_groups": {"W9A1": ["Linear"]}}})


def test_activations():
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    assert format_of({"weights": weights}, format="float-quantized").inputs == "none"
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    found = format_of({"weights": weights, "input_activations": static}, format="float-quantized")
    assert found.inputs == "tensor"
    tensors = {
        "weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor([0.5]),
        "input_scale": torch.tensor([0.25]),
    }
    assert load(found, tensors, (4, 8)).input_scale.tolist() == [0.25]
    old = {"weights": {**weights, "strategy": "block", "block_structure": "128x128"}, "input_activations": FP8_INPUTS}
    assert format_of(old, format="float-quantized").block == (128, 128)


@pytest.mark.parametrize(
    "group, format, words",
    [
        ({"weights": {"num_bits": 8}, "input_activations": {**INT8_INPUTS, "symmetric": False}}, "int-quantized",
         "asymmetric activations"),
        ({"weights": {"num_bits": 8, "symmetric": False}, "input_activations": INT8_INPUTS}, "int-quantized",
         "asymmetric"),
        ({"weights": {"num_bits": 4, "group_size": 128}, "input_activations": INT8_INPUTS}, "pack-quantized",
         "int4 weights with int8 activations"),
        ({"weights": {"num_bits": 4, "group_size": 128}, "input_activations": INT8_INPUTS}, "int-quantized",
         "group of 128"),
        ({"weights": {"num_bits": 4, "group_size": 128}, "input_activations": FP8_INPUTS}, None, "float8"),
        ({"weights": {"num_bits": 6, "type": "float", "group_size": 32}}, "mxfp6-pack-quantized", "mxfp6"),
        ({"weights": {"num_bits": 8}, "output_activations": INT8_INPUTS}, "int-quantized", "output_activations"),
        ({"weights": {"num_bits": 4}}, "marlin-24", "marlin-24"),
        ({"weights": {"num_bits": 4}, "format": "sparse-24-bitmask"}, "mixed-precision", "sparse-24-bitmask"),
    ],
)  # fmt: skip
def test_refused_by_name(group, format, words):
    with pytest.raises(UnsupportedModelError, match=words):
        format_of(group, format=format)


def test_transforms_are_refused():
    with pytest.raises(UnsupportedModelError, match="transform_config"):
        format_of({"weights": {"num_bits": 4}}, format="pack-quantized", transform_config={"config_groups": {"u": {}}})


def test_weights_must_be_compressed():
    group = {"weights": {"num_bits": 8, "type": "float"}}
    config = config_of(group, format="float-quantized", quantization_status="frozen")
    with pytest.raises(CheckpointError, match="quantization_status is 'frozen'"):
        scheme_of(config)
    with pytest.raises(CheckpointError, match="quantization_status is 'frozen'"):
        scheme_of(config, dtypes={f"{MODULE}.weight": "BF16"})
    # Older versions of the library said so of compressed weights too.
    found = scheme_of(config, dtypes={f"{MODULE}.weight": "F8_E4M3", f"{MODULE}.weight_scale": "F32"})
    assert found.format_of(MODULE) is not None
    assert "frozen" in found.disagreements[0]


def test_a_shape_that_does_not_fit():
    tensors = {
        "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
        "weight_scale": torch.ones(8, 1),
        "weight_shape": torch.tensor([8, 30]),
    }
    with pytest.raises(CheckpointError, match=r"weight_shape: \[8, 30\]"):
        load(PackedFormat(4, 32), tensors, (8, 32))
