"""Fields of config.json that change what is computed: understood, or refused by their names."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import CheckpointError, QuireError
from quire.loading.config_fields import check_fields
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from quire.loading.tokenizer import load_tokenizer

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": 5}, "quantization_config = 5"),
    ({"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
    ({"quantization_config": []}, "quantization_config = []"),
    ({"dtype": None, "torch_dtype": "nonsense"}, "torch_dtype = 'nonsense'"),
    ({"dtype": "int3"}, "dtype = 'int3'"),
    ({"dtype": 7}, "dtype = 7"),
    ({"head_dim": 0}, "head_dim = 0"),
    ({"head_dim": -4}, "head_dim = -4"),
    ({"head_dim": "8"}, "head_dim = '8'"),
    ({"head_dim": True}, "head_dim = True"),
    ({"rope_theta": 0}, "rope_theta = 0"),
    ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    ({"rope_theta": "x"}, "rope_theta = 'x'"),
    ({"rope_theta": 5.0}, "rope_parameters.rope_theta is 10000.0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta = 0"),
    ({"rope_parameters": {"rope_type": 7, "rope_theta": 1e4}}, "rope_parameters.rope_type = 7"),
    ({"rope_parameters": {"full_attention": {"rope_theta": -3}}}, "rope_parameters.full_attention.rope_theta = -3"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor = 0"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1, -1]}}, "rope_scaling.short_factor = [1, -1]"),
    ({"rope_scaling": "x"}, "rope_scaling = 'x'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn': rope_parameters.rope_type"),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, "rope_scaling.rope_theta = 5.0: rope_parameters"),
    ({"sliding_window": -5}, "sliding_window = -5"),
    ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window = 0"),
    ({"sliding_window": 8.5}, "sliding_window = 8.5"),
    ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
    ({"rms_norm_eps": "a"}, "rms_norm_eps = 'a'"),
    ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    ({"num_key_value_heads": -2}, "num_key_value_heads = -2"),
    ({"intermediate_size": 0}, "intermediate_size = 0"),
    ({"intermediate_size": 1.5}, "intermediate_size = 1.5"),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor = 2"),
    ({"layer_types": ["full_attention"]}, "1 kinds for "),
    ({"layer_types": 5}, "layer_types = 5"),
    ({"hidden_act": 5}, "hidden_act = 5"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
    ({"attention_bias": "x"}, "attention_bias = 'x'"),
    ({"eos_token_id": "x"}, "eos_token_id = 'x'"),
    ({"bos_token_id": [1, "q"]}, "bos_token_id = [1, 'q']"),
    ({"text_config": {"head_dim": 0}}, "text_config.head_dim = 0"),
]


def folder_with(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> Path:
    """The tiny model with other fields in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("changes, message", WRONG, ids=[message for _, message in WRONG])
def test_a_value_that_means_nothing_is_refused_by_its_name(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = folder_with(tiny_model, tmp_path, changes)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(local_files(str(folder), folder))
    assert message in str(caught.value) and str(folder) in str(caught.value)
    assert "tokenizer" not in str(caught.value) and len(str(caught.value)) < 500


def test_overrides_are_checked_like_the_file(tiny_model: Path) -> None:
    for changes, message in WRONG:
        with pytest.raises(CheckpointError) as caught:
            read_model_config(local_files(str(tiny_model), tiny_model), changes)
        assert message in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    for name in ("rope_theta", "rms_norm_eps", "partial_rotary_factor", "logit_scale"):
        with pytest.raises(CheckpointError, match=name):
            check_fields({name: value}, "model")


def test_the_same_rope_by_both_names_passes(tiny_model: Path) -> None:
    files = local_files(str(tiny_model), tiny_model)
    plain = read_model_config(files)
    for rope in ({"rope_type": "default"}, {"type": "default", "rope_theta": 10000.0}, None, {}):
        assert read_model_config(files, {"rope_scaling": rope}) == plain


@pytest.mark.parametrize(
    "changes, named",
    [({"head_dim": 15}, "RoPE"), ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor")],
)
def test_what_transformers_refuses_in_the_config_is_not_blamed_on_the_tokenizer(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = folder_with(tiny_model, tmp_path, changes)
    with pytest.raises(CheckpointError, match=f"(?s)the config in .*{named}") as caught:
        load_tokenizer(local_files(str(folder), folder))
    assert "tokenizer" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"quantization_config": 5}, {"head_dim": 0}, {"dtype": 7}])
def test_an_engine_names_the_field_and_not_the_tokenizer(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = folder_with(tiny_model, tmp_path, changes)
    with pytest.raises(QuireError, match=next(iter(changes))) as caught:
        LLM(str(folder), device="cpu", num_gpu_blocks_override=16)
    assert "tokenizer" not in str(caught.value)


@pytest.mark.parametrize("name, wanted", [("half", "float16"), ("torch.bfloat16", "bfloat16"), ("float", "float32")])
def test_other_names_of_dtypes_are_understood(tiny_model: Path, name: str, wanted: str) -> None:
    config = read_model_config(local_files(str(tiny_model), tiny_model), {"dtype": name})
    assert config.dtype == wanted


def test_the_configs_of_all_families_pass() -> None:
    """The defaults of every family that transformers has are values that real files leave out or repeat."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    passed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in CAUSAL:
            try:
                config = CONFIG_MAPPING[name]()
            except Exception:  # some families have no defaults that they accept themselves
                continue
            check_fields(config.to_dict(), name)
            passed += 1
    assert passed > 100
