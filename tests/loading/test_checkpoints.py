"""safetensors, torch and dummy checkpoints: values round-trip, and only the requested part is read."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError, ConfigError, ModelNotFoundError
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.weights import Checkpoint, Target
from tests.loading.conftest import by_name, loaded, targets_for

Tensors = dict[str, torch.Tensor]


def never(name: str) -> bool:
    return False


def write(folder: Path, tensors: Tensors, kind: str, sharded: bool) -> None:
    """Save as transformers would: one file, or two and an index."""
    save = save_file if kind == "safetensors" else torch.save
    single = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (folder / "config.json").write_text("{}")
    if not sharded:
        save(tensors, folder / single)
        return
    stem, suffix = single.rsplit(".", 1)
    names = list(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [f"{stem}-0000{i + 1}-of-00002.{suffix}" for i in range(2)]
    for half, file in zip(halves, files, strict=True):
        save({name: tensors[name] for name in half}, folder / file)
    index = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    (folder / f"{single}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def opened(folder: Path, load_format: str = "auto") -> Checkpoint:
    return open_checkpoint(local_files("m", folder), load_format)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_round_trip_gives_the_same_tensors(tmp_path: Path, tensors: Tensors, kind: str, sharded: bool) -> None:
    write(tmp_path, tensors, kind, sharded)
    checkpoint = opened(tmp_path)
    assert len(checkpoint) == len(tensors)
    targets = targets_for(tensors)
    load_weights(targets, never, checkpoint)
    for name, value in loaded(targets).items():
        assert torch.equal(value, tensors[name]), name


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_targets_take_slices_arrange_them_and_convert(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    write(tmp_path, tensors, kind, sharded=False)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = tensors[name]
    rank = Target(torch.empty(256, 128, dtype=torch.bfloat16), (256, 512), (slice(None), slice(128, 256)))
    turned = Target(torch.empty(512, 64), (256, 512), (slice(64, 128),), torch.t)
    load_weights({name: [rank, turned]}, lambda other: other != name, opened(tmp_path))
    assert torch.equal(rank.into, whole[:, 128:256].bfloat16())
    assert torch.equal(turned.into, whole[64:128].t())


def test_a_slice_reads_only_what_it_keeps(tmp_path: Path) -> None:
    """Pages of the file that the slice does not touch never become resident."""
    big = torch.ones(4096, 4096)  # 64 MiB
    for kind in ("safetensors", "pt"):
        folder = tmp_path / kind
        folder.mkdir()
        write(folder, {"w": big}, kind, sharded=False)
        (weight,) = opened(folder)
        before = resident()
        part = weight.read((slice(0, 64),))
        assert part.shape == (64, 4096)
        assert resident() - before < 16 << 20, kind


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_truncated_and_inconsistent_safetensors_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, tensors, "safetensors", sharded=False)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    (length,) = struct.unpack_from("<Q", good)
    header = json.loads(good[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")

    def lie(**change: object) -> bytes:
        text = json.dumps({**header, first: {**header[first], **change}}).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    bad = {
        "cut short": good[:-100],
        "only a length": good[:8],
        "empty": b"",
        "huge header": struct.pack("<Q", 1 << 60) + good[8:],
        "not json": struct.pack("<Q", 4) + b"nope" + good[12:],
        "offsets past the end": lie(data_offsets=[0, 1 << 50]),
        "backwards": lie(data_offsets=[100, 0]),
        "shape too large": lie(shape=[1 << 40, 1 << 40]),
        "negative": lie(shape=[-1, 4]),
    }
    for what, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            print(what, len(opened(tmp_path)))


def test_an_index_cannot_lead_outside_the_folder(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, tensors, "safetensors", sharded=True)
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError, match="plain file name"):
            opened(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match="1 of 1 weight files are missing: gone"):
        opened(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="lists 1 tensors that this file lacks: w"):
        opened(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        opened(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("/tmp/quire-was-here"),))


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="contains more than tensors"):
        opened(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        opened(tmp_path)
    assert not Path("/tmp/quire-was-here").exists()


def test_damaged_torch_files_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path)
    good = path.read_bytes()
    for content in (b"", b"hello", good[: len(good) // 2], good[:-64]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            opened(tmp_path)
    torch.save([torch.ones(2)], path)
    with pytest.raises(CheckpointError, match="not a dictionary of named tensors"):
        opened(tmp_path)


def test_the_old_torch_format_still_loads(tmp_path: Path, tensors: Tensors) -> None:
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    targets = targets_for(tensors)
    load_weights(targets, never, opened(tmp_path))
    assert all(torch.equal(value, tensors[name]) for name, value in loaded(targets).items())


def test_one_error_lists_all_mismatches(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, {**tensors, "extra.weight": torch.ones(2), "known.inv_freq": torch.ones(2)}, "safetensors", False)
    targets = targets_for(tensors)
    targets["model.norm.weight"] = [Target(torch.empty(99), (99,))]
    for number in range(14):
        targets[f"absent.{number}"] = [Target(torch.empty(1), (1,))]
    with pytest.raises(CheckpointError) as caught:
        load_weights(targets, lambda name: name.endswith("inv_freq"), opened(tmp_path))
    message = str(caught.value)
    assert "14 tensors missing" in message and "absent.0 (1,)" in message and "and 4 more" in message
    assert "1 tensor in the checkpoint but unknown to the model" in message and "extra.weight (2,)" in message
    assert "model.norm.weight: (256,) in the checkpoint, (99,) in the model" in message
    assert "inv_freq" not in message
    # Nothing was copied: no model is half loaded.
    assert all(
        (each[0].into == -7).all() for name, each in targets.items() if name in tensors and name != "model.norm.weight"
    )


@pytest.mark.parametrize("direction", ["lacks", "adds"])
def test_a_missing_or_additional_prefix_of_names_is_accepted(tmp_path: Path, tensors: Tensors, direction: str) -> None:
    wanted = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    saved = {n.removeprefix("model.") if direction == "lacks" else "transformer." + n: t for n, t in wanted.items()}
    write(tmp_path, saved, "safetensors", sharded=False)
    targets = targets_for(wanted)
    load_weights(targets, never, opened(tmp_path))
    assert all(torch.equal(value, wanted[name]) for name, value in loaded(targets).items())
    targets["model.new"] = [Target(torch.empty(1), (1,))]
    with pytest.raises(CheckpointError, match=r"1 tensor missing from the checkpoint:\n  - model\.new"):
        load_weights(targets, never, opened(tmp_path))


def test_dummy_weights_are_seeded_and_fit_together_across_ranks(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = local_files("m", tmp_path)
    tensors["model.big.weight"] = torch.empty(3000, 2000)
    targets = targets_for(tensors)
    load_weights(targets, never, open_checkpoint(files, "dummy", targets=targets, seed=3))
    values = loaded(targets)
    assert (values["model.norm.weight"] == 1).all()
    for name in ("model.embed_tokens.weight", "model.big.weight"):
        assert abs(values[name].std() - 0.02) < 1e-3 and abs(values[name].mean()) < 1e-3
    assert torch.linalg.matrix_rank(values["model.big.weight"][:500, :500]) == 500
    half = by_name(open_checkpoint(files, "dummy", targets=targets, seed=3))["model.big.weight"]
    assert torch.equal(half.read((slice(1500, 3000),)), values["model.big.weight"][1500:])
    other = by_name(open_checkpoint(files, "dummy", targets=targets, seed=4))["model.big.weight"]
    assert not torch.equal(other.read(), values["model.big.weight"])


def test_missing_formats_are_an_error(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="has no weights"):
        opened(tmp_path)
    write(tmp_path, tensors, "safetensors", sharded=False)
    with pytest.raises(ModelNotFoundError, match="no pt weights"):
        opened(tmp_path, "pt")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        opened(tmp_path, "gguf")
    with pytest.raises(ConfigError, match="npz"):
        opened(tmp_path, "npz")
