"""BitNet checkpoints: packed and read by transformers, on the reference product and packed for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import pack_weights

from quire.config import EngineConfig
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.weights.scaled import ScaledWeight
from quire.kernels.weights.strips import StripWeight
from quire.layers.build_context import collect_targets
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.quantization.find import find_scheme
from quire.quantization.formats.bitnet import BitNetFormat
from quire.quantization.schemes.registry import scheme_of
from tests.conftest import write_tiny_model
from tests.models.harness import empty_model, in_chunks
from tests.quantization.checkpoints import change_config
from tests.quantization.stored import zeros
from tests.quantization.test_gguf_models import weights_of

TOKENS = [5, 17, 80, 3, 64, 11, 2, 9]


def write_bitnet(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The tiny model in ternary codes; returns the codes -1, 0, 1."""
    write_tiny_model(folder)
    stored, codes = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = values
            continue
        scale = values.abs().mean()
        codes[name] = (values / scale).round().clamp(-1, 1)
        stored[name] = pack_weights(codes[name].clone())
        stored[name.replace("weight", "weight_scale")] = (1 / scale if kind == "bitlinear" else scale).reshape(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    description = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    change_config(folder, quantization_config=description | {"modules_to_not_convert": ["lm_head"]})
    return codes


def load(folder: Path, how: str) -> Any:
    files = local_files("m", folder)
    config = read_model_config(files)
    scheme = find_scheme(EngineConfig(cpu_weights=how), files, config, on_cpu=True)
    model = empty_model(config, scheme=scheme)
    load_weights(collect_targets(model), model.ignores, open_checkpoint(files), progress=False)
    return model


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    codes = write_bitnet(tmp_path / "model", kind)
    torch.compiler.set_stance("force_eager")  # its functions are compiled, which takes minutes
    try:
        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        with torch.no_grad():
            expected = reference(torch.tensor([TOKENS])).logits[0]
    finally:
        torch.compiler.set_stance("default")
    for how, layout in (("dense", ScaledWeight), ("packed", StripWeight)):
        model = load(tmp_path / "model", how)
        torch.testing.assert_close(in_chunks(model, TOKENS, 3), expected, rtol=1e-3, atol=1e-3)
        weight = weights_of(model)["model.layers.1.mlp.down_proj.weight"]
        assert isinstance(weight, layout)
        values = weight.dequantize()
        assert torch.equal(values.sign(), codes["model.layers.1.mlp.down_proj.weight"])


def test_what_is_not_ternary_or_cannot_be_cut_is_refused() -> None:
    found = BitNetFormat()
    weight = found.allocate((8, 32), torch.float32, zeros)
    with pytest.raises(CheckpointError, match="has the code 3"):
        read = {"weight": torch.full((2, 32), 3, dtype=torch.uint8), "weight_scale": torch.ones(1)}
        found.place(read, weight, slice(0, 8))
    with pytest.raises(ValueError, match="cannot be cut"):
        found.check_cut((8, 32), slice(0, 4), slice(0, 32))
    with pytest.raises(ValueError, match="multiple of 4"):
        found.check_cut((6, 32), slice(0, 6), slice(0, 32))


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, "online"),
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({"linear_class": "other"}, "'other'"),
    ],
)
def test_other_kinds_are_refused_by_name(description: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        scheme_of({"quantization_config": {"quant_method": "bitnet"} | description})
