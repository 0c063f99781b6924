"""`quire serve`: serves a model with OpenAI's API; its configuration file and start banner."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import vllm_arguments
from quire.api import vllm_environment
from quire.cli.engine_flags import (
    LOG_LEVELS,
    add_common,
    add_config_flags,
    add_engine_flags,
    add_foreign_flags,
    add_model,
    engine_settings,
    flag,
)
from quire.cli.parser import Parser
from quire.cli.values import as_log_level, readable_bytes, size
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.config import ServerConfig

if TYPE_CHECKING:
    from quire.server.context import ServerContext

WHAT = """\
Serve a model over HTTP: OpenAI's API (chat, completions, embeddings, …), metrics, health.
Ctrl-C stops after running requests have finished."""
EXAMPLES = """
  quire serve                                         the default model on http://127.0.0.1:8000
  quire serve qwen3-0.6b --port 9000 --api-key secret
  quire serve --config server.yaml                    keys are flag names; the command line overrides
  quire serve --uds /run/quire.sock
"""
LOG_LEVEL = "info"
logger = logging.getLogger(__name__)
SIZES = dict.fromkeys(("max_queued_tokens", "max_body_bytes", "max_open_body_bytes", "max_header_bytes"), size)


def configure(parser: Parser) -> None:
    """The flags of `quire serve`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of flags")
    add_config_flags(parser, ServerConfig, "server: ", SIZES)
    add_engine_flags(parser)
    for theirs, ours in vllm_arguments.RENAMED_SERVER.items():
        parser.add_argument(flag(theirs), dest=ours, type=size, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    names = ("--disable-uvicorn-access-log", "--no-disable-uvicorn-access-log")
    parser.add_argument(*names, dest="access_log", action=_Opposite, nargs=0, help=argparse.SUPPRESS)
    add_foreign_flags(parser, vllm_arguments.SERVER)
    add_common(parser, LOG_LEVEL, always_set=False)


class _Opposite(argparse.Action):
    """A hidden switch that is the opposite of a setting."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **{**options, "default": argparse.SUPPRESS})

    def __call__(self, parser: Any, namespace: Any, text: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, (option or "").startswith("--no-"))


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    from quire.server.observability.logs import set_up
    from quire.server.serve import serve

    args = with_file(args, Path(args.config)) if hasattr(args, "config") else args
    environment = vllm_environment.read(os.environ)
    engine, config = configurations(args, environment)
    set_up(config.log_format, getattr(args, "log_level", None) or _level_of_vllm() or LOG_LEVEL)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the server logs these errors itself
    environment.report(logger)
    if without_effect := getattr(args, "without_effect", []):
        logger.info("flags of vLLM that have no effect here: %s", ", ".join(dict.fromkeys(without_effect)))
    return serve(engine, config, print_banner)


def _level_of_vllm() -> str | None:
    """The log level of vLLM's variable."""
    level = as_log_level(text := os.environ.get("VLLM_LOGGING_LEVEL", ""))
    if level not in ("", *LOG_LEVELS):
        raise ConfigError(f"VLLM_LOGGING_LEVEL must be one of {', '.join(LOG_LEVELS)}; got {text!r}", "log_level", text)
    return level or None


def configurations(
    args: argparse.Namespace, environment: vllm_environment.Environment
) -> tuple[EngineConfig, ServerConfig]:
    """What flags and vLLM's variables say; flags override variables."""
    config = ServerConfig(**environment.of(ServerConfig) | _settings(args))
    return EngineConfig(**environment.of(EngineConfig) | engine_settings(args)), config


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def with_file(args: argparse.Namespace, path: Path) -> argparse.Namespace:
    """The flags of a file, overridden by those of the command line."""
    parser = Parser(prog="quire serve")
    configure(parser)
    written = vars(parser.parse(_as_arguments(_read(path))))
    given = vars(args)
    if given.get("named_model") is not None:
        written.pop("model", None)
    elif "model" in given:
        written["named_model"] = None
    return argparse.Namespace(**{**written, **{name: value for name, value in given.items() if value is not None}})


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}", "config", str(path)) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"the configuration {path} must map flag names to values", "config", str(path))
    return content


def _as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """The settings as command-line arguments."""
    arguments: list[str] = []
    for key, value in settings.items():
        name = "--" + key.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(name if value else "--no-" + name[2:])
        elif isinstance(value, list):
            arguments += [f"{name}={item}" for item in value]
        elif isinstance(value, dict):
            arguments.append(f"{name}={json.dumps(value)}")
        else:
            arguments.append(f"{name}={value}")
    return arguments


def print_banner(server: ServerContext, url: str) -> None:
    """Print model, memory and address on stderr, and a curl command to try."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in banner_rows(server, url):
        table.add_row(name, value)
    console = Console(stderr=True)
    console.print(Panel(table, title=f"quire {server.version}", title_align="left", expand=False))
    console.print(curl_example(server, url), markup=False, highlight=False, soft_wrap=True)


def banner_rows(server: ServerContext, url: str) -> list[tuple[str, str]]:
    """Label and value of each line."""
    from quire.server.fronts.hub import front_count

    info = server.llm.info
    several = info.cache_tokens / info.max_model_len
    return [
        ("model", f"{', '.join(server.names)} ({info.dtype}, {info.max_model_len:,} tokens of context)"),
        ("device", info.device),
        ("weights", readable_bytes(info.weight_bytes)),
        ("KV cache", f"{readable_bytes(info.kv_bytes)}: {info.cache_tokens:,} tokens, {several:.1f} full contexts"),
        ("per step", f"{info.max_num_seqs:,} requests, {info.max_num_batched_tokens:,} tokens"),
        *([("fronts", f"{count} processes")] if (count := front_count(server.config)) > 1 else []),
        ("API keys", "required" if server.keys else "none: anyone who can reach the address can use it"),
        ("address", f"{url}/v1" if url.startswith("http") else url),
        *([("page", f"{url}/")] if server.config.page and url.startswith("http") else []),
        ("ready in", f"{info.start_seconds:.1f} s"),
    ]


def curl_example(server: ServerContext, url: str) -> str:
    """A curl command for a first request."""
    where = url + "/v1" if url.startswith("http") else f"--unix-socket {server.config.uds} http://quire/v1"
    key = " -H 'Authorization: Bearer '$QUIRE_API_KEY" if server.keys else ""
    messages = '[{"role": "user", "content": "Hello!"}]'
    body = f'{{"model": "{server.names[0]}", "messages": {messages}, "temperature": 0.2}}'
    return f"curl {where}/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
