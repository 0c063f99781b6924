"""A model's configuration, from its config.json or GGUF header; its sampling defaults; fingerprints of its weights.

Families name the same field differently (`n_embd`, `hidden_size`); `ModelConfig` has one name for each. Fields of a
single family stay in `raw`, for its model file to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from quire.errors import CheckpointError, ModelNotFoundError, QuireError, UnsupportedModelError, ValidationError
from quire.loading.files import ModelFiles, read_json


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions and settings of a model that the engine and the model files need."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    dtype: str | None
    """The checkpoint's dtype, if it names one."""
    rope: Mapping[str, Any]
    """rope_type, rope_theta and the fields of the scaling, flat; empty with learned positions."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None: full attention."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face config.json."""
        architectures = raw.get("architectures") or []
        if not architectures:
            raise UnsupportedModelError(
                f"the model's config names no architecture (model_type {raw.get('model_type')!r}); "
                "config.json needs an 'architectures' list"
            )
        hidden = positive_integer(raw, "hidden_size", "n_embd")
        layers = positive_integer(raw, "num_hidden_layers", "n_layer")
        heads = positive_integer(raw, "num_attention_heads", "n_head")
        kv_heads = raw.get("num_key_value_heads") or heads
        head_dim = raw.get("head_dim") or hidden // heads
        if heads % kv_heads:
            raise ValidationError(
                f"{heads} attention heads cannot share {kv_heads} KV heads", "num_key_value_heads", kv_heads
            )
        eos = raw.get("eos_token_id")
        return cls(
            architecture=architectures[0],
            vocab_size=positive_integer(raw, "vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=raw.get("intermediate_size") or raw.get("n_inner") or 4 * hidden,
            max_position=positive_integer(raw, "max_position_embeddings", "n_positions", "n_ctx"),
            norm_eps=float(_first(raw, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-5)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", _TIED_BY_DEFAULT.get(raw.get("model_type", ""), False))),
            dtype=_dtype_name(raw.get("dtype") or raw.get("torch_dtype")),
            rope=_rope(raw),
            windows=_windows(raw, layers),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
            raw=raw,
        )


# A config.json omits values that equal its family's defaults.
_TIED_BY_DEFAULT = {"gpt2": True}
_WINDOWED = frozenset({"mistral", "mixtral"})
_WINDOW_BY_DEFAULT = {"mistral": 4096}
_ROTARY_PART_BY_DEFAULT = {"gpt_neox": 0.25}
_FULL_LAYERS_BY_DEFAULT = 28
_LEARNED_POSITIONS = frozenset({"gpt2"})


def _first(raw: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), default)


def positive_integer(raw: Mapping[str, Any], *names: str) -> int:
    """A field of a config, under the first of its names that is present."""
    value = _first(raw, *names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValidationError(
            f"the model's config has {names[0]} = {value!r}; a positive integer is needed", names[0], value
        )
    return value


def _dtype_name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Old files have `rope_theta` and `rope_scaling`, new ones a single `rope_parameters`."""
    family = raw.get("model_type", "")
    if family in _LEARNED_POSITIONS:
        return {}
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    given["rope_type"] = given.pop("type", None) or given.get("rope_type") or "default"
    given.setdefault("rope_theta", _first(raw, "rope_theta", "rotary_emb_base", default=10000.0))
    part = _ROTARY_PART_BY_DEFAULT.get(family, 1.0)
    given.setdefault("partial_rotary_factor", _first(raw, "partial_rotary_factor", "rotary_pct", default=part))
    return given


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    family = raw.get("model_type", "")
    window = raw.get("sliding_window", _WINDOW_BY_DEFAULT.get(family))
    if window is None or not raw.get("use_sliding_window", family in _WINDOWED):
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    border = raw.get("max_window_layers", _FULL_LAYERS_BY_DEFAULT)
    if family == "qwen2_moe":  # every other layer below the border; other Qwen models: all layers from the border on
        return tuple(window if layer % 2 == 0 and layer < border else None for layer in range(layers))
    first = border if "use_sliding_window" in raw and family != "qwen3_moe" else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def read_model_config(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's configuration. `hf_overrides` replaces fields of config.json first."""
    raw = {**read_raw_config(files), **(hf_overrides or {})}
    _check_limits(files, raw)
    try:
        try:
            return ModelConfig.from_dict(raw)
        except ValidationError:
            if files.gguf is not None or (complete := _with_defaults(raw)) is None:
                raise
            return ModelConfig.from_dict(complete)
    except QuireError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the config of {files.path} has a value of the wrong type: {error}") from error


def _with_defaults(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config with the values that its family has by default, under common names; None for a family that
    transformers does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if (family := str(raw.get("model_type"))) not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[family].from_dict(dict(raw))
    except Exception:  # whatever the family's own checks raise: the caller has a message
        return None
    named = {name: value for name in _LIMITS if (value := getattr(config, name, None)) is not None}
    return {**raw, **config.to_dict(), **named, "architectures": raw.get("architectures")}


# Far above any real model, far below sizes that would exhaust memory before weights are read.
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"), 1 << 24),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 1 << 30),
}


def _check_limits(files: ModelFiles, raw: Mapping[str, Any]) -> None:
    for key, limit in _LIMITS.items():
        if isinstance(value := raw.get(key), int) and value > limit:
            raise CheckpointError(f"the config of {files.path} has {key} = {value:,}; the limit is {limit:,}")


def read_raw_config(files: ModelFiles) -> dict[str, Any]:
    """The fields of config.json, or the same fields from the GGUF header."""
    if files.gguf is not None:
        # Even if there is a config.json: in repositories of GGUF files it is often a stub.
        from quire.loading.gguf_config import config_from_gguf
        from quire.loading.gguf_header import read_header

        return config_from_gguf(read_header(files.gguf))
    if (path := files.file("config.json")) is not None:
        return read_json(path)
    raise ModelNotFoundError(f"{files.path} has no config.json, which is needed to tell what model it is")


def checkpoint_kv_dtype(files: ModelFiles, model: ModelConfig) -> str | None:
    """The KV cache that a quantized checkpoint asks for: fp8, or None if it does not say.

    compressed-tensors and new ModelOpt files have a `kv_cache_scheme`, older ModelOpt ones a `kv_cache_quant_algo`, in
    config.json or in a file of their own.
    """
    described: list[Any] = [model.raw.get("quantization_config")]
    path = files.file("hf_quant_config.json") if files.gguf is None else None
    if path is not None:
        described.append(read_json(path).get("quantization"))
    for found in described:
        if not isinstance(found, Mapping):
            continue
        within = found.get("quantization")
        algorithm = found.get("kv_cache_quant_algo") or (
            isinstance(within, Mapping) and within.get("kv_cache_quant_algo")
        )
        scheme = found.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme:
            algorithm = "FP8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else scheme
        if not algorithm:
            continue
        if algorithm != "FP8":
            raise CheckpointError(
                f"{files.path} asks for a KV cache in {algorithm}, and of such checkpoints only 8-bit floats are "
                "supported; set kv_cache_dtype to run it with another cache"
            )
        return "fp8"
    return None


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The author's sampling defaults (generation_config.json); empty if there is none."""
    path = files.file("generation_config.json")
    return {} if path is None else read_json(path)


def weights_fingerprint(files: ModelFiles, model: ModelConfig, load_format: str, seed: int) -> bytes:
    """Identifies weights by configuration and each file's name, size and modification time; dummy weights by seed."""
    parts: list[object] = [json.dumps(dict(model.raw), sort_keys=True, default=str)]
    kind = files.kind if load_format == "auto" else load_format
    if kind in (None, "dummy"):
        parts += ["dummy", seed]
    else:
        for path in files.weight_files(kind):
            state = path.stat()
            parts.append((path.name, state.st_size, state.st_mtime_ns))
    return blake3(repr(parts).encode()).digest()


def tokens_fingerprint(model: ModelConfig) -> bytes:
    """Identifies the model whose token ids these are, by its configuration: a session continues only with the same."""
    return blake3(f"{model.architecture} {model.vocab_size} {model.hidden_size} {model.num_layers}".encode()).digest()
