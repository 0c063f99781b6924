"""Adapters of commands that run a model themselves (`--lora`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import Parser

if TYPE_CHECKING:
    from quire.messages.lora import LoRARequest


def add_lora_flag(parser: Parser) -> None:
    """The flag for adapters by folder."""
    parser.add_argument_group("adapters").add_argument(
        "--lora", action="append", default=[], metavar="FOLDER",
        help="use this LoRA adapter, as PEFT saves it; several add up",
    )  # fmt: skip


def lora_requests(args: argparse.Namespace, settings: dict[str, Any]) -> list[LoRARequest] | None:
    """The adapters that were given; None for none. Engine settings that they need are added to `settings`."""
    if not args.lora:
        return None
    from quire.adapters.folder import describe_adapter
    from quire.config_checks import MAX_LORA_RANK
    from quire.messages.lora import LoRARequest

    settings["enable_lora"] = True
    if "max_lora_rank" not in settings:
        ranks = [describe_adapter(Path(folder), MAX_LORA_RANK).rank for folder in args.lora]
        settings["max_lora_rank"] = max(1, *ranks)
    return [LoRARequest(Path(folder).resolve().name, i, folder) for i, folder in enumerate(args.lora, 1)]
