"""The settings of an adapter that PEFT wrote (adapter_config.json): what they mean, and which are refused."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import regex

from quire.errors import AdapterError, ValidationError, short_repr
from quire.messages.json_limits import JsonLimits, check_json

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_PATTERNS = 10_000
"""Entries of rank_pattern and of alpha_pattern. EVA writes one for each module."""
MAX_PATTERN_LENGTH = 1000
MATCH_SECONDS = 5.0
"""Time that all patterns of an adapter may take: they are regular expressions of a stranger."""
_LIMITS = JsonLimits(values=1 << 20, depth=16)
_TOKENS = 1 << 32
_Value = TypeVar("_Value", int, float)
_PLAIN = regex.compile(r"[\w.-]+")

_UNUSED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_cache",
    }
)
"""Settings that change nothing for a trained adapter: the tensors' names say which modules are adapted."""
_USED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "peft_type",
        "r",
        "rank_pattern",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)
_REFUSED = {
    "layer_replication": "the base model's layers would have to be repeated: merge the adapter into a model instead",
    "use_qalora": "QALoRA is not implemented",
    "use_bdlora": "block-diagonal LoRA is not implemented",
    "arrow_config": "Arrow routing among adapters is not implemented",
    "kasa_config": "KaSA is not implemented",
    "velora_config": "VeLoRA is not implemented",
    "monteclora_config": "MonteCLoRA is not implemented",
    "megatron_config": "adapters of Megatron's parallel layers are not implemented: convert it",
}
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class LoraSettings:
    """What of an adapter_config.json the computation depends on."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    """rank_pattern: a regular expression for the end of a module's name, and the rank there."""
    alphas: Mapping[str, float]
    dora: bool
    lora_bias: bool
    parameters: tuple[str, ...]
    """target_parameters: the ends of the names of parameters that are adapted without a module of their own."""
    tokens: Mapping[str, list[int]]
    """Tokens with rows of their own, by the end of the module's name; "" for any module."""
    invocation: list[int] | None
    base: str | None
    """The base model's name, as the adapter's author wrote it."""

    def digested(self) -> dict[str, object]:
        """What the digest of an adapter covers beside its tensors. The order of patterns matters."""
        names = ("rank", "alpha", "rslora", "dora", "lora_bias", "parameters", "tokens", "invocation")
        patterns = {"ranks": list(self.ranks.items()), "alphas": list(self.alphas.items())}
        return {name: getattr(self, name) for name in names} | patterns


class Scales:
    """The rank and the scale of each module. The first pattern that matches a module's name applies."""

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + MATCH_SECONDS
        self._ranks = [(_NamePattern(key, "rank_pattern"), value) for key, value in settings.ranks.items()]
        self._alphas = [(_NamePattern(key, "alpha_pattern"), value) for key, value in settings.alphas.items()]

    def rank(self, name: str) -> int:
        return self._first(self._ranks, name, self._settings.rank)

    def scale(self, name: str, rank: int) -> float:
        alpha = self._first(self._alphas, name, self._settings.alpha)
        return alpha / (math.sqrt(rank) if self._settings.rslora else rank)

    def _first(self, patterns: list[tuple[_NamePattern, _Value]], name: str, default: _Value) -> _Value:
        return next((value for pattern, value in patterns if pattern.matches(name, self._deadline)), default)


class _NamePattern:
    """A regular expression for a module's name, or for what follows a dot in it."""

    def __init__(self, key: str, setting: str) -> None:
        if len(key) > MAX_PATTERN_LENGTH:
            raise AdapterError(
                f"{CONFIG}: {setting} has a pattern of {len(key)} characters; at most {MAX_PATTERN_LENGTH} are read"
            )
        self._key, self._setting = key, setting
        self._pattern: regex.Pattern[str] | None = None
        self._tail = key.rpartition(".")[2] if _PLAIN.fullmatch(key) else ""
        """How a name must end if the key is a plain name: no expression is compiled for most."""

    def matches(self, name: str, deadline: float) -> bool:
        if self._tail and not name.endswith(self._tail):
            return False
        left = deadline - time.monotonic()
        try:
            if self._pattern is None:
                self._pattern = regex.compile(rf"(.*\.)?({self._key})$")
            if left > 0:
                return self._pattern.match(name, timeout=left) is not None
        except TimeoutError:
            pass
        except (regex.error, RecursionError, OverflowError) as error:
            what = f"{self._setting} has {short_repr(self._key)}: not a regular expression: {error}"
            raise AdapterError(f"{CONFIG}: {what}") from error
        raise AdapterError(
            f"{CONFIG}: {self._setting} takes more than {MATCH_SECONDS:g} s to match, at {short_repr(self._key)}: "
            "use plain module names"
        )


def read_settings(path: Path, data: bytes) -> LoraSettings:
    """The settings in `data`, the text of the file `path`."""
    config = _decode(path, data)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {short_repr(kind)}: only adapters of the type LORA can be served")
    _check_names(path, config)
    return _ConfigFields(path, config).settings()


def _decode(path: Path, data: bytes) -> dict[str, Any]:
    try:
        check_json(data, _LIMITS, "it")
        config = json.loads(data)
    except (ValueError, RecursionError, ValidationError) as error:
        raise AdapterError(f"{path}: not a usable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: expected a JSON object, got {short_repr(config)}")
    return config


def _check_names(path: Path, config: dict[str, Any]) -> None:
    for name, value in config.items():
        if name in _UNUSED or name in _USED or not value:
            continue
        if reason := _REFUSED.get(name):
            raise AdapterError(f"{path}: {name} is set: {reason}")
        raise AdapterError(
            f"{path}: the setting {short_repr(name)} ({short_repr(value)}) is not known, so it is not known what the "
            "adapter computes: remove it if it does not matter for inference"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights is {short_repr(start)}, which changes the weights of the base before training: "
            "the adapter does not fit the base as published. Save it with path_initial_model_for_weight_conversion"
        )


class _ConfigFields:
    """Reads the fields one by one, each with its type and range."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._config = config

    def settings(self) -> LoraSettings:
        if "r" not in self._config:
            raise self._error("r", "is missing")
        bias = self._config.get("bias", "none")
        if bias not in ("none", "all", "lora_only"):
            raise self._error("bias", f"is {short_repr(bias)}: expected none, all or lora_only")
        self._flag("fan_in_fan_out")  # The tensors have the same shape either way.
        base = self._config.get("base_model_name_or_path")
        return LoraSettings(
            rank=self._rank("r", self._config["r"]),
            alpha=self._number("lora_alpha", self._config.get("lora_alpha", 8)),
            rslora=self._flag("use_rslora"),
            ranks={key: self._rank("rank_pattern", value) for key, value in self._patterns("rank_pattern")},
            alphas={key: self._number("alpha_pattern", value) for key, value in self._patterns("alpha_pattern")},
            dora=self._flag("use_dora"),
            lora_bias=self._flag("lora_bias"),
            parameters=self._parameters(),
            tokens=self._token_rows(),
            invocation=self._invocation(),
            base=base if isinstance(base, str) else None,
        )

    def _error(self, name: str, problem: str) -> AdapterError:
        return AdapterError(f"{self._path}: {name} {problem}")

    def _flag(self, name: str) -> bool:
        value = self._config.get(name) or False
        if not isinstance(value, bool):
            raise self._error(name, f"is {short_repr(value)}: expected true or false")
        return value

    def _rank(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise self._error(name, f"has the rank {short_repr(value)}: expected a positive integer")
        return value

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e9:
            raise self._error(name, f"has the value {short_repr(value)}: expected a number of at most 1e9")
        return float(value)

    def _patterns(self, name: str) -> list[tuple[str, Any]]:
        patterns = self._config.get(name) or {}
        if not isinstance(patterns, dict):
            raise self._error(name, f"is {short_repr(patterns)}: expected an object of module names and values")
        if len(patterns) > MAX_PATTERNS:
            raise self._error(name, f"has {len(patterns)} entries; at most {MAX_PATTERNS} are read")
        return list(patterns.items())

    def _parameters(self) -> tuple[str, ...]:
        names = self._config.get("target_parameters") or []
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise self._error("target_parameters", f"is {short_repr(names)}: expected a list of parameter names")
        return tuple(sorted(names))

    def _token_rows(self) -> dict[str, list[int]]:
        name = "trainable_token_indices"
        given = self._config.get(name) or {}
        if isinstance(given, list):
            given = {"": given}
        if not isinstance(given, dict):
            raise self._error(name, f"is {short_repr(given)}: expected a list of tokens, or lists by module")
        rows = {module: self._tokens(name, tokens) for module, tokens in given.items()}
        for tokens in rows.values():
            if len(set(tokens)) != len(tokens):
                raise self._error(name, "names a token twice")
        return rows

    def _invocation(self) -> list[int] | None:
        name = "alora_invocation_tokens"
        return self._tokens(name, self._config[name]) if self._config.get(name) else None

    def _tokens(self, name: str, tokens: Any) -> list[int]:
        if not isinstance(tokens, Sequence) or not all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < _TOKENS for token in tokens
        ):
            raise self._error(name, f"has {short_repr(tokens)}: expected a list of token ids")
        return list(tokens)
