"""A model's configuration, from its config.json or GGUF header; its sampling defaults; fingerprints of its weights.

Families name the same field differently (`n_embd`, `hidden_size`); `ModelConfig` has one name for each. Fields of a
single family stay in `raw`, for its model file to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from quire.config import EngineConfig
from quire.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    QuireError,
    UnsupportedModelError,
    ValidationError,
)
from quire.loading.bundle import locate
from quire.loading.class_head import ClassHeadConfig, architecture_of, class_head_of, with_token_ids
from quire.loading.config_fields import DTYPES, check_fields
from quire.loading.files import ModelFiles, read_json
from quire.messages.sampling import FROM_GENERATION_CONFIG, SamplingParams


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
    """rope_type, rope_theta and the fields of the scaling, flat; empty with learned positions or ALiBi."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None: full attention."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    window_rope: Mapping[str, Any] | None = None
    """The rope of layers with a window, if it differs from that of the others."""
    class_head: ClassHeadConfig | None = None
    """What a classifier's head answers; None: the model generates."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face config.json."""
        architectures = raw.get("architectures") or []
        if not architectures:
            raise UnsupportedModelError(
                f"the model's config names no architecture (model_type {raw.get('model_type')!r}); "
                "config.json needs an 'architectures' list"
            )
        architecture = architecture_of(architectures[0], raw)
        raw = _text_part(raw)
        raw = {**_FAMILY_DEFAULTS.get(raw.get("model_type", ""), {}), **raw}
        if raw.get("model_type") in ("gemma4_text", "gemma4_unified_text"):
            raw |= _gemma4(raw)
        if raw.get("model_type") in _WITHOUT_ATTENTION:
            raise UnsupportedModelError(
                f"{architecture} (model_type {raw['model_type']!r}) is not implemented: of models without attention "
                "only Mamba 2 is"
            )
        hidden = positive_integer(raw, "hidden_size", "n_embd", "n_embed")
        layers = positive_integer(raw, "num_hidden_layers", "n_layer")
        heads = positive_integer(raw, "num_attention_heads", "n_head")
        kv_heads = _kv_heads(raw) or heads
        head_dim = raw.get("head_dim") or raw.get("qk_rope_head_dim") or hidden // heads  # latent attention: rotary
        if heads % kv_heads:
            raise ValidationError(
                f"{heads} attention heads cannot share {kv_heads} KV heads", "num_key_value_heads", kv_heads
            )
        eos = raw.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=positive_integer(raw, "vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_first(raw, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden,
            max_position=positive_integer(raw, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
            norm_eps=float(_first(raw, *_NORM_EPS, default=1e-5)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", _TIED_BY_DEFAULT.get(raw.get("model_type", ""), False))),
            dtype=_dtype_name(raw.get("dtype") or raw.get("torch_dtype")),
            rope=_rope(raw, "full_attention"),
            window_rope=_rope(raw, "sliding_attention") if _has_rope_by_kind(raw) else None,
            windows=_windows(raw, layers),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
            raw=raw,
            class_head=class_head_of(architecture, raw),
        )


_GEMMA4: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}
_WITHOUT_ATTENTION = frozenset({"mamba", "falcon_mamba", "rwkv", "xlstm"})
# A config.json omits values that equal its family's defaults.
_TIED_BY_DEFAULT = {"gpt2": True}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"tie_word_embeddings": True, "max_position_embeddings": 2048},
    "cohere": {"tie_word_embeddings": True, "rope_theta": 500000.0, "logit_scale": 0.0625},
    "cohere2": {"tie_word_embeddings": True, "logit_scale": 0.0625, "sliding_window": 4096},
    "deepseek_v2": {"rms_norm_eps": 1e-6, "n_shared_experts": 2},
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "falcon": {"tie_word_embeddings": True, "max_position_embeddings": 2048},
    "gemma2": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {
        **_GEMMA4,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "glm": {"rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True},
    "glm4": {"rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True},
    "glm4_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8},
    "granite": {"rms_norm_eps": 1e-6},
    "granitemoe": {"rms_norm_eps": 1e-6},
    "granitemoehybrid": {"rms_norm_eps": 1e-6},
    "granitemoeshared": {"rms_norm_eps": 1e-6},
    "jamba": {"rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "num_experts": 16, "num_experts_per_tok": 2},
    "lfm2": {"tie_word_embeddings": True, "rope_theta": 1000000.0, "max_position_embeddings": 128000},
    "lfm2_moe": {"tie_word_embeddings": True, "rope_theta": 1000000.0, "max_position_embeddings": 128000},
    "minimax_m2": {"rope_theta": 5000000.0, "rms_norm_eps": 1e-6},
    "olmo3": {"rope_theta": 500000.0, "sliding_window": 4096},
    "opt": {"tie_word_embeddings": True, "max_position_embeddings": 2048},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2000000.0, "rms_norm_eps": 1e-6},
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {"tie_word_embeddings": True},
}
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_WINDOWED = frozenset(
    {
        "cohere2",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt_oss",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo3",
        "phi3",
        "smollm3",
        "starcoder2",
    }
)
# One layer of so many has no window, the last of them.
_WINDOW_PATTERN_BY_DEFAULT = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
_WINDOW_BY_DEFAULT = {"gpt_oss": 128, "mistral": 4096}
_QUARTER_ROTARY = ("gpt_neox", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_HALF_ROTARY = ("bamba", "glm", "glm4", "glm4_moe")
_ROTARY_PART_BY_DEFAULT = dict.fromkeys(_QUARTER_ROTARY, 0.25) | dict.fromkeys(_HALF_ROTARY, 0.5)
_FULL_LAYERS_BY_DEFAULT = 28
_INTERLEAVED_MROPE = {
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10)),
}
"""Families whose pairs of rotated dimensions are dealt in turn to three positions; and how many each has if unsaid."""
_UNROTATED = frozenset({"bloom", "gpt2", "opt"})
_LAYER_KINDS = ("full_attention", "sliding_attention")


_IMPLIED = {
    # No attention: any number of heads will do. Positions are not limited; this bounds tables.
    "mamba2": {"num_attention_heads": 1, "max_position_embeddings": 1 << 17},
}
"""Fields that a family's config has no need of, and `ModelConfig` has."""


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: files of models that also take images have it as `text_config`. Fields that
    follow from others are added."""
    raw = {**_IMPLIED.get(raw.get("model_type", ""), {}), **raw}
    blocks = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if raw.get("num_hidden_layers") is None and blocks:
        raw["num_hidden_layers"] = len(blocks)
    if "tie_embedding" in raw:  # LFM2
        raw["tie_word_embeddings"] = raw["tie_embedding"]
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    kept = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
    return {**raw, **text, **{key: raw[key] for key in kept if raw.get(key) is not None}}


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
    name = None if value is None else str(value).removeprefix("torch.")
    return name if name is None else DTYPES.get(name, name)


def _kv_heads(raw: Mapping[str, Any]) -> int | None:
    if raw.get("model_type") == "falcon":
        if raw.get("multi_query", True) and not raw.get("new_decoder_architecture"):
            return 1
        return raw.get("num_kv_heads")
    return raw.get("num_key_value_heads")


def _has_rope_by_kind(raw: Mapping[str, Any]) -> bool:
    """Whether layers with and without a window rotate differently."""
    given = raw.get("rope_parameters") or {}
    # OLMo 3's files of before `rope_parameters` scale only the layers without a window; Gemma 3's have two bases.
    return any(kind in given for kind in _LAYER_KINDS) or (
        raw.get("model_type") == "gemma3_text"
        or (raw.get("model_type") == "olmo3" and raw.get("rope_scaling") is not None)
    )


def _rope(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rope of layers of this kind.

    Old files have `rope_theta` and `rope_scaling`, new ones a single `rope_parameters`, which may be by layer kind.
    """
    family = raw.get("model_type", "")
    if family in _UNROTATED:
        return {}
    found = raw.get("rope_parameters")
    if found and any(each in found for each in _LAYER_KINDS):
        found = found.get(kind)
    elif family == "gemma3_text" and kind == "sliding_attention":
        found = {"rope_theta": raw["rope_local_base_freq"]}
    elif not found and not (family == "olmo3" and kind == "sliding_attention"):
        found = raw.get("rope_scaling")
    given = dict(found or {})
    given["rope_type"] = given.pop("type", None) or given.get("rope_type") or "default"
    if family in _INTERLEAVED_MROPE:
        given = {"mrope_section": _INTERLEAVED_MROPE[family]} | given | {"mrope_interleaved": True}
    if family == "phi3" and given["rope_type"] in ("su", "yarn"):  # early names of the same
        given["rope_type"] = "longrope"
    given.setdefault("rope_theta", _first(raw, "rope_theta", "rotary_emb_base", default=10000.0))
    part = _ROTARY_PART_BY_DEFAULT.get(family, 1.0)
    if family == "minimax_m2" and raw.get("rotary_dim"):
        part = raw["rotary_dim"] / raw["head_dim"]
    given.setdefault("partial_rotary_factor", _first(raw, "partial_rotary_factor", "rotary_pct", default=part))
    return given


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that may be null. One layer of six has no window if the file does not say; the last never has one."""
    layers = positive_integer(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or [_LAYER_KINDS[(layer + 1) % 6 != 0] for layer in range(layers)]
    if len(kinds) != layers:
        raise ValidationError(
            f"the model's config has {len(kinds)} layer_types and {layers} layers", "layer_types", len(kinds)
        )
    return {
        "layer_types": [*kinds[:-1], "full_attention"],
        "rope_parameters": raw["rope_parameters"] or _GEMMA4["rope_parameters"],
    }


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    family = raw.get("model_type", "")
    window = raw.get("sliding_window", _WINDOW_BY_DEFAULT.get(family))
    if window is None or not raw.get("use_sliding_window", family in _WINDOWED):
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family == "smollm3":  # the layers without rotation
        raise UnsupportedModelError("SmolLM3 with use_sliding_window and without layer_types is not implemented")
    if (pattern := raw.get("sliding_window_pattern", _WINDOW_PATTERN_BY_DEFAULT.get(family))) is not None:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    border = raw.get("max_window_layers", _FULL_LAYERS_BY_DEFAULT)
    if family == "qwen2_moe":  # every other layer below the border; other Qwen models: all layers from the border on
        return tuple(window if layer % 2 == 0 and layer < border else None for layer in range(layers))
    first = border if "use_sliding_window" in raw and family != "qwen3_moe" else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def read_model_config(files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's configuration. `hf_overrides` replaces fields of config.json first."""
    raw = {**read_raw_config(files), **(hf_overrides or {})}
    _check_limits(files, raw)
    check_fields(raw, files.path)
    raw = with_token_ids(files, raw)
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


def read_generation_config(files: ModelFiles, config: EngineConfig) -> dict[str, Any]:
    """The author's sampling defaults (generation_config.json), unless disabled, under those that override them."""
    where, name = config.generation_config, "generation_config.json"
    path = files.file(name) if where == "auto" else None if where in ("none", "vllm") else Path(where) / name
    if where != "auto" and path is not None and not path.is_file():
        raise ConfigError(
            f"generation_config must be auto, none, vllm, or a folder with {name}; got {where!r}",
            "generation_config",
            where,
        )
    return {**({} if path is None else read_json(path)), **_overrides(config.override_generation_config)}


def _overrides(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`override_generation_config`; raises for a key or value that is no sampling default."""
    if given is None:
        return {}
    name, known = "override_generation_config", (*FROM_GENERATION_CONFIG, "max_new_tokens", "eos_token_id")
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must map sampling parameters to values, got {given!r}", name, given)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"{name} takes {', '.join(known)}; got {unknown[0]!r}", name, given)
    fields = {key: value for key, value in given.items() if key in FROM_GENERATION_CONFIG}
    try:
        SamplingParams(**fields, max_tokens=given.get("max_new_tokens"))
    except ValidationError as error:
        raise ConfigError(f"{name}: {error}", name, given) from None
    return given


def weights_fingerprint(files: ModelFiles, model: ModelConfig, load_format: str, seed: int) -> bytes:
    """Identifies weights by configuration and each file's name, size and modification time; dummy weights by seed."""
    parts: list[object] = [json.dumps(dict(model.raw), sort_keys=True, default=str)]
    kind = files.kind if load_format == "auto" else load_format
    if kind in (None, "dummy"):
        parts += ["dummy", seed]
    else:
        for path in files.weight_files(kind):
            stored = locate(path)
            parts.append((path.name, stored.size, stored.mtime_ns))
    return blake3(repr(parts).encode()).digest()


def tokens_fingerprint(model: ModelConfig) -> bytes:
    """Identifies the model whose token ids these are, by its configuration: a session continues only with the same."""
    return blake3(f"{model.architecture} {model.vocab_size} {model.hidden_size} {model.num_layers}".encode()).digest()
