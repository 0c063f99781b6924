"""Bundles: one file that is served as the folder it came from, and that is refused by name if it was changed."""

from __future__ import annotations

import json
import mmap
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import CheckpointError, QuireError
from quire.loading.bundle import ALIGNMENT, MANIFEST, locate, read_bundle, write_bundle
from quire.loading.files import ModelFiles, local_files
from quire.loading.load import open_checkpoint

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by QUIRE_CACHE: compiled kernels are there too."""
    monkeypatch.setattr("quire.loading.bundle.cache_dir", (tmp_path / "cache").joinpath)


@pytest.fixture
def bundle(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "tiny.quire"
    assert main(["bundle", str(tiny_model), "-o", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path)]
    return path


def test_a_bundle_is_served_as_its_folder(
    bundle: Path, tiny_model: Path, tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    (expected,) = make_llm().generate(["the world"], PARAMS)
    moved = tmp_path / "elsewhere" / "any name"
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    llm = make_llm(moved)
    (found,) = llm.generate(["the world"], PARAMS)
    assert found.outputs[0].text == expected.outputs[0].text
    assert llm.get_default_sampling_params().top_k == 40  # of generation_config.json
    assert llm.get_tokenizer().chat_template == (tiny_model / "chat_template.jinja").read_text()


def test_weights_are_aligned_and_read_in_place(bundle: Path, tiny_model: Path, tmp_path: Path) -> None:
    files = local_files("tiny", bundle)
    (path,) = files.weight_files("safetensors")
    stored = locate(path)
    assert stored.path == bundle.resolve()
    assert stored.start % ALIGNMENT == stored.start % mmap.ALLOCATIONGRANULARITY == 0
    assert stored.map()[:] == (tiny_model / "model.safetensors").read_bytes()
    ours = {weight.name: weight.read() for weight in open_checkpoint(files)}
    theirs = {weight.name: weight.read() for weight in open_checkpoint(local_files("tiny", tiny_model))}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    unpacked = list((tmp_path / "cache").rglob("*"))
    assert not any(path.suffix == ".safetensors" for path in unpacked)
    assert ModelFiles.from_plain(files.to_plain()) == files


def test_another_machine_unpacks_again(bundle: Path, tmp_path: Path) -> None:
    plain = local_files("tiny", bundle).to_plain()
    shutil.rmtree(tmp_path / "cache")
    again = ModelFiles.from_plain(plain)
    assert again.file("config.json") is not None


def test_any_unzip_reads_it_and_the_same_model_gives_the_same_bytes(
    bundle: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(bundle) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "unzipped")
    assert (tmp_path / "unzipped" / "config.json").read_bytes() == (tiny_model / "config.json").read_bytes()
    assert main(["bundle", str(tiny_model), "-o", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()


def test_inspect_checks_everything(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--device", "cpu"]) == 0
    assert "all digests match" in capsys.readouterr().out


def test_what_exists_is_kept_and_bundles_are_not_bundled(
    bundle: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", str(tiny_model), "-o", str(bundle)]) == 2
    assert "exists: give another -o, or --force" in capsys.readouterr().err
    assert main(["bundle", str(bundle), "-o", f"{bundle}2"]) == 2
    assert "is a bundle already" in capsys.readouterr().err


# Damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_changed_weights_are_refused_by_name(bundle: Path) -> None:
    member = read_bundle(bundle).members["model.safetensors"]
    flip(bundle, member.end - 5)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not have the digest that quire\.json lists"):
        local_files("tiny", bundle)


def test_a_checked_bundle_that_changes_is_checked_again(bundle: Path) -> None:
    local_files("tiny", bundle)
    member = read_bundle(bundle).members["model.safetensors"]
    flip(bundle, member.start + 100)
    with pytest.raises(CheckpointError, match="damaged or changed"):
        local_files("tiny", bundle)


def test_changed_small_files_are_refused_by_name(bundle: Path) -> None:
    flip(bundle, read_bundle(bundle).members["tokenizer.json"].start + 3)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not have the digest"):
        local_files("tiny", bundle)


def test_small_files_changed_in_the_cache_are_refused(bundle: Path, tmp_path: Path) -> None:
    folder = local_files("tiny", bundle).folder
    assert folder is not None
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not what .* has: remove"):
        local_files("tiny", bundle)


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.9, 0.999])
def test_a_truncated_bundle_is_refused(bundle: Path, share: float) -> None:
    data = bundle.read_bytes()
    bundle.write_bytes(data[: max(4, int(share * len(data)))])
    with pytest.raises(CheckpointError, match="not a usable bundle: it is cut short, or not a bundle"):
        local_files("tiny", bundle)


def forge(path: Path, members: dict[str, bytes], manifest: dict | None = None, compression: int = 0) -> Path:
    """A zip that `quire bundle` would not write."""
    from blake3 import blake3

    files = {name: {"bytes": len(data), "blake3": blake3(data).hexdigest()} for name, data in members.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest or {"format": 1, "quire": "0", "model": "m", "files": files}))
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "..", "C:evil", "a\\b", "new\nline"])
def test_no_member_leaves_its_folder(tmp_path: Path, name: str) -> None:
    path = forge(tmp_path / "forged", {name: b"x"})
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        local_files("forged", path)
    assert not (tmp_path / "evil").exists()
    with pytest.raises(CheckpointError, match="cannot be in a bundle"):
        write_bundle(tmp_path / "out", {name: path}, "m", "0")


def test_what_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = forge(tmp_path / "a", {"config.json": b"{}"}, {"format": 1, "quire": "0", "model": "m", "files": {}})
    with pytest.raises(CheckpointError, match=r"list different files: config\.json"):
        local_files("a", path)
    path = forge(tmp_path / "b", {}, {"format": 9, "quire": "77", "model": "m", "files": {}})
    with pytest.raises(CheckpointError, match="its format is 9, written by quire 77"):
        local_files("b", path)
    path = forge(tmp_path / "c", {"config.json": b"{}" * 100}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        local_files("c", path)
    with zipfile.ZipFile(tmp_path / "d", "w") as archive:
        archive.writestr("anything", b"x")
    with pytest.raises(CheckpointError, match=r"it has no quire\.json"):
        local_files("d", tmp_path / "d")


def test_a_bundle_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the bundle has no weights"):
        local_files("a", forge(tmp_path / "a", {"config.json": b"{}"}))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": 5}',
    ],
)
def test_damaged_safetensors_in_a_bundle_are_refused(tmp_path: Path, header: bytes) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (tmp_path / "config.json").write_text("{}")
    write_bundle(tmp_path / "m.quire", {"model.safetensors": source, "config.json": tmp_path / "config.json"}, "m", "0")
    with pytest.raises(QuireError, match="damaged or unreadable safetensors file"):
        list(open_checkpoint(local_files("m", tmp_path / "m.quire")))


def test_the_default_model_in_a_bundle(
    tmp_path: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file in a bundle: the tokenizer comes from it too, and nothing but the bundle is read."""
    path = tmp_path / "default.quire"
    assert main(["bundle", "-o", str(path)]) == 0
    bundle = read_bundle(path)
    (weights,) = bundle.weights
    assert weights.suffix == ".gguf"
    assert bundle.manifest["model"] == "smollm2-135m"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    llm = make_llm(path, cpu_weights="packed", max_model_len=128)
    (found,) = llm.generate(["The capital of France is"], PARAMS)
    assert "Paris" in found.outputs[0].text
    shutil.copy(path, tmp_path / "copy")
    flip(tmp_path / "copy", bundle.members[weights.name].end - 1000)
    with pytest.raises(CheckpointError, match=r"\.gguf does not have the digest"):
        local_files("copy", tmp_path / "copy")


def test_several_weight_files_and_their_index(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.do_sample = True  # transformers does not save its temperature otherwise
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert main(["bundle", str(folder), "-o", str(tmp_path / "m.quire")]) == 0
    files = local_files("m", tmp_path / "m.quire")
    assert len(files.weight_files("safetensors")) > 1
    assert all(locate(path).start % ALIGNMENT == 0 for path in files.weight_files("safetensors"))
    ours = {weight.name: weight.read() for weight in open_checkpoint(files)}
    theirs = {weight.name: weight.read() for weight in open_checkpoint(local_files("tiny", tiny_model))}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
