"""`quire inspect --url` and `--snapshot`: the memory of a running engine, or a saved map of it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.admin_client import KEY, get
from quire.cli.engine_flags import engine_settings, flag
from quire.cli.parser import Parser
from quire.errors import ValidationError

if TYPE_CHECKING:
    from rich.console import Console

    from quire.messages.memory_map import MemoryMap

PATH = "/admin/memory"
LARGEST = 256 << 20
"""Bytes; a larger file is no snapshot."""


def add_memory_flags(parser: Parser) -> None:
    """Flags that show memory instead of a model."""
    group = parser.add_argument_group("memory of an engine")
    group.add_argument("--url", metavar="URL", help="show the memory of this server, started with --admin-key")
    group.add_argument("--api-key", metavar="KEY", help=f"that server's admin key (default: ${KEY})")
    group.add_argument("--replica", metavar="N", type=int, help="which of several engines (default: 0)")
    group.add_argument("--watch", metavar="SECONDS", type=_seconds, help="refresh every SECONDS until Ctrl-C")
    group.add_argument("--save", metavar="FILE", help="also write the map to this file, for --snapshot")
    group.add_argument("--snapshot", metavar="FILE", help="show a map that --save or LLM.memory_map().to_json() wrote")


def wants_memory(args: argparse.Namespace) -> bool:
    """Whether one of these flags was given; combinations that make no sense are refused."""
    given = [name for name in ("api_key", "replica", "watch", "save") if getattr(args, name) is not None]
    if args.url is None and given:
        args.parser.error(f"{flag(given[0])} needs --url")
    if args.url is not None and args.snapshot is not None:
        args.parser.error("--url and --snapshot cannot be used together")
    if args.url is None and args.snapshot is None:
        return False
    if settings := engine_settings(args):
        args.parser.error(f"{flag(next(iter(settings)))} is for a model, not for the memory of an engine")
    return True


def run(args: argparse.Namespace) -> int:
    """Fetch or read a map, and draw it."""
    from rich.console import Console

    console = Console(highlight=False)
    if args.snapshot is not None:
        _show(_read(args.snapshot), console, args.snapshot)
    elif args.watch is None:
        _show(_fetch_and_save(args), console, args.url)
    else:
        _watch(args, console)
    return 0


def _show(found: MemoryMap, console: Console, where: str) -> None:
    from quire.cli.memory_view import draw

    console.print(draw(found, console, where))


def _watch(args: argparse.Namespace, console: Console) -> None:
    """Redraw the view in a terminal; print one view after the other elsewhere."""
    from rich.live import Live

    from quire.cli.memory_view import draw

    found = _fetch_and_save(args)
    try:
        if not console.is_terminal:
            while True:
                _show(found, console, args.url)
                time.sleep(args.watch)
                found = _fetch_and_save(args)
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(draw(found, console, args.url), refresh=True)
                time.sleep(args.watch)
                found = _fetch_and_save(args)
    except KeyboardInterrupt:
        if console.is_terminal:
            _show(found, console, args.url)  # keep the last view on the screen


def _fetch_and_save(args: argparse.Namespace) -> MemoryMap:
    found = fetch(args.url, args.api_key or os.environ.get(KEY), args.replica)
    if args.save is not None:
        try:
            Path(args.save).write_bytes(found.to_json())
        except OSError as error:
            raise ValidationError(f"{args.save} cannot be written: {error.strerror or error}", "save") from error
    return found


def fetch(url: str, key: str | None, replica: int | None = None) -> MemoryMap:
    """The memory map of a server, or of its engine `replica`."""
    from quire.messages.memory_map import MemoryMap

    query = {} if replica is None else {"replica": replica}
    return MemoryMap.from_json(get(url, key, PATH, query), f"what {url}{PATH} sent")


def _read(name: str) -> MemoryMap:
    from quire.messages.memory_map import MemoryMap

    path = Path(name)
    try:
        if path.stat().st_size > LARGEST:
            raise ValidationError(f"{name} is no memory map: it has {path.stat().st_size} bytes", "snapshot", name)
        data = path.read_bytes()
    except OSError as error:
        raise ValidationError(f"{name} cannot be read: {error.strerror or error}", "snapshot", name) from error
    return MemoryMap.from_json(data, name)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be from 0.1 to 86400 seconds, got {text}")
    return seconds
