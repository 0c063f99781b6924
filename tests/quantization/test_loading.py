"""Formats through the loader: files that lack a tensor or have a wrong one, and random weights."""

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.layers.matrices import MatrixPart, assembly_targets
from quire.loading.dummy import DummyCheckpoint
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.weights import AnyTarget, AssemblyPart
from quire.quantization.formats.fp4 import Fp4Format
from quire.quantization.formats.grouped import AwqFormat, GptqFormat, PackedFormat
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from tests.quantization.stored import zeros

SHAPE = (256, 512)
MODULE = "model.layers.0.mlp.up_proj"

FORMATS = [
    ScaledFormat(),
    ScaledFormat(torch.int8, "tensor", "tensor"),
    BlockFormat(),
    BlockFormat((1, 32), "weight_scale", powers=True),
    Fp4Format(True),
    Fp4Format(True, "weight", "weight_scale_2", divides=False),
    Fp4Format(False),
    AwqFormat(4, 128),
    AwqFormat(4, 128, zeros=False),
    GptqFormat(4, 128),
    GptqFormat(3, 128, zeros=True),
    GptqFormat(8, None, version=2),
    GptqFormat(2, 64, ordered=True),
    PackedFormat(4, 32),
    PackedFormat(4, 32, zeros=True),
    PackedFormat(8, None),
    PackedFormat(6, 128, zeros=True, ordered=True),
]


def targets_of(found, dtype=torch.bfloat16, rows=slice(0, SHAPE[0]), columns=slice(0, SHAPE[1])):
    part = MatrixPart(MODULE, SHAPE, rows, columns)
    found.check_cut(SHAPE, rows, columns)
    weight = found.allocate((part.height, part.width), dtype, zeros)
    named = assembly_targets(weight, part, found, slice(0, part.height))
    return weight, {name: [target] for name, target in named.items()}


def no(name):
    return False


@pytest.mark.parametrize("found", FORMATS, ids=lambda found: found.describe())
def test_random_weights_are_of_realistic_size(found):
    weight, targets = targets_of(found)
    load_weights(targets, no, DummyCheckpoint(targets), progress=False)
    values = weight.dequantize().float()
    assert values.isfinite().all()
    assert 0.012 < values.std() < 0.035
    assert values.mean().abs() < 0.01  # half a step, where the codes are not even about zero
    assert values.unique().numel() >= min(15, 2 ** getattr(found, "bits", 8))


@pytest.mark.parametrize("found", FORMATS[:12], ids=lambda found: found.describe())
def test_ranks_make_parts_of_the_same_random_weights(found):
    whole, targets = targets_of(found)
    load_weights(targets, no, DummyCheckpoint(targets), progress=False)
    part, targets = targets_of(found, rows=slice(128, 256), columns=slice(256, 512))
    load_weights(targets, no, DummyCheckpoint(targets), progress=False)
    assert torch.equal(part.dequantize(), whole.dequantize()[128:, 256:])


def dtype_of(part: AnyTarget) -> torch.dtype:
    return part.dtypes[0] if isinstance(part, AssemblyPart) else part.into.dtype


def is_optional(part: AnyTarget) -> bool:
    return isinstance(part, AssemblyPart) and part.optional


@pytest.mark.parametrize("found", FORMATS, ids=lambda found: found.describe())
def test_a_loaded_weight_takes_the_memory_of_its_file(found):
    weight, targets = targets_of(found)
    stored = sum(
        torch.empty(part.shape, dtype=dtype_of(part), device="meta").nbytes
        for (part,) in targets.values()
        if not is_optional(part)
    )
    widened = getattr(found, "held", 0) != getattr(found, "bits", 0)
    float_scales_of_small_groups = isinstance(found, BlockFormat) and found.block == (1, 32)
    if not widened and not float_scales_of_small_groups:
        assert weight.nbytes <= 1.03 * stored


def saved(tmp_path, found, seed=0):
    """Random tensors of the format."""
    _, targets = targets_of(found)
    return {weight.name: weight.read() for weight in DummyCheckpoint(targets, seed)}


def load(tmp_path, found, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weight, targets = targets_of(found)
    load_weights(targets, no, open_checkpoint(local_files("model", tmp_path)), progress=False)
    return weight


@pytest.mark.parametrize("found", FORMATS, ids=lambda found: found.describe())
def test_files(tmp_path, found):
    expected, targets = targets_of(found)
    load_weights(targets, no, DummyCheckpoint(targets), progress=False)
    assert torch.equal(load(tmp_path, found, saved(tmp_path, found)).dequantize(), expected.dequantize())


@pytest.mark.parametrize("found", FORMATS, ids=lambda found: found.describe())
def test_each_tensor_is_needed_in_its_shape_and_dtype(tmp_path, found):
    tensors = saved(tmp_path, found)
    _, targets = targets_of(found)
    for name, (part,) in targets.items():
        if is_optional(part) and name not in tensors:
            tensors[name] = torch.zeros(part.shape, dtype=dtype_of(part))
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        if not is_optional(part):
            with pytest.raises(CheckpointError, match=f"1 tensor missing from the checkpoint:\n  - {name} "):
                load(tmp_path, found, others)
        larger = torch.zeros([size + 1 for size in part.shape] or [2], dtype=tensors[name].dtype)
        with pytest.raises(CheckpointError, match=f"of a different shape than in the model:\n  - {name}"):
            load(tmp_path, found, others | {name: larger})
        with pytest.raises(CheckpointError, match=rf"than config.json says:\n  - {name}: float64 in"):
            load(tmp_path, found, others | {name: torch.zeros(part.shape, dtype=torch.float64)})


def test_errors_name_the_module(tmp_path):
    tensors = saved(tmp_path, AwqFormat())
    tensors[f"{MODULE}.scales"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=rf"{MODULE}: scales: 1 of 1024 scales are not finite .*nan"):
        load(tmp_path, AwqFormat(), tensors)


def test_a_tensor_of_another_format_is_refused(tmp_path):
    tensors = saved(tmp_path, AwqFormat())
    tensors[f"{MODULE}.pre_quant_scale"] = torch.ones(SHAPE[1])
    with pytest.raises(CheckpointError, match=f"unknown to the model:\n  - {MODULE}.pre_quant_scale"):
        load(tmp_path, AwqFormat(), tensors)


def test_codes_that_are_not_numbers_are_refused(tmp_path):
    found = BlockFormat()
    tensors = saved(tmp_path, found)
    tensors[f"{MODULE}.weight"].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(CheckpointError, match=f"the tensor '{MODULE}.weight' has NaN values"):
        load(tmp_path, found, tensors)
