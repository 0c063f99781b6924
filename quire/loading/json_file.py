"""JSON files that came with a model: read with a bound on their size, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

_LIMIT = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        size = path.stat().st_size
        if size > _LIMIT:
            raise CheckpointError(f"{path}: {size:,} bytes of JSON; at most {_LIMIT:,} are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__} where an object is needed")
    return value
