"""Written checkpoints, read back by the compressed-tensors library and by quire's own reader."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import ValidationError
from quire.quantization.gptq import gptq_groups
from quire.quantization.schemes.registry import scheme_of
from quire.quantization.writer import ALIASES, SCHEMES, CheckpointWriter, find_scheme, pack_integers
from tests.quantization.stored import load

MODULE = "model.layers.0.mlp.up_proj"
NAMES = list(SCHEMES)


def matrix(rows: int = 24, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_the_same_values(name, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = find_scheme(name)
    tensors = scheme.round(matrix(), dtype)
    described = QuantizationConfig.model_validate(scheme.describe(["lm_head"]))
    (group,) = described.config_groups.values()
    assert described.ignore == ["lm_head"] and group.targets == ["Linear"]
    reader = BaseCompressor.get_value_from_registry(group.format)
    # The library computes in the scales' dtype: give it float32.
    exact = {key: value.float() if value.dtype is torch.bfloat16 else value for key, value in tensors.items()}
    assert set(reader.compression_param_names(group)) == set(tensors)
    read = reader.decompress(exact, group)["weight"]
    loose = 2**-7 if read.dtype is torch.bfloat16 else 0.0  # it computes 4-bit floats in bfloat16
    torch.testing.assert_close(read.float(), scheme.restore(tensors), rtol=loose, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_quire_reads_the_same_values(name):
    scheme = find_scheme(name)
    tensors = scheme.round(matrix(), torch.bfloat16)
    found = scheme_of({"quantization_config": scheme.describe(["lm_head"])})
    assert found is not None and found.format_of("lm_head") is None
    weight = load(found.format_of(MODULE), tensors, (24, 256))
    torch.testing.assert_close(weight.dequantize(), scheme.restore(tensors), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_presets_of_the_library_have_the_same_arguments(name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    described = find_scheme(name).describe([])["config_groups"]["group_0"]
    preset = preset_name_to_scheme(name, ["Linear"])
    written = QuantizationScheme.model_validate(described)
    for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "scale_dtype"):
        assert getattr(written.weights, key) == getattr(preset.weights, key), key
    if preset.input_activations is None:
        assert written.input_activations is None
    else:
        for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"):
            assert getattr(written.input_activations, key) == getattr(preset.input_activations, key), key


@pytest.mark.parametrize("name", NAMES)
def test_gptq_writes_the_same_layout(name):
    scheme, weight = find_scheme(name), matrix()
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(2)) @ torch.randn(32, 256)
    plain, chosen = scheme.round(weight, torch.bfloat16), scheme.round_by_gptq(weight, x.T @ x / 512, torch.bfloat16)
    assert {key: (value.shape, value.dtype) for key, value in plain.items()} == {
        key: (value.shape, value.dtype) for key, value in chosen.items()
    }
    errors = [(x @ (scheme.restore(tensors) - weight).T).square().mean() for tensors in (plain, chosen)]
    assert errors[1] < 0.5 * errors[0]


def test_activation_order_changes_no_layout():
    scheme = find_scheme("W4A16", 32)
    weight = matrix(8, 64)
    tensors = scheme.pack(gptq_groups(weight, torch.diag(torch.rand(64) + 0.1), 4, 32), weight.shape)
    assert tensors["weight_packed"].shape == (8, 8) and tensors["weight_scale"].shape == (8, 2)
    group = scheme.describe([], order=True)["config_groups"]["group_0"]
    assert group["weights"]["actorder"] == "weight" and group["weights"]["group_size"] == 32
    found = scheme_of({"quantization_config": scheme.describe([], order=True)})
    assert found is not None
    read = load(found.format_of(MODULE), tensors, (8, 64)).dequantize()
    torch.testing.assert_close(read, scheme.restore(tensors), rtol=1e-6, atol=0)
    assert (read - weight).abs().max() < 0.02


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_a_little_endian_stream(bits):
    codes = torch.randint(0, 2**bits, (3, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack_integers(codes, bits)
    for row, words in zip(codes.tolist(), packed.tolist(), strict=True):
        stream = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
        assert [(stream >> (bits * place)) & (2**bits - 1) for place in range(13)] == row


def test_names_of_schemes():
    assert {find_scheme(alias).name for alias in ALIASES} == set(ALIASES.values())
    assert find_scheme("w4a16", 64).group == 64
    with pytest.raises(ValidationError, match="'W3A16' is not one of FP8_DYNAMIC"):
        find_scheme("W3A16")
    with pytest.raises(ValidationError, match="MXFP4A16 has groups of 32"):
        find_scheme("MXFP4", 64)
    with pytest.raises(ValidationError, match="FP8_DYNAMIC has no groups"):
        find_scheme("FP8", 64)
    with pytest.raises(ValidationError, match="group sizes that do: 16, 32, 64$"):
        find_scheme("W4A16").check("q_proj", (8, 576))


def test_tensors_are_written_in_shards_with_an_index(tmp_path):
    given = {f"layer.{index}": torch.full((100,), float(index)) for index in range(7)}
    writer = CheckpointWriter(tmp_path, shard_bytes=1000)
    for name, tensor in given.items():
        writer.add(name, tensor)
        tensor.add_(100)  # the layer's memory is used again
    with pytest.raises(ValueError, match="twice"):
        writer.add("layer.0", given["layer.0"])
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name][0] == float(name.partition(".")[2])
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_small_checkpoint_is_one_file(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.add("weight", torch.ones(3))
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
