"""Engine flags, generated from the fields of `EngineConfig`, and flags that all commands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire import vllm_arguments
from quire.api import compat
from quire.cli.values import as_log_level, counts_by_name, json_object, size, size_or_auto
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.vllm_arguments import (
    CLASSIFIERS,
    GRAMMARS,
    OVERRIDES,
    POOLER,
    RENAMED,
    SPECULATION,
    VALUES,
    ForeignArgument,
    check_argument,
)

SIZES = {
    "max_model_len": size_or_auto, "max_num_batched_tokens": size, "kv_cache_memory_bytes": size,
    "max_image_bytes": size, "max_decode_bytes": size,
}  # fmt: skip
"""Fields that take suffixes: 4K, 2G."""
LOG_LEVELS = ("debug", "info", "warning", "error")
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "speculative_config": "-sc",
    "api_server_count": "-asc",
}
"""Short flags, as in vLLM."""


def flag(name: str) -> str:
    """--max-model-len for max_model_len."""
    return "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model as a positional argument."""
    parser.add_argument(
        "named_model",
        nargs="?",
        metavar="MODEL",
        help=f"Hub id, folder, .gguf file, bundle or alias (default: {EngineConfig.model})",
    )


def add_engine_flags(parser: argparse.ArgumentParser, only: Collection[str] = (), remembers: bool = True) -> None:
    """A flag for each field of `EngineConfig`, or for those in `only`. `remembers`: the result says which of vLLM's
    flags had no effect."""
    add_config_flags(parser, EngineConfig, "engine: ", SIZES, only)
    if not only:
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        for name in (*POOLER, GRAMMARS, "rope_scaling"):
            parser.add_argument(flag(name), dest=name, type=json_object, **hidden)
        for name in CLASSIFIERS:
            parser.add_argument(flag(name), dest=name, **hidden)
        add_foreign_flags(parser, vllm_arguments.ENGINE, remembers)
        for name in SPECULATION:
            parser.add_argument(flag(name), dest=name, type=int if name == "spec_tokens" else str, **hidden)
        for name in (*RENAMED, "rope_theta"):
            kind: dict[str, Any] = {"nargs": "+"} if name == "allowed_media_domains" else {"type": float}
            parser.add_argument(flag(name), dest=name, **kind, **hidden)


def add_config_flags(
    parser: argparse.ArgumentParser,
    config: type,
    prefix: str,
    sizes: Mapping[str, Callable[[str], Any]],
    only: Collection[str] = (),
) -> None:
    """A flag for each field of a configuration, in the fields' groups; `sizes` are those that take 4K or 2G."""
    types = typing.get_type_hints(config)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if only and field.name not in only:
            continue
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(prefix + group)
        short = [SHORT[field.name]] if field.name in SHORT else []
        groups[group].add_argument(*short, flag(field.name), **_argument_options(field, types[field.name], sizes))


def add_foreign_flags(
    parser: argparse.ArgumentParser, table: Mapping[str, ForeignArgument], remembers: bool = True
) -> None:
    """vLLM's flags that quire lacks: hidden; accepted with a value that has no effect, otherwise refused by name."""
    known = parser._option_string_actions
    for name, argument in table.items():
        if flag(name) in known or name == "disable_log_requests":  # the command has it, or its opposite
            continue
        names = [flag(name)]
        if argument.kind == "switch":
            names.append(flag(f"no_{name}"))
        if argument.short and argument.short not in known:
            names.append(argument.short)
        counts: dict[str, int | str] = {"switch": 0, "list": "+"}
        parser.add_argument(
            *names,
            dest=name,
            action=_Foreign,
            argument=argument,
            remembers=remembers,
            nargs=counts.get(argument.kind),
            help=argparse.SUPPRESS,
        )


class _Foreign(argparse.Action):
    """Checks a value and drops it; if it `remembers`, the namespace gets the flags that had no effect."""

    def __init__(
        self, option_strings: list[str], dest: str, argument: ForeignArgument, remembers: bool, **options: Any
    ) -> None:
        super().__init__(option_strings, dest, **{**options, "default": argparse.SUPPRESS})
        self._argument = argument
        self._remembers = remembers

    def __call__(self, parser: Any, namespace: Any, text: Any, option: str | None = None) -> None:
        try:
            check_argument(self._argument, self._value(text, option or ""), ConfigError)
        except ConfigError as error:
            raise argparse.ArgumentError(None, f"{option}: {error}") from None
        if self._remembers:
            namespace.without_effect = [*getattr(namespace, "without_effect", []), flag(self.dest)]

    def _value(self, text: Any, option: str) -> Any:
        match self._argument.kind:
            case "switch":
                return not option.startswith("--no-")
            case "list":
                values = [_plain(each) for each in text]
                return values[0] if len(values) == 1 and isinstance(values[0], list) else values
        return _plain(text)


def _plain(text: str) -> Any:
    """None, JSON, or the word itself."""
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def _argument_options(
    field: dataclasses.Field[Any], kind: Any, sizes: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Arguments of `add_argument` for a field. Flags not given are absent: the config has the defaults."""
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kinds = typing.get_args(kind) or (kind,)
    extra = ""
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif field.metadata.get("many"):
        options |= {"action": "extend", "nargs": "+", "metavar": "NAME"}
        extra = "; may be given several times"
    elif field.metadata.get("choices"):
        options["choices"] = field.metadata["choices"]
        if theirs := VALUES.get(field.name):
            options["type"] = lambda text: theirs.get(text, text)
    elif field.name in sizes:
        options |= {"type": sizes[field.name], "metavar": "SIZE"}
    elif int in kinds:
        options |= {"type": int, "metavar": "N"}
    elif float in kinds:
        options |= {"type": float, "metavar": "X"}
    elif any(typing.get_origin(each) is not None and issubclass(typing.get_origin(each), Mapping) for each in kinds):
        reader = counts_by_name if field.name == "limit_mm_per_prompt" else json_object
        options |= {"type": reader, "metavar": "JSON"}
    else:
        options["metavar"] = "NAME"
    options["help"] = (field.metadata["help"] + extra + default_note(field.default)).replace("%", "%%")
    return options


def default_note(value: Any) -> str:
    """The default value in a help text."""
    if value is None or value == ():
        return ""
    shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    return f" (default: {shown})"


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields given on the command line, as keywords for `LLM` or `EngineConfig`."""
    names = [
        *(field.name for field in dataclasses.fields(EngineConfig)),
        *SPECULATION,
        *RENAMED,
        *OVERRIDES,
        *POOLER,
        *CLASSIFIERS,
        GRAMMARS,
    ]
    settings = compat.translate({name: getattr(args, name) for name in names if hasattr(args, name)})
    named = getattr(args, "named_model", None)
    if named is not None:
        if settings.get("model", named) != named:
            args.parser.error(f"two models are given: {named} and --model {settings['model']}")
        settings["model"] = named
    return settings


def add_common(parser: argparse.ArgumentParser, log_level: str = "warning", always_set: bool = True) -> None:
    """Flags of every command. Unless `always_set`, --log-level is absent from the result if not given."""
    group = parser.add_argument_group("reporting")
    group.add_argument(
        "--log-level",
        type=as_log_level,
        choices=LOG_LEVELS,
        default=log_level if always_set else argparse.SUPPRESS,
        help=f"log level on stderr; debug logs every step (default: {log_level})",
    )
    group.add_argument("--debug", action="store_true", help="show a traceback on errors")
