"""A model's configuration, from config.json or a GGUF header. transformers is not imported: start-up time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError, ModelNotFoundError, QuireError
from quire.loading.files import ModelFiles
from quire.loading.json_file import read_json
from quire.loading.model_config import ModelConfig


def read_model_config(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's shape. `hf_overrides` replaces entries of config.json before it is read."""
    raw = {**read_raw_config(files), **(hf_overrides or {})}
    _bounded(files, raw)
    try:
        return ModelConfig.from_dict(raw)
    except QuireError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the config of {files.path} holds a value of the wrong kind: {error}") from error


# Far above any real model, far below what would fill the memory before the weights are even looked at.
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"), 1 << 24),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 1 << 30),
}


def _bounded(files: ModelFiles, raw: Mapping[str, Any]) -> None:
    for key, limit in _LIMITS.items():
        if isinstance(value := raw.get(key), int) and value > limit:
            raise CheckpointError(f"the config of {files.path} has {key} = {value:,}; at most {limit:,} makes sense")


def read_raw_config(files: ModelFiles) -> dict[str, Any]:
    """The entries of config.json, or the same facts out of the GGUF header."""
    if files.gguf is not None:
        # Even with a config.json beside it: in repositories of GGUF files that one is often a stub.
        from quire.loading.gguf_config import config_from_gguf
        from quire.loading.gguf_header import read_header

        return config_from_gguf(read_header(files.gguf))
    if (path := files.file("config.json")) is not None:
        return read_json(path)
    raise ModelNotFoundError(f"{files.path} has no config.json, which says what model it is")


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The author's sampling defaults (generation_config.json); empty when there are none."""
    path = files.file("generation_config.json")
    return {} if path is None else read_json(path)
