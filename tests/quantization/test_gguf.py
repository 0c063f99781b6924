"""GGUF matrices that stay packed, from files the gguf package writes: values, cuts for ranks, refusals."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.errors import CheckpointError
from quire.loading.gguf import GGUFBlocks, GGUFCheckpoint, GGUFWeight
from quire.quantization.formats.gguf import BLOCKS, GGUFFormat
from quire.quantization.schemes.gguf import GGUFScheme
from tests.kernels.gguf_blocks import random_blocks

HEADS, ROWS, WIDTH = 4, 64, 1024
NAME = "model.layers.0.mlp.down_proj"


def blocks_of(encoding: str, rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """As the package quantizes them, where it can; otherwise random blocks."""
    array = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    try:
        return gguf.quantize(array, Kind[encoding])
    except NotImplementedError:
        return random_blocks(encoding, rows, width)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    for name, (raw, encoding) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=Kind[encoding])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights_of(path: Path) -> dict[str, GGUFWeight]:
    return {weight.name.removesuffix(".weight"): weight for weight in GGUFCheckpoint(path)}


def load(weight: GGUFWeight, form: GGUFFormat, rows: slice, columns: slice) -> torch.Tensor:
    """What a rank that keeps these rows and columns holds, dequantized in float32."""
    shape = (weight.shape[0], weight.shape[1])
    form.check_cut(shape, rows, columns)
    ((suffix, part),) = form.stored(shape, rows, columns).items()
    blocks = weight.blocks
    assert suffix == "weight" and blocks is not None
    assert part.shape == blocks.shape and part.dtypes == (torch.uint8,)
    first, last, _ = columns.indices(shape[1])
    kept = len(range(shape[0])[rows])
    into = form.allocate((kept, last - first), torch.float32, lambda size, dtype: torch.zeros(size, dtype=dtype))
    # In two parts, as a fused layer is filled.
    read = blocks.read(part.keep)
    form.place({"weight": read[:5]}, into, slice(0, 5))
    form.place({"weight": read[5:]}, into, slice(5, kept))
    return into.dequantize()


@pytest.mark.parametrize("encoding", BLOCKS)
def test_values_of_every_cut_equal_the_packages_bit_by_bit(tmp_path: Path, encoding: str) -> None:
    raw = blocks_of(encoding)
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (raw, encoding)})
    expected = torch.from_numpy(gguf.dequantize(raw, Kind[encoding]))
    weight = weights_of(path)[NAME]
    form = GGUFScheme([weight]).format_of(NAME)
    assert form == GGUFFormat(encoding)
    whole = slice(None)
    for rows, columns in [(whole, whole), (slice(16, 48), whole), (whole, slice(256, 768)), (slice(7, 31), slice(512))]:
        assert torch.equal(load(weight, form, rows, columns), expected[rows, columns])


def test_rows_have_the_order_of_the_models_own_code(tmp_path: Path) -> None:
    raw = blocks_of("Q6_K")
    path = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (raw, "Q6_K")})
    weight = weights_of(path)["model.layers.0.self_attn.q_proj"]
    expected = torch.from_numpy(gguf.dequantize(raw, Kind.Q6_K))
    halves = expected.view(HEADS, ROWS // HEADS // 2, 2, WIDTH).transpose(1, 2).reshape(ROWS, WIDTH)
    for rows in (slice(None), slice(16, 48)):
        assert torch.equal(load(weight, GGUFFormat("Q6_K"), rows, slice(None)), halves[rows])


def experts_of(tmp_path: Path, gate: str, up: str, down: str) -> tuple[GGUFScheme, dict[str, GGUFWeight]]:
    kinds = {"gate": gate, "up": up, "down": down}
    tensors = {
        f"blk.0.ffn_{name}_exps.weight": (blocks_of(encoding, 3 * 8).reshape(3, 8, -1), encoding)
        for name, encoding in kinds.items()
    }
    path = write(tmp_path / f"{gate}{up}{down}.gguf", tensors)
    return GGUFScheme(GGUFCheckpoint(path)), weights_of(path)


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    scheme, weights = experts_of(tmp_path, "Q4_K", "Q4_K", "Q6_K")
    form = scheme.format_of("model.layers.0.mlp.experts.2.up_proj")
    assert form == GGUFFormat("Q4_K") == scheme.format_of("model.layers.0.mlp.experts.gate_proj")
    assert scheme.format_of("model.layers.0.mlp.experts.0.down_proj") == GGUFFormat("Q6_K")
    weight = weights["model.layers.0.mlp.experts.up_proj"]
    into = form.allocate((3, 8, WIDTH), torch.float32, lambda size, dtype: torch.zeros(size, dtype=dtype))
    for expert in range(3):
        one = GGUFBlocks(weight, expert)
        assert one.name == f"model.layers.0.mlp.experts.{expert}.up_proj.weight" and len(one.shape) == 2
        form.place({"weight": one.read()}, into[expert], slice(0, 8))
    assert torch.equal(into.dequantize(), weight.read())
    raw, one = blocks_of("Q4_K", 3 * 8).reshape(3, 8, -1), GGUFBlocks(weight, 2)
    assert torch.equal(one.read((slice(2, 5), slice(144, 288))), torch.from_numpy(raw[2, 2:5, 144:288]))


def test_experts_of_which_not_all_can_be_packed_are_dequantized(tmp_path: Path) -> None:
    for kinds in (("Q4_K", "Q5_K", "Q4_K"), ("Q8_0", "Q8_0", "MXFP4")):
        scheme, _ = experts_of(tmp_path, *kinds)
        for name in ("gate", "up", "down"):
            assert scheme.format_of(f"model.layers.0.mlp.experts.1.{name}_proj") is None


@pytest.mark.parametrize("encoding", BLOCKS)
def test_random_blocks_have_sane_values(encoding: str) -> None:
    form = GGUFFormat(encoding)
    whole = slice(None)
    (part,) = form.stored((8, 512), whole, whole).values()
    assert part.exact is not None
    drawn = part.exact()
    assert drawn.shape == part.shape and drawn.dtype == torch.uint8 and torch.equal(drawn, part.exact())
    into = form.allocate((8, 512), torch.float32, lambda size, dtype: torch.zeros(size, dtype=dtype))
    form.place({"weight": drawn}, into, slice(0, 8))
    assert 0.002 < into.dequantize().std() < 0.2


@pytest.mark.parametrize(("encoding", "block"), [("Q4_K", 256), ("Q4_1", 32), ("MXFP4", 32)])
def test_a_cut_inside_a_block_is_refused_with_the_sizes_that_work(encoding: str, block: int) -> None:
    form = GGUFFormat(encoding)
    with pytest.raises(ValueError, match=f"inputs 512 to 528 of 1024 .* a multiple of {block}"):
        form.check_cut((ROWS, WIDTH), slice(None), slice(512, 528))
    form.check_cut((ROWS, WIDTH), slice(3, 5), slice(512, 768))


def test_other_encodings_are_dequantized_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = np.zeros((4, 66), np.uint8)
    path = write(
        tmp_path / "m.gguf",
        {
            "blk.0.ffn_down.weight": (blocks_of("Q4_0"), "Q4_0"),
            "blk.0.ffn_up.weight": (small, "TQ2_0"),
            "blk.1.ffn_up.weight": (small, "TQ2_0"),
            "blk.1.ffn_gate.weight": (np.zeros((4, 4), np.float32), "F32"),
        },
    )
    with caplog.at_level("INFO"):
        scheme = GGUFScheme(GGUFCheckpoint(path))
    assert [record.getMessage() for record in caplog.records if "2 in TQ2_0" in record.getMessage()]
    assert scheme.format_of(NAME) == GGUFFormat("Q4_0")
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate_proj", "model.layers.7.mlp.up_proj"):
        assert scheme.format_of(module) is None


def test_a_file_cut_short_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (blocks_of("Q8_0"), "Q8_0")})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight"):
        GGUFCheckpoint(path)
