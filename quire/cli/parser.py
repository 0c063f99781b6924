"""argparse where `_` equals `-` in flag names, errors are one line, and a misspelt flag gets a suggestion.

A flag that takes a JSON object also takes its keys one by one: `--hf-overrides.rope_theta 1e6`.
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
        if name.startswith("--"):
            name = name.replace("_", "-")
        changed.append(name + equals + value)
    return changed + list(arguments[end:])


_KEY_FLAG = re.compile(r"(--[a-z][a-z0-9-]*)\.([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


def _with_objects(arguments: Sequence[str]) -> list[str]:
    """Flags of single keys, `--flag.key value` or `--flag.key=value`, gathered into `--flag={"key": value}`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments[:end])
    for argument in rest:
        if (match := _KEY_FLAG.fullmatch(argument)) is None:
            others.append(argument)
            continue
        flag, key, text = match.groups()
        if text is None and (text := next(rest, None)) is None:
            raise UsageError(f"{argument} needs a value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        objects.setdefault(flag, {})[key.replace("-", "_")] = value
    for flag in objects:
        if any(argument.partition("=")[0] == flag for argument in others):
            raise UsageError(f"{flag} is given both as an object and by its keys ({flag}.{next(iter(objects[flag]))})")
    return [*others, *(f"{flag}={json.dumps(keys)}" for flag, keys in objects.items()), *arguments[end:]]
