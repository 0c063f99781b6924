"""What may name a session, and how tenants' names are kept apart."""

from __future__ import annotations

import re

from blake3 import blake3

from quire.errors import ValidationError

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}")
_OWNER = re.compile(r"[0-9a-f]{16}")
_BETWEEN = "|"


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


def session_key(tenant: str, name: object) -> str:
    """What a tenant's session of that name goes by in the store: tenants' names never meet."""
    return check_name(name) if not tenant else f"{owner_id(tenant)}{_BETWEEN}{check_name(name)}"


def check_key(key: object) -> str:
    """The key itself, if `session_key` can have made it."""
    owner, between, name = key.rpartition(_BETWEEN) if isinstance(key, str) else ("", "", key)
    if between and not _OWNER.fullmatch(owner):
        check_name(key)
    check_name(name)
    return str(key)


def owner_id(tenant: str) -> str:
    """Whose a key is: short, however long the tenant's own name is."""
    return blake3(tenant.encode("utf-8", "surrogatepass")).hexdigest(8) if tenant else ""


def owner_of(key: str) -> str:
    """The owner's part of a key; "" where there are no tenants."""
    return key.rpartition(_BETWEEN)[0]


def name_of(key: str) -> str:
    """The name as its owner knows it."""
    return key.rpartition(_BETWEEN)[2]
