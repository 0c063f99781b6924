"""Text in few bits beside a vision tower in 16: what is skipped by its name in the larger model stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from tests.quantization.checkpoints import SCHEMES
from tests.vision import test_qwen
from tests.vision.engine_harness import Sighted
from tests.vision.harness import Family, picture, words

SKIPPED = "model.language_model.layers.1.mlp.down_proj"
TEXT = "model.language_model.layers."


def qwen3() -> Any:
    config = test_qwen.qwen3().config
    config.text_config.intermediate_size = 64
    return type(test_qwen.qwen3())(config)


def quantize(folder: Path, name: str, reference: Any, skips: list[str]) -> None:
    """The checkpoint's text layers in few bits, and the reference with the values that these mean."""
    description, pack = SCHEMES[name]
    (path,) = folder.glob("*.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for tensor, values in load_file(path).items():
        module = tensor.removesuffix(".weight")
        if not (tensor.startswith(TEXT) and tensor.endswith("_proj.weight")) or module == SKIPPED:
            stored[tensor] = values
            continue
        parts, means = pack(values)
        stored |= {f"{module}.{key}": part.contiguous() for key, part in parts.items()}
        reference.get_parameter(tensor).data = means.float()
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    key = "ignore" if "ignore" in description else "modules_to_not_convert"
    config["quantization_config"] = description | {key: skips}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["packed", "awq"])
def test_tokens_are_those_of_the_values_that_are_meant(name: str, tmp_path: Path) -> None:
    sighted = Sighted(Family(qwen3, test_qwen.SPECIALS, test_qwen.PREPROCESSOR), tmp_path)
    quantize(tmp_path, name, sighted.reference, ["lm_head", SKIPPED, "re:.*visual.*" if name == "packed" else "visual"])
    sighted = reread(sighted)
    image = picture(40, 30, 1)
    prepared = sighted.prepare([*words(5, 1), test_qwen.IMAGE, *words(4, 2)], [image])
    inputs = test_qwen.reference_inputs(sighted, [image], [], prepared)  # type: ignore[arg-type]
    expected = sighted.expected(prepared, 4, **inputs)
    engine = sighted.engine()
    assert engine.answer(prepared, 4) == expected
    engine.close()


def reread(sighted: Sighted) -> Sighted:
    """With the config as it is now."""
    from quire.loading.model_config import read_model_config

    sighted.config = read_model_config(sighted.files)
    return sighted


def test_a_tower_in_few_bits_is_refused(tmp_path: Path) -> None:
    sighted = Sighted(Family(qwen3, test_qwen.SPECIALS, test_qwen.PREPROCESSOR), tmp_path)
    quantize(tmp_path, "fp8 blocks", sighted.reference, ["lm_head", SKIPPED, "visual"])
    sighted = reread(sighted)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.visual.blocks.0.attn.qkv.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"visual.blocks.0.attn.qkv.weight: float8_e4m3fn in the checkpoint"):
        sighted.engine()
