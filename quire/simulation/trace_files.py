"""Files of traces, as `quire simulate` and `quire bench serve` read them; imports no numpy, for the load generator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import ValidationError

TRACE_BLOCK = 512
"""Tokens per entry of a trace's `hash_ids`, as in the traces that Mooncake published."""


def json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its file and line for error messages."""
    if not Path(path).is_file():
        raise ValidationError(f"there is no file {path!r}")
    is_empty = True
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValidationError(f"{where}: not JSON: {error}") from error
            if not isinstance(line, dict):
                raise ValidationError(f"{where}: not a JSON object")
            is_empty = False
            yield where, line
    if is_empty:
        raise ValidationError(f"{path} is empty")
