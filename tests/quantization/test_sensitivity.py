"""`quantization` "auto:BITS": errors measured on real inputs, bits spent where they matter, an engine that runs it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from quire.platforms import choose
from quire.worker.calibration_text import CALIBRATION_TEXT
from quire.worker.sensitivity import LENGTH, Unit, measure, resolve_auto, spend
from tests.quantization.checkpoints import change_tensors
from tests.quantization.test_on_load import fake


def config_of(folder: Path, quantization: str = "auto:6") -> EngineConfig:
    return EngineConfig(str(folder), quantization=quantization, dtype="float32", device="cpu")


def parts(config: EngineConfig, folder: Path) -> Any:
    files = local_files("m", folder)
    return config, files, read_model_config(files), choose("cpu")


def test_errors_are_those_of_the_outputs_on_the_calibration_text(tiny_model: Path) -> None:
    units = {unit.pattern: unit for unit in measure(*parts(config_of(tiny_model), tiny_model))}
    assert len(units) == 8
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for path, module in reference.named_modules():
        if path.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, path=path: seen.setdefault(path, []).append(inputs[0][0].detach())
            )
    tokens = AutoTokenizer.from_pretrained(tiny_model)(CALIBRATION_TEXT)["input_ids"]
    for start in range(0, len(tokens) - LENGTH + 1, LENGTH):
        reference(torch.tensor([tokens[start : start + LENGTH]]))
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.down_proj"
        x, weight = torch.cat(seen[path]), reference.get_submodule(path).weight.data
        for kind in ("int4", "int8"):
            wrong = x @ (fake(weight, kind) - weight).t()
            expected = (wrong.square().sum() / (x @ weight.t()).square().sum()).item()
            assert units[path].error(kind) == pytest.approx(expected, rel=1e-3)


def test_bits_are_spent_where_they_remove_the_most_error() -> None:
    def unit(name: str, weights: int, int4: float, int8: float) -> Unit:
        bits = {"int4": 4.0 * weights, "int8": 8.0 * weights, "16bit": 16.0 * weights}
        return Unit(name, weights, bits, {"int4": int4, "int8": int8, "16bit": 0.0}, 1.0)

    units = [unit("a", 100, 0.9, 0.5), unit("b", 100, 0.3, 0.01), unit("c", 100, 0.02, 0.0), unit("d", 100, 0.01, 0.0)]
    for average, kinds in [
        (4, ["int4", "int4", "int4", "int4"]),
        (5, ["int8", "int4", "int4", "int4"]),
        (8, ["16bit", "int8", "int4", "int4"]),
        (9, ["16bit", "int8", "int8", "int4"]),
        (16, ["16bit", "16bit", "16bit", "16bit"]),
    ]:
        spend(units, average, f"auto:{average}")
        assert [each.kind for each in units] == kinds, average
    with pytest.raises(ConfigError, match=r"'auto:3'.* takes 4\.00 bits a weight"):
        spend(units, 3, "auto:3")


def test_an_engine_runs_the_mixture_and_reports_it(tmp_path: Path, tiny_model: Path, caplog: Any) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    important = "model.layers.1.mlp.down_proj"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        # Large weights of small inputs: the model means the same, but a group has one scale for all of its weights.
        tensors[f"{important}.weight"][:, ::32] *= 300
        tensors["model.layers.1.mlp.up_proj.weight"][::32] /= 300

    change_tensors(folder, widen)
    with caplog.at_level(logging.INFO):
        resolved = resolve_auto(*parts(config_of(folder), folder))
    table = json.loads(resolved.quantization or "")
    assert table[important] != "int4" and "int4" in table.values()
    assert "bits a weight" in caplog.text and "int4" in caplog.text
    with LLM(str(folder), quantization="auto:6", dtype="float32", device="cpu", num_gpu_blocks_override=64) as llm:
        assert llm.generate(["the world"], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids


@pytest.mark.parametrize("wish", ["auto", "auto:", "auto:3", "auto:17", "auto:many"])
def test_the_average_must_be_a_number_of_bits(wish: str) -> None:
    with pytest.raises(ConfigError, match="4 to 16, as auto:5"):
        EngineConfig("m", quantization=wish)


def test_dummy_weights_have_no_sensitivity(tiny_model: Path) -> None:
    config = EngineConfig(str(tiny_model), quantization="auto:5", load_format="dummy", device="cpu")
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        resolve_auto(*parts(config, tiny_model))
