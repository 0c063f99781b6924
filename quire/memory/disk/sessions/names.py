"""What may name a session."""

from __future__ import annotations

import re

from quire.errors import ValidationError

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}")


def check_name(name: object) -> str:
    """The name itself if it may name a session. It never becomes a path, but it is shown, logged and put into URLs."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise ValidationError(
            f"{shown} cannot name a session: 1 to {MAX_NAME} letters, digits or any of _ . : @ - , "
            "the first a letter, a digit or _",
            "name",
            name,
        )
    return name
