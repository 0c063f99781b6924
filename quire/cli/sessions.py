"""`quire sessions`: manages the sessions in a folder that no engine is using."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_common
from quire.cli.parser import Parser
from quire.cli.terminal import say, table
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.sessions.log import Session, SessionStore

WHAT = """\
List, show, delete, export or import the sessions in the folder of a disk tier (--kv-disk of a server).
Only one process can use the folder: while a server runs, use its API instead (/v1/sessions)."""
EXAMPLES = """
  quire sessions list --kv-disk /var/lib/quire
  quire sessions show agent-7 --kv-disk /var/lib/quire
  quire sessions export agent-7 agent-7.session --kv-disk /var/lib/quire
  quire sessions import agent-7.session --kv-disk /var/lib/quire --name agent-8
"""
PAGE = 1000


def configure(parser: Parser) -> None:
    """The flags of `quire sessions`."""
    parser.describe(run, WHAT, EXAMPLES, "ACTION [NAME] [FILE]")
    parser.add_argument("action", choices=sorted(ACTIONS), metavar="ACTION", help=", ".join(sorted(ACTIONS)))
    parser.add_argument(
        "arguments", nargs="*", metavar="NAME | FILE", help="name of a session; file to export to or import from"
    )
    parser.add_argument("--kv-disk", required=True, metavar="PATH", help="the folder")
    parser.add_argument("--tenant", default="", help="tenant whose sessions to use (default: those without a tenant)")
    parser.add_argument("--name", help="import: name to use instead of the file's")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Open the store and run the action."""
    from quire.sessions.log import SessionStore

    count, action = ACTIONS[args.action]
    if len(args.arguments) != count:
        raise ValidationError(f"quire sessions {args.action} takes {count} arguments, got {len(args.arguments)}")
    folder = Path(args.kv_disk).expanduser() / "sessions"
    if not folder.is_dir():
        if parts := sorted(folder.parent.glob("replica-*/sessions")):
            shown = ", ".join(str(part.parent) for part in parts)
            raise ValidationError(f"several engines used {args.kv_disk}: give the folder of one, {shown}", "kv_disk")
        raise ValidationError(
            f"there are no sessions in {args.kv_disk}: no engine has used it with --kv-disk", "kv_disk"
        )
    with SessionStore.open(folder) as store:
        action(store, args)
    return 0


def _list(store: SessionStore, args: argparse.Namespace) -> None:
    from quire.sessions.log import name_of, owner_id

    after: int | None = 0
    while after is not None:
        page = store.page(after, PAGE, owner_id(args.tenant))
        for session in page.sessions:
            state = f"lost: {session.lost}" if session.lost else f"used {_when(session.used)}"
            print(f"{name_of(session.name)}  {session.num_tokens} tokens  {state}")
        after = page.after
    say(f"{store.count(owner_id(args.tenant))} sessions; {len(store)} of all tenants")


def _show(store: SessionStore, args: argparse.Namespace) -> None:
    session = store.get(_key(args))
    print(table(_rows(session)))


def _rows(session: Session) -> list[tuple[str, str]]:
    from quire.sessions.log import name_of

    rows = [
        ("name", name_of(session.name)),
        ("tokens", str(session.num_tokens)),
        ("saved", f"KV of {session.kv_tokens} tokens"),
        ("created", _when(session.created)),
        ("used", _when(session.used)),
        ("expires", "never" if session.expires is None else _when(session.expires)),
    ]
    if session.parent is not None:
        rows.append(("forked", f"from {name_of(session.parent)} after {session.forked_at} tokens"))
    if session.lost:
        rows.append(("lost", session.lost))
    return rows + sorted(session.meta.items())


def _delete(store: SessionStore, args: argparse.Namespace) -> None:
    store.delete(_key(args))


def _export(store: SessionStore, args: argparse.Namespace) -> None:
    from quire.sessions.log import export_session

    export_session(store, _key(args), args.arguments[1])


def _import(store: SessionStore, args: argparse.Namespace) -> None:
    from quire.sessions.log import import_session, name_of, session_key
    from quire.sessions.log.export import read_export

    path = args.arguments[0]
    name = read_export(path).name if args.name is None else args.name
    print(name_of(import_session(store, path, session_key(args.tenant, name)).name))


def _key(args: argparse.Namespace) -> str:
    from quire.sessions.log import session_key

    return session_key(args.tenant, args.arguments[0])


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


Action = Callable[["SessionStore", argparse.Namespace], None]
ACTIONS: dict[str, tuple[int, Action]] = {
    "list": (0, _list), "show": (1, _show), "delete": (1, _delete), "export": (2, _export), "import": (1, _import),
}  # fmt: skip
