"""Resolves names to implementations, imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quire.errors import ValidationError


def resolve(kind: str, name: str, known: Mapping[str, str]) -> Any:
    """The object that `name` refers to: a short name in `known`, or a dotted path such as `my_pkg.my_mod.MyThing`.

    `kind`: what it is ("attention backend"), for the error that lists the known names.
    """
    path = known.get(name, name)
    module, dot, attribute = path.rpartition(".")
    if not dot:
        raise ValidationError(
            f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}; or give a dotted path (my_pkg.mod.Thing)",
            kind,
            name,
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValidationError(
            f"{kind} {name!r} cannot be imported from {path!r}: {error}; known: {', '.join(sorted(known))}", kind, name
        ) from error
