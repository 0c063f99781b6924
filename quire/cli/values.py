"""Parsers of flag values (sizes with a suffix, JSON objects, files), and readable byte counts."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)")


def size(text: str) -> int:
    """An integer with an optional suffix: 1k is 1000, 1K is 1024, 2G is 2 GiB."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give an integer, or one like 4k (4000), 4K (4096), 2G"
        )
    value = float(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(match[1]) * _UNITS[match[2]] if "." not in match[1] else int(value)


def size_or_auto(text: str) -> int | str:
    """A size, or the word auto."""
    return text if text == "auto" else size(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object such as {"rope_theta": 1e6}."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object ({{"name": value}})')
    return value


def counts_by_name(text: str) -> dict[str, Any]:
    """A JSON object of numbers, or image=4,video=1."""
    if text.startswith("{") or "=" not in text:
        return json_object(text)
    try:
        return {name: int(count) for name, _, count in (pair.partition("=") for pair in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: counts must be integers, as in image=4,video=1") from None


def token_biases(text: str) -> dict[int, float]:
    """A JSON object whose keys are token ids."""
    try:
        return {int(token): bias for token, bias in json_object(text).items()}
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r}: keys must be token ids, as in {{"42": -5}}') from None


def as_log_level(text: str) -> str:
    """A level in any case, vLLM's names included."""
    name = text.lower()
    return {"trace": "debug", "warn": "warning", "critical": "error"}.get(name, name)


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def output_file(text: str) -> str:
    """A file that can be written, checked before a long run."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}: create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable")
    return text


def readable_bytes(count: float) -> str:
    """12.3 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
