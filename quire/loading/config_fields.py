"""Checks the fields of a model's config that change what is computed, before anything else reads them.

A value that means nothing must be refused by its name: taken as "not given" it would give wrong text in silence, and
the tokenizer's own reader of the config would be blamed for what it does not understand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import CheckpointError

DTYPES: Mapping[str, str | None] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
    "float64": "float64",
    "double": "float64",
    "auto": None,
}
"""Names of dtypes in configs, and what they are here; None: the config leaves it open."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_integer(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value in (0, 1)


def _is_token(value: Any) -> bool:
    return all(map(_is_integer, value)) if isinstance(value, list) else _is_integer(value)


Check = tuple[Callable[[Any], bool], str]
_POSITIVE: Check = (_is_positive, "a positive integer")
_COUNT: Check = (_is_count, "an integer, 0 or more")
_ABOVE_ZERO: Check = (lambda value: _is_number(value) and value > 0, "a finite number above 0")
_NOT_NEGATIVE: Check = (lambda value: _is_number(value) and value >= 0, "a finite number, 0 or more")
_NUMBER: Check = (_is_number, "a finite number")
_SHARE: Check = (lambda value: _is_number(value) and 0 < value <= 1, "above 0, and 1 at most")
_FLAG: Check = (_is_flag, "true or false")
_TEXT: Check = (lambda value: isinstance(value, str) and bool(value), "a name")
_TOKEN: Check = (_is_token, "a token id, or a list of them")
_OBJECT: Check = (lambda value: isinstance(value, Mapping), "an object")
_NAMES: Check = (
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "a list of names",
)
_NUMBERS: Check = (
    lambda value: isinstance(value, list) and all(_is_number(each) and each > 0 for each in value),
    "a list of numbers above 0",
)
_SIZES: Check = (
    lambda value: _is_positive(value) or (isinstance(value, list) and bool(value) and all(map(_is_positive, value))),
    "a positive integer, or one for each layer,",
)
_DTYPE: Check = (
    lambda value: isinstance(value, str) and value.removeprefix("torch.") in DTYPES,
    f"one of {', '.join(DTYPES)}",
)

FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_inner", "sliding_window_pattern"), _POSITIVE),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _COUNT),
    "global_head_dim": _POSITIVE,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), _SIZES),
    **dict.fromkeys(("head_dim", "sliding_window", "max_window_layers", "num_experts_per_tok"), _COUNT),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "first_k_dense_replace", "n_shared_experts"), _COUNT),
    "num_kv_shared_layers": _COUNT,
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "query_pre_attn_scalar"), _ABOVE_ZERO),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"), _ABOVE_ZERO),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _NOT_NEGATIVE),
    **dict.fromkeys(("norm_epsilon", "norm_eps"), _NOT_NEGATIVE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logit_scale"), _NUMBER),
    "routed_scaling_factor": _NUMBER,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "use_parallel_residual", "use_bias"), _FLAG),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"), _TEXT),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), _TOKEN),
    **dict.fromkeys(("quantization_config", "compression_config", "rope_scaling", "rope_parameters"), _OBJECT),
    "layer_types": _NAMES,
}
"""Fields of every family, under all their names. None always means: not given."""

ROPE_FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"), _ABOVE_ZERO),
    **dict.fromkeys(("beta_fast", "beta_slow"), _ABOVE_ZERO),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NUMBER),
    "original_max_position_embeddings": _POSITIVE,
    "partial_rotary_factor": _SHARE,
    **dict.fromkeys(("short_factor", "long_factor"), _NUMBERS),
}
"""Fields of `rope_parameters` and `rope_scaling`."""


def check_fields(raw: Mapping[str, Any], source: object) -> None:
    """Raise if a field has a value that means nothing. `raw`: config.json, with the part for text if it has one."""
    for part, prefix in ((raw, ""), (raw.get("text_config"), "text_config.")):
        if isinstance(part, Mapping):
            _check(part, FIELDS, prefix, source)
            for name in ("rope_parameters", "rope_scaling"):
                _check_rope(part.get(name) or {}, f"{prefix}{name}.", source)
            _check_together(part, prefix, source)


def _check(values: Mapping[str, Any], fields: Mapping[str, Check], prefix: str, source: object) -> None:
    for name, (is_valid, needed) in fields.items():
        value = values.get(name)
        if value is not None and not is_valid(value):
            raise _wrong(source, prefix + name, value, f"{needed} is needed")


def _check_rope(rope: Mapping[str, Any], prefix: str, source: object) -> None:
    _check(rope, ROPE_FIELDS, prefix, source)
    for kind, inner in rope.items():  # by kind of layer
        if isinstance(inner, Mapping):
            _check(inner, ROPE_FIELDS, f"{prefix}{kind}.", source)


def _check_together(raw: Mapping[str, Any], prefix: str, source: object) -> None:
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if kinds is not None and _is_integer(layers) and len(kinds) != layers:
        raise _wrong(source, f"{prefix}layer_types", kinds, f"{len(kinds)} kinds for {layers} layers")
    if raw.get("head_dim") == 0 and raw.get("qk_rope_head_dim") is None:  # latent attention has other sizes
        raise _wrong(source, f"{prefix}head_dim", 0, "a positive integer is needed")
    if raw.get("sliding_window") == 0 and raw.get("use_sliding_window") is not False:
        raise _wrong(source, f"{prefix}sliding_window", 0, "a positive integer is needed; null means no window")
    rope = raw.get("rope_parameters")
    if not rope or any(isinstance(inner, Mapping) for inner in rope.values()):
        return
    base = raw.get("rope_theta")  # of the old form; the new one has its own
    if base is not None and rope.get("rope_theta") is not None and base != rope["rope_theta"]:
        raise _wrong(
            source,
            f"{prefix}rope_theta",
            base,
            f"rope_parameters.rope_theta is {rope['rope_theta']!r}: they must agree (override rope_parameters)",
        )
    old = raw.get("rope_scaling") or {}  # the same by its earlier name: one of them would have no effect
    old = {"rope_type": old.get("type", "default"), **old} if old else {}
    for name, value in old.items():
        if value != rope.get(name, "default" if name == "rope_type" else value):
            raise _wrong(
                source,
                f"{prefix}rope_scaling.{name}",
                value,
                f"rope_parameters.{name} is {rope.get(name)!r}: they must agree (override rope_parameters)",
            )


def _wrong(source: object, name: str, value: Any, why: str) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(
        f"the config of {source} has {name} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {why}"
    )
