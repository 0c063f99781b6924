"""The cache folder, and the environment of child processes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from quire.errors import ValidationError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def cache_dir(*parts: str) -> Path:
    """The cache folder (`$QUIRE_CACHE`, else `$XDG_CACHE_HOME/quire`, else `~/.cache/quire`) or a path inside it.

    Creates nothing. Each part must be a plain name, so that the path cannot leave the cache.
    """
    if chosen := os.environ.get("QUIRE_CACHE"):
        root = Path(chosen).expanduser().absolute()
    elif os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        root = Path(base) / "quire"
    else:
        root = Path.home() / ".cache" / "quire"
    return root.joinpath(*(_checked(part) for part in parts))


def scratch_prefix(pid: int) -> str:
    """How the names of temporary folders begin that hold the sessions of the engine with this process."""
    return f"quire-sessions-{pid}-"


def child_environment() -> dict[str, str]:
    """For a child process: it imports quire from the same place as this one, not from its current folder."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _checked(part: str) -> str:
    if not _PLAIN_NAME.fullmatch(part):
        raise ValidationError(
            f"{part!r} cannot be a path in the cache: letters, digits, '.', '_' and '-' only, 128 at most",
            "part",
            part,
        )
    return part
