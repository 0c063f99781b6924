"""Sessions stored durably: `SessionStore` keeps their tokens in a log that survives crashes.

    FOLDER/lock            one process owns the folder
    FOLDER/00000001.log    frames (`format.py`), appended and never changed
    FOLDER/reserve         disk space kept free so that sessions can be deleted on a full disk
    FOLDER/00000001.sum    sessions in that log when it was closed: names the lost ones if it is damaged
    FOLDER/00000001.idx    where its frames are: opening the folder reads this instead of the log

Full chunks of 256 tokens are frames of their own, linked to the chunk before and stored once however many sessions
share them; a session is its last chunk's number, the tokens after it, and a few fields. So a fork is one small frame,
and opening one of ten thousand sessions reads its own chunks and nothing else.

An operation is durable when it returns (concurrent callers share one fdatasync), or at the next `commit` if it was
called with `durable=False`. Garbage is bounded: when more than half of the log is garbage, the live frames of the
files with the most of it are moved to the newest file, a few with each operation.
"""

from quire.sessions.log.export import export_session, import_session
from quire.sessions.log.state import (
    Page,
    Session,
    check_name,
    name_of,
    owner_id,
    owner_of,
    session_key,
)
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
