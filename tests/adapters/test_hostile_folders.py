"""A folder that is damaged, malicious or of an unknown kind is refused with a clear error, and nothing in it runs."""

from __future__ import annotations

import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.adapters import folder as adapter_folder
from quire.adapters import peft_config
from quire.adapters.folder import describe_adapter, digest_adapter
from quire.adapters.peft_folder import read_adapter
from quire.errors import AdapterError, AdapterNotFoundError
from tests.adapters.folders import Q, tensors, write


def _refused(folder: Path, match: str, kind: type[AdapterError] = AdapterError, header: bool = True) -> None:
    with pytest.raises(kind, match=match):
        read_adapter(folder, max_rank=16)
    if header:
        with pytest.raises(kind, match=match):
            describe_adapter(folder, max_rank=16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_folder_that_the_others_spoil_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    largest = torch.finfo(dtype).max
    folder = write(tmp_path, {name: tensor.to(dtype).fill_(largest) for name, tensor in tensors().items()})
    adapter = read_adapter(folder, max_rank=16)
    assert adapter.rank == 4 and adapter.digest == digest_adapter(folder)


SETTINGS = {
    "another type": ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
    "no rank": ({"r": None}, "has the rank None"),
    "a rank of zero": ({"r": 0}, "has the rank 0"),
    "a rank that is a truth value": ({"r": True}, "has the rank True"),
    "an absurd rank": ({"r": 10**12}, "has the rank 1000000000000"),
    "an alpha that is not a number": ({"lora_alpha": "8"}, "lora_alpha has the value '8'"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha has the value inf"),
    "another rank in the tensors": ({"r": 8}, "has the rank 4, but adapter_config.json says 8"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
    "a quantized variant": ({"use_qalora": True}, "use_qalora is set: QALoRA"),
    "a block-diagonal variant": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
    "a changed base": ({"init_lora_weights": "pissa_niter_16"}, "changes the weights of the base"),
    "a setting of the future": ({"use_xlora": {"depth": 3}}, "'use_xlora'.*is not known"),
    "patterns that are a list": ({"rank_pattern": [1]}, "rank_pattern is"),
    "a pattern that is no expression": ({"rank_pattern": {"(q_proj": 4}}, "not a regular expression"),
    "a long pattern": ({"rank_pattern": {"q" * 2000: 4}}, "a pattern of 2000 characters"),
    "an unknown bias": ({"bias": "some"}, "bias is 'some'"),
    "a magnitude that is missing": ({"use_dora": True}, "lacks a magnitude"),
    "a bias that is missing": ({"lora_bias": True}, "lacks a bias"),
    "token rows that are missing": ({"trainable_token_indices": [1, 2]}, "tokens without rows"),
    "tokens that are not ids": ({"trainable_token_indices": [-1]}, "expected a list of token ids"),
    "a token twice": ({"trainable_token_indices": [1, 1]}, "names a token twice"),
    "invocation tokens that are not ids": ({"alora_invocation_tokens": "abc"}, "alora_invocation_tokens has 'abc'"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_served(case: str, tmp_path: Path) -> None:
    settings, message = SETTINGS[case]
    _refused(write(tmp_path, **settings), message)


def _with(name: str, value: Tensor) -> dict[str, Tensor]:
    return tensors() | {name: value}


def _spoiled(value: float) -> dict[str, Tensor]:
    changed = tensors()
    changed[f"{Q}.lora_B.weight"][3, 1] = value
    return changed


EXPERT = "base_model.model.mlp.experts.999999999.gate_proj"
TENSORS: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "a rank over the limit": (lambda: tensors(rank=17), "has the rank 17; at most 16 is allowed: raise max_lora_rank"),
    "A without B": (lambda: {f"{Q}.lora_A.weight": torch.ones(4, 32)}, "has only one of lora_A and lora_B"),
    "ranks that differ": (lambda: _with(f"{Q}.lora_B.weight", torch.ones(32, 5)), r"\[4, 32\].*\[32, 5\] do not fit"),
    "a matrix that is a vector": (lambda: _with(f"{Q}.lora_B.weight", torch.ones(32)), "do not fit together"),
    "an empty matrix": (lambda: _with(f"{Q}.lora_A.weight", torch.ones(4, 0)), "do not fit together"),
    "a tensor of another method": (lambda: _with(f"{Q}.lora_E", torch.ones(4)), "lora_E' is not known"),
    "a name without the prefix": (lambda: _with("norm.weight", torch.ones(32)), "'norm.weight' is not known"),
    "a magnitude that is not announced": (lambda: _with(f"{Q}.lora_magnitude_vector", torch.ones(32)), "dora is false"),
    "a bias that is not announced": (lambda: _with(f"{Q}.lora_B.bias", torch.ones(32)), "lora_bias is false"),
    "integers": (lambda: _with(f"{Q}.lora_A.weight", torch.ones(4, 32, dtype=torch.int8)), "of the type I8"),
    "an expert of a high number": (
        lambda: {f"{EXPERT}.lora_A.weight": torch.ones(4, 32), f"{EXPERT}.lora_B.weight": torch.ones(48, 4)},
        "at most 4096 experts",
    ),
    "rows of tokens that are not announced": (
        lambda: _with("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", torch.ones(2, 32)),
        "trainable_token_indices names 0",
    ),
    "no tensors": (dict, "changes nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_cannot_be_served(case: str, tmp_path: Path) -> None:
    make, message = TENSORS[case]
    _refused(write(tmp_path, make()), message)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write(tmp_path, {name: tensor.to(dtype) for name, tensor in _spoiled(value).items()})
    _refused(folder, "holds NaN or infinite values", header=False)
    with pytest.raises(AdapterError, match="holds NaN or infinite values"):
        digest_adapter(folder)


def test_a_pattern_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "MATCH_SECONDS", 0.2)
    folder = write(tmp_path, rank_pattern={r"(?:[\w.]|[\w.][\w.]|[\w.]{3})*(?:[0-9]{3})": 4})
    start = time.monotonic()
    _refused(folder, "takes more than 0.2 s to match")
    assert time.monotonic() - start < 30


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "there is no adapter folder", AdapterNotFoundError)
    _refused(tmp_path, "has neither", AdapterNotFoundError)
    _refused(Path("a\0b"), "zero byte")
    folder = write(tmp_path / "a")
    _refused(folder / "adapter_config.json", "is a file: an adapter is a folder")
    (folder / "adapter_config.json").unlink()
    _refused(folder, "has no readable adapter_config.json", AdapterNotFoundError)
    (folder / "adapter_config.json").mkdir()
    _refused(folder, "not a regular file")
    fifo = write(tmp_path / "b")
    (fifo / "adapter_model.safetensors").unlink()
    os.mkfifo(fifo / "adapter_model.safetensors")
    _refused(fifo, "not a regular file")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret")
    folder = write(tmp_path / "a")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret / name)
        _refused(folder, "a link out of the adapter's folder")
        (folder / name).unlink()
        (folder / name).write_bytes((secret / name).read_bytes())
    loop = folder / "adapter_config.json"
    loop.unlink()
    loop.symlink_to(loop)
    _refused(folder, "has no readable adapter_config.json")


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    written = write(tmp_path / "a")
    snapshot = tmp_path / "models--someone--adapter" / "snapshots" / "0123"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("adapter_model.safetensors", "adapter_config.json")):
        (blobs / str(number)).write_bytes((written / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert read_adapter(snapshot, 16).digest == read_adapter(written, 16).digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not a usable JSON file"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "not a usable JSON file"),
        (b'{"a": ' * 3000, "not a usable JSON file"),
        (b" " * (peft_config.MAX_CONFIG_BYTES + 1), "at most 4194304 are read"),
        (b'{"peft_type": "LORA"}', "r is missing"),
        (b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}", "not a usable JSON file|has the rank"),
    ],
    ids=["empty", "a list", "deep lists", "deep objects", "large", "no rank", "a long number"],
)
def test_settings_that_are_no_settings(text: bytes, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "adapter_config.json").write_bytes(text)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged or unreadable"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header has 1099511627776 bytes"),
        (struct.pack("<Q", 2) + b"[]", "damaged or unreadable"),
        (struct.pack("<Q", 2) + b"{}trailing", "damaged or unreadable"),
        (
            (lambda text: struct.pack("<Q", len(text)) + text)(
                json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
            ),
            "damaged or unreadable",
        ),
    ],
    ids=["empty", "a huge header", "a list", "bytes at the end", "a tensor that is not there"],
)
def test_safetensors_that_are_damaged(data: bytes, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(data)
    _refused(folder, message)


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def _pickled(folder: Path, content: object) -> Path:
    write(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    return folder


def test_pickles_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _refused(_pickled(tmp_path / "a", tensors() | {"x": _Code()}), "contains more than tensors")
    _refused(_pickled(tmp_path / "b", [1, 2]), "not a dictionary of named tensors")
    _refused(_pickled(tmp_path / "c", {"x": 3}), "'x' is not a dense tensor")
    assert not (tmp_path / "ran").exists()


def test_pickles_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tensor of 2^40 values over one stored value.
    wide = tensors() | {f"{Q}.lora_A.weight": torch.zeros(1).expand(4, 1 << 38)}
    _refused(_pickled(tmp_path / "a", wide), "claims more values than the file has")
    packed = _pickled(tmp_path / "b", tensors())
    with zipfile.ZipFile(packed / "adapter_model.bin") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(packed / "adapter_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    _refused(packed, "a compressed archive")
    (packed / "adapter_model.bin").write_bytes(b"\x80\x02garbage")
    _refused(packed, "not a file saved by torch 1.6 or later")
    monkeypatch.setattr(adapter_folder, "MAX_ADAPTER_BYTES", 100)
    _refused(write(tmp_path / "c"), "at most 100 are read")
