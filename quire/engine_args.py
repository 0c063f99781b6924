"""vLLM's `EngineArgs` and `FlexibleArgumentParser`: an engine's settings from keywords or a script's command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from quire.api.compat import engine_arguments
from quire.cli.engine_flags import add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.config import EngineConfig

AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)


class EngineArgs(EngineConfig):
    """vLLM's name for `EngineConfig`. Also accepts vLLM's arguments that change nothing, as `LLM` does."""

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        super().__init__(model=os.fspath(model), **engine_arguments(settings))

    @staticmethod
    def add_cli_args(parser: AnyParser) -> AnyParser:
        """Give a script's parser a flag for each setting. Flags that are not given are absent from its result, so that
        `LLM(**vars(args))` has the defaults."""
        add_engine_flags(parser, remembers=False)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The settings of a parsed command line; what else it has is left out."""
        return cls(**engine_settings(args))


AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(Parser):
    """argparse with vLLM's forms of flags: `_` for `-`, `--flag.key value`, `--flag=false`."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's."""
        parsed = self.parse(sys.argv[1:] if args is None else args)
        return parsed if namespace is None else argparse.Namespace(**{**vars(namespace), **vars(parsed)})

    def error(self, message: str) -> NoReturn:
        """Print the usage and exit, as scripts expect."""
        argparse.ArgumentParser.error(self, message)
