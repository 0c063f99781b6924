"""argparse where `_` equals `-` in flag names, errors are one line, and a misspelt flag gets a suggestion.

A flag that takes a JSON object also takes its keys one by one: `--hf-overrides.rope_theta 1e6`. A boolean flag also
takes its value (`--enforce-eager=false`), and `--enable-x` and `--disable-x` are each other's opposite, as in vLLM.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quire.errors import QuireError

MAX_HELP_WIDTH = 110


class UsageError(QuireError):
    """The command line itself is wrong."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and has a wide column for flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(MAX_HELP_WIDTH, shutil.get_terminal_size().columns - 2))


class Parser(argparse.ArgumentParser):
    """The parser of `quire` and, through `add_subparsers`, of every command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **settings})

    def describe(self, run: Callable[[argparse.Namespace], int], what: str, examples: str, arguments: str = "") -> None:
        """Set the command's description, usage, examples and function."""
        self.usage = f"{self.prog} {arguments} [flags]" if arguments else f"{self.prog} [flags]"
        self.description = "{}\n\nexamples:\n{}".format(what, examples.strip("\n"))
        self.set_defaults(run=run, parser=self)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, with `_` in flags and with suggestions."""
        known, unknown = self.parse_known_args(_with_objects(with_dashes(arguments)))
        if unknown:
            parser: Parser = getattr(known, "parser", self)
            parser.error(f"unknown argument {unknown[0]}{parser._suggestion(unknown[0])}")
        return known

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # each command's parser gets its own
        """As argparse's, with vLLM's forms of boolean flags and lists."""
        return super().parse_known_args(None if args is None else self._plain_forms(args), namespace)

    def _plain_forms(self, arguments: Sequence[str]) -> list[str]:
        """Arguments with boolean flags as `--flag` or `--no-flag`, and lists in JSON attached to their flag."""
        plain: list[str] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                return [*plain, argument, *rest]
            name, equals, value = argument.partition("=")
            if name == "--help":
                plain.append(name)
            elif (positive := self._switch(name)) is None:
                takes_list = rest and rest[0].startswith("[") and not equals and self._takes_many(name)
                plain.append(f"{name}={rest.pop(0)}" if takes_list else argument)
            else:
                flag, is_on = positive
                if not equals and rest and rest[0].lower() in ("true", "false"):
                    equals, value = "=", rest.pop(0)
                if equals and value.lower() not in _TRUTH:
                    raise UsageError(f"{name} is on or off: give {name}=true or {name}=false, not {value!r}")
                is_on = is_on == _TRUTH.get(value.lower(), True)
                plain.append(flag if is_on else "--no-" + flag[2:])
        return plain

    def _switch(self, name: str) -> tuple[str, bool] | None:
        """For a boolean flag, its positive form and whether `name` is that; None for others."""
        known = self._option_string_actions
        if (action := known.get(name)) is not None:
            if f"--no-{name[2:]}" in known:
                return name, True
            if name.startswith("--no-") and "--" + name[5:] in action.option_strings:
                return "--" + name[5:], False
            return None
        if name.startswith("--no-"):
            inner = self._switch("--" + name[5:])
            return None if inner is None else (inner[0], not inner[1])
        for prefix, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
            if name.startswith(prefix) and f"--no-{other[2:]}{name[len(prefix) :]}" in known:
                return other + name[len(prefix) :], False
        return None

    def _takes_many(self, name: str) -> bool:
        action = self._option_string_actions.get(name)
        return action is not None and action.nargs == "+"

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`; `main` prints it."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _suggestion(self, flag: str) -> str:
        shown = [name for name, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        close = difflib.get_close_matches(flag.partition("=")[0], [name for name in shown if name[:2] == "--"], n=1)
        return f"; did you mean {close[0]}?" if close else ""


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """`--max_tokens=a_b` as `--max-tokens=a_b`; nothing changes after a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    changed = []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        name, dot, keys = name.partition(".")
        if name.startswith("--"):
            name = name.replace("_", "-")
        changed.append(name + dot + keys + equals + value)
    return changed + list(arguments[end:])


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_KEY_FLAG = re.compile(r"(--?[a-z][a-z0-9-]*)\.([a-z][\w.-]*)(\+?)(?:=(.*))?", re.DOTALL | re.IGNORECASE)


def _with_objects(arguments: Sequence[str]) -> list[str]:
    """Flags of single keys, `--flag.key value` or `--flag.key=value`, gathered into `--flag={"key": value}`. Keys may
    be nested (`--flag.key.inner 1`) and lists may grow (`--flag.key+ a`)."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments[:end])
    for argument in rest:
        if (match := _KEY_FLAG.fullmatch(argument)) is None:
            others.append(argument)
            continue
        flag, path, grows, text = match.groups()
        if text is None and (text := next(rest, None)) is None:
            raise UsageError(f"{argument} needs a value")
        *outer, key = path.replace("-", "_").split(".")
        into = objects.setdefault(flag, {})
        for name in outer:
            into = into.setdefault(name, {})
            if not isinstance(into, dict):
                raise UsageError(f"{argument}: {name} has a value already")
        into[key] = [*into.get(key, []), *text.split(",")] if grows else _json_or_text(text)
    for flag in objects:
        if any(argument.partition("=")[0] == flag for argument in others):
            raise UsageError(f"{flag} is given both as an object and by its keys ({flag}.{next(iter(objects[flag]))})")
    gathered = [part for flag, keys in objects.items() for part in _object(flag, keys)]
    return [*others, *gathered, *arguments[end:]]


def _object(flag: str, keys: dict[str, Any]) -> list[str]:
    """An object as arguments; short flags take no `=`."""
    text = json.dumps(keys)
    return [f"{flag}={text}"] if flag.startswith("--") else [flag, text]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
