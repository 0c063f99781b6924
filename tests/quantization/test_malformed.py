"""Checkpoints that lie: every description, header and tensor that does not fit is refused in our own words, with the
tensor's name where it is about one, or changes nothing. Nothing is run with other values."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.layers.build_context import collect_targets, quantized_weights
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.platforms import choose
from quire.quantization.schemes.registry import scheme_of
from quire.worker.building import build_model, ignored_tensors
from tests.quantization.checkpoints import SCHEMES, Tensors, write

UP = "model.layers.1.mlp.up_proj"
WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": 32,
    "block_structure": [128, 128], "actorder": None,
}  # fmt: skip
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear", "re:.*up_proj"], "weights": WEIGHTS, "input_activations": INPUTS,
         "output_activations": None, "format": "float-quantized"}  # fmt: skip
DESCRIPTIONS: list[dict[str, Any]] = [
    {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*head"],
     "quantization_status": "compressed", "config_groups": {"group_0": GROUP},
     "sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}},
    {"quant_method": "compressed-tensors", "config_groups": {"FP8_BLOCK": ["Linear"]}},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
     "ignored_layers": ["a"]},
    {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["x"]},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq",
     "pack_dtype": "int32", "dynamic": {"+:.*up": {"bits": 8}, "-:.*down": {}},
     "modules_in_block_to_quantize": [["a"]]},
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
     "extra_config": {"lm_head": {"bits": 16}}},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["x"],
     "quantized_layers": {UP: {"quant_algo": "NVFP4", "group_size": 16}}},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]},
    {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
]  # fmt: skip
VALUES = [
    None, "x", "re:(", -1, 0, 3, 10**9, 1.5, float("nan"), [], {}, True, ["x"], {"a": 1}, [[1]], [None], [0, 0],
    [-1, 1], {"re:(": {}}, {"x": None}, {"x": {"bits": "y"}},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index of nested objects and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(given: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    given = copy.deepcopy(given)
    at = given
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return given


@pytest.mark.parametrize("number", range(len(DESCRIPTIONS)), ids=lambda number: DESCRIPTIONS[number]["quant_method"])
def test_any_value_anywhere_in_a_description_is_read_or_refused(number: int) -> None:
    dtypes = {f"{UP}.weight": "F8_E4M3", f"{UP}.weight_scale": "F32"}
    refused = 0
    for path in places(DESCRIPTIONS[number]):
        for value in VALUES:
            config = {"quantization_config": changed(DESCRIPTIONS[number], path, value)}
            try:
                scheme = scheme_of(config, dtypes=None if value is None else dtypes)
                for module in (UP, "model.layers.0.mlp.down_proj", "lm_head"):
                    if scheme is not None and (found := scheme.described(module)) is not None:
                        found.describe()
            except QuireError:
                refused += 1
    assert refused > len(VALUES)


@pytest.mark.parametrize("block", [[0, 128], [128, -1], [128, 10**9], [True, 128], [128], "128x0", 128])
def test_blocks_of_no_size_are_refused(block: Any) -> None:
    for config in (
        {"quant_method": "fp8", "weight_block_size": block},
        changed(DESCRIPTIONS[0], ("config_groups", "group_0", "weights", "block_structure"), block),
    ):
        with pytest.raises(QuireError, match=r"(weight_block_size|block_structure of weights) .*\[rows, columns\]"):
            scheme_of({"quantization_config": config})


def values_of(folder: Path) -> Tensors:
    """Every weight of the model in the folder."""
    config = EngineConfig(str(folder), device="cpu", dtype="float32", cpu_weights="dense")
    files = local_files("model", folder)
    model = build_model(config, files, read_model_config(files), choose("cpu"), 64)
    load_weights(collect_targets(model), ignored_tensors(model), open_checkpoint(files), progress=False)
    few = {f"few {i}": weight.dequantize() for i, weight in enumerate(quantized_weights(model))}
    return {name: weight.detach() for name, weight in model.named_parameters()} | few


class Liar:
    """A checkpoint whose files are changed one lie at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._lie = folder / "true", folder / "lie"
        write(self.folder, name)
        self.tensors = load_file(self.folder / "model.safetensors")
        self._true = values_of(self.folder)

    def check(self, lie: str, said: str = "", tensors: Tensors | None = None, raw: bytes = b"") -> bool:
        """Whether the lie was refused, by an error that contains `said`; if not, it changes no value."""
        shutil.copytree(self.folder, self._lie, dirs_exist_ok=True)
        if tensors is not None:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._lie / "model.safetensors")
        elif raw:
            (self._lie / "model.safetensors").write_bytes(raw)
        try:
            found = values_of(self._lie)
        except QuireError as error:
            assert said in str(error), lie
            return True
        assert all(torch.equal(found[name], value) for name, value in self._true.items()), f"{lie} was believed"
        return False


def lies_about(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Other dtypes and shapes. Scales may be stored in any floating-point type, and are then what they are in that."""
    for dtype in (torch.float32, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float8_e5m2, torch.float64):
        if dtype != tensor.dtype and not (tensor.dtype in (torch.float16, torch.float32) and dtype == torch.float32):
            yield str(dtype), tensor.to(dtype)
    yield "flat", tensor.reshape(-1)
    yield "empty", tensor.reshape(-1)[:0]
    yield "one more dimension", tensor.unsqueeze(0)
    if tensor.dim() == 2:
        yield "transposed", tensor.t()
        yield "a row less", tensor[:-1]
        yield "a column less", tensor[:, :-1]
        yield "twice", torch.cat([tensor, tensor])
    if tensor.dtype in (torch.float16, torch.float32):
        for value in (float("nan"), float("inf"), -1.0):
            wrong = tensor.clone()
            wrong.view(-1)[0] = value
            yield str(value), wrong


EXTRAS = ("weight", "weight_scale_2", "weight_zero_point", "weight_packed", "qweight", "qzeros", "g_idx")


def all_but_slow(*fast: str) -> list[Any]:
    """Every scheme; all but these carry `slow`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]


@pytest.mark.parametrize("name", all_but_slow("packed"))
def test_tensors_that_lie_are_refused_by_name(tmp_path: Path, name: str) -> None:
    liar = Liar(tmp_path, name)
    refused = 0
    for key in [key for key in liar.tensors if key.startswith(f"{UP}.")]:
        rest = {other: tensor for other, tensor in liar.tensors.items() if other != key}
        refused += liar.check(f"no {key}", UP, rest)
        for lie, tensor in lies_about(liar.tensors[key]):
            refused += liar.check(f"{key} is {lie}", UP, rest | {key: tensor})
    assert refused >= 20
    for extra in EXTRAS:
        if f"{UP}.{extra}" not in liar.tensors:
            liar.check(f"{extra} besides", UP, liar.tensors | {f"{UP}.{extra}": torch.ones(96, 2)})


@pytest.mark.parametrize("name", all_but_slow("gptq"))
def test_files_cut_short_or_scrambled_are_refused(tmp_path: Path, name: str) -> None:
    liar, rng = Liar(tmp_path, name), random.Random(7)
    whole = (liar.folder / "model.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for _ in range(30):
        assert liar.check("cut short", raw=whole[: rng.randrange(1, len(whole))])
        scrambled = bytearray(whole)
        at = rng.randrange(8, header)
        scrambled[at : at + 4] = json.dumps(rng.choice([0, 10**3, "I32", [1, 2], {}])).encode()[:4].ljust(4)
        liar.check("scrambled", raw=bytes(scrambled))
