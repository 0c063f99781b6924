"""Applies the table of vLLM's arguments: values that change nothing are accepted, all others refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from typing import Any

from quire.api import vllm_environment
from quire.config import EngineConfig
from quire.errors import ConfigError, UnknownSettingError
from quire.vllm_arguments import (
    CALL,
    CLASSIFIERS,
    ENGINE,
    GRAMMARS,
    METHODS,
    OVERRIDES,
    POOLER,
    RENAMED,
    SPECULATION,
    VALUES,
    check_argument,
)

logger = logging.getLogger(__name__)


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `EngineConfig` for arguments of quire's or vLLM's `LLM(...)`: those of vLLM that have no effect here
    are dropped, those with another name are renamed, `VLLM_*` variables set what is not given; any other that is not an
    engine setting raises. None selects the default, except for settings with a None of their own."""
    settings = translate(arguments)
    for name in [name for name in settings if name in ENGINE]:
        check_argument(ENGINE[name], settings.pop(name), ConfigError)
    _refuse_unknown(settings)
    environment = vllm_environment.read(os.environ)
    environment.report(logger)
    given = {name: value for name, value in settings.items() if value is not None or _FIELDS[name]}
    return {**environment.of(EngineConfig), **given}


def translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with vLLM's names and values replaced by those of quire that mean the same."""
    settings = with_speculation(arguments)
    for theirs, ours in RENAMED.items():
        value = settings.pop(theirs, None)
        if value is not None and settings.setdefault(ours, value) != value:
            raise ConfigError(f"{theirs}={value!r} is {ours} here, which is {settings[ours]!r}", theirs, value)
    for name in POOLER:
        if (value := settings.pop(name, None)) is not None:
            settings |= _pooling(name, value)
    overrides = {name: value for name in OVERRIDES if (value := settings.pop(name, None))}
    classifies = [_classifies(name, settings.pop(name, None)) for name in CLASSIFIERS]
    if any(classifies):
        overrides["is_classifier"] = True
    if overrides and isinstance(given := settings.get("hf_overrides") or {}, Mapping):
        settings["hf_overrides"] = {**overrides, **given}
    if GRAMMARS in settings:
        check_argument(ENGINE[GRAMMARS], value := settings.pop(GRAMMARS), ConfigError)
        if value and value.get("disable_any_whitespace") is not None:
            settings.setdefault("disable_any_whitespace", value["disable_any_whitespace"])
    for name, values in VALUES.items():
        if isinstance(value := settings.get(name), str):
            settings[name] = values.get(value, value)
    return settings


def with_speculation(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with those of `SPECULATION` as keys of `speculative_config`."""
    keys = {SPECULATION[name]: value for name, value in arguments.items() if name in SPECULATION and value is not None}
    rest = {name: value for name, value in arguments.items() if name not in SPECULATION}
    if keys and isinstance(given := rest.get("speculative_config") or {}, Mapping):
        rest["speculative_config"] = {**keys, **given}
    return rest


def _classifies(name: str, value: Any) -> bool:
    """Whether vLLM's argument makes a classifier of the model."""
    neither, classifies = CLASSIFIERS[name]
    if value is None or value in neither or value in classifies:
        return value in classifies
    raise ConfigError(
        f"{name}={value!r} is not supported by quire: a model generates and embeds, or it classifies ({classifies[0]})",
        name,
        value,
    )


def _pooling(name: str, value: Any) -> dict[str, Any]:
    """The setting for vLLM's object that says how embeddings are pooled."""
    keys = dict(value) if isinstance(value, Mapping) else {"": value}
    settings = {}
    for key in ("pooling_type", "seq_pooling_type"):
        method = str(keys.get(key)).lower()
        if method in ("last", "mean"):
            settings["pooling"] = method
            del keys[key]
    for key in ("use_activation", "normalize"):
        if keys.get(key) is True:  # as embeddings are here unless a request says otherwise
            del keys[key]
    if keys.get("task") in ("embed", "classify"):  # what the model does, or each request is refused
        del keys["task"]
    for key, part in keys.items():
        if part is not None:
            shown = f"{name}.{key}" if key else name
            raise ConfigError(
                f"{shown}={part!r} is not supported by quire: embeddings are of the last token or the mean (pooling)",
                name,
                value,
            )
    return settings


def check_call(vllm_arguments: Mapping[str, Any], method: str) -> None:
    """Refuse arguments that would have an effect in vLLM; one that vLLM does not have either is a TypeError."""
    for name, value in vllm_arguments.items():
        if name not in CALL:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        check_argument(CALL[name], value)


def no_such_method(owner: object, name: str) -> AttributeError:
    """The error for an attribute that `owner` lacks; for vLLM's methods it says why."""
    why = f"; quire has no {name}: {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{why}")


_FIELDS = {field.name: "None" in str(field.type) for field in dataclasses.fields(EngineConfig)}
"""Engine settings, and whether None is one of their values."""


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/configuration.md lists them all"
            raise UnknownSettingError(f"there is no setting {name!r} (given {value!r}); {hint}", name, value)
