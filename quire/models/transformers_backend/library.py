"""The library's model for a config, on the meta device, and the checks that come before and after its trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.build_context import BuildContext
from quire.loading.model_config import ModelConfig
from quire.models.transformers_backend.attention import TRIAL
from quire.models.transformers_backend.trial import Trial

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotation whose frequencies depend on the longest row of a step, so that rows would change each other."""


def _library_config(raw: Mapping[str, Any], architecture: str) -> PretrainedConfig:
    """The library's config object for a config.json. Raises if the library has no such causal language model."""
    family = str(raw.get("model_type"))
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if family not in CONFIG_MAPPING or architecture not in (known if isinstance(known, (tuple, list)) else (known,)):
        code = "; code that comes with a checkpoint is not run" if raw.get("auto_map") else ""
        raise UnsupportedModelError(
            f"{architecture} with model_type {family!r} is not a causal language model of the installed transformers "
            f"library{code}"
        )
    left_out = ("quantization_config", "dtype", "torch_dtype")
    fields = {key: _finite_or_not(value) for key, value in raw.items() if key not in left_out}
    try:
        return CONFIG_MAPPING[family].from_dict(fields)
    except Exception as error:
        raise CheckpointError(f"the config of {architecture} is refused by transformers: {error}") from error


def _finite_or_not(value: Any) -> Any:
    """A value of a config.json with the library's names of infinities as numbers."""
    if isinstance(value, list):
        return [_finite_or_not(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value


def make_model(build: BuildContext) -> Any:
    """The library's model on the meta device. Raises for kinds that are not implemented."""
    architecture = build.config.architecture
    config = _library_config(build.config.raw, architecture)
    kind = getattr(transformers, architecture)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{architecture} is an encoder-decoder, which is not implemented")
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{architecture} takes more than text (its config has parts), which is not implemented through transformers"
        )
    if kind._is_stateful:
        raise UnsupportedModelError(
            f"{architecture} keeps recurrent states, which are not implemented through transformers"
        )
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - _LAYER_TYPES):
        raise UnsupportedModelError(
            f"{architecture} has layers of the types {', '.join(others)}, which are not implemented through "
            "transformers"
        )
    _check_rope(config, architecture)
    try:
        with torch.device("meta"):
            model = kind._from_config(
                config, dtype=build.dtype, attn_implementation=TRIAL, experts_implementation=TRIAL
            )
    except Exception as error:
        raise UnsupportedModelError(
            f"{architecture} cannot run through transformers here: the library cannot build it with another attention "
            f"({type(error).__name__}: {error})"
        ) from error
    try:
        getattr(model, model.base_model_prefix, model).get_input_embeddings()
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{architecture} cannot run through transformers here: the library does not say which module is its "
            "embedding"
        ) from error
    return model.eval().requires_grad_(False)


def _check_rope(config: Any, architecture: str) -> None:
    """Frequencies that depend on the step's longest row are refused by name."""
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *(value for value in given.values() if isinstance(value, dict))):
        if each.get("rope_type") in _POSITION_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{architecture} with rope_type {each['rope_type']!r} is not implemented through transformers"
            )


def check_layers(library: Any, trial: Trial) -> None:
    """Every layer must call attention once."""
    total = library.config.num_hidden_layers
    if sorted(trial.calls) != list(range(total)):
        raise UnsupportedModelError(
            f"{type(library).__name__} cannot run through transformers here: {len(trial.calls)} of its {total} layers "
            "call attention through the library's interface"
        )


def seen_config(config: ModelConfig, library: Any, trial: Trial) -> ModelConfig:
    """The model's config with what was seen in place of what was read."""
    first = trial.calls[0]
    tied = library.get_output_embeddings()
    shares = tied is not None and tied.weight is library.get_input_embeddings().weight
    return dataclasses.replace(
        config,
        num_layers=len(trial.calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        hidden_size=library.config.hidden_size,
        vocab_size=library.config.vocab_size,
        tie_embeddings=shares,
        windows=tuple(trial.calls[i].arguments.window for i in sorted(trial.calls)),
    )
