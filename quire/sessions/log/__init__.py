"""Conversations by name, durable: `SessionStore` keeps their tokens in a log that survives crashes.

    FOLDER/lock            one process owns the folder
    FOLDER/00000001.log    frames (`frames.py`), appended and never changed
    FOLDER/reserve         room put by, so that sessions can be deleted on a full disk
    FOLDER/00000001.sum    what the log of that number held when it was closed or left: who would be missed if it is cut

Full chunks of 256 tokens are frames of their own, linked to the chunk before and stored once however many sessions
share them; a session is its last chunk's number, the tokens after it, and a few facts. So a fork is one small frame,
and opening one of ten thousand sessions reads its own chunks and nothing else.

An operation is durable when it returns (one fdatasync, shared by all who wait), or at the next `commit` when it was
made with `durable=False`. Garbage is bounded: when more than half of the log is dead, the emptiest files are emptied
into the last one, a few frames with each operation.
"""

from quire.sessions.log.exchange import export_session, import_session
from quire.sessions.log.names import check_name, name_of, owner_id, owner_of, session_key
from quire.sessions.log.state import Page, Session
from quire.sessions.log.store import SessionStore

__all__ = [
    "Page",
    "Session",
    "SessionStore",
    "check_name",
    "export_session",
    "import_session",
    "name_of",
    "owner_id",
    "owner_of",
    "session_key",
]
