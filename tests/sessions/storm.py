"""Random operations on a session store, and a plain model of their effect.

As a program it is what the kill test kills: `python storm.py` reads "folder seed notes" lines and forks a worker for
each, which runs operations on the folder until it is killed and writes to the file `notes` which operation it began
("b") and which is durable ("d").
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

from quire.sessions.log import SessionStore

FILE_BYTES = 6000
NAMES = [f"s{i}" for i in range(12)]

Model = dict[str, dict[str, Any]]
Operation = tuple[str, dict[str, Any]]


def observe(store: SessionStore) -> Model:
    """Everything in the store, through its public methods."""
    model: Model = {}
    after: int | None = 0
    while after is not None:
        page = store.page(after, 5)
        for session in page.sessions:
            model[session.name] = {
                "tokens": store.tokens(session.name).tolist(),
                "ttl": None if session.expires is None else round(session.expires - session.used),
                "meta": session.meta,
                "parent": session.parent,
                "forked_at": session.forked_at,
                "kv": session.kv_tokens,
            }
        after = page.after
    return model


def lost(store: SessionStore) -> dict[str, str]:
    """Names of lost sessions, and why they are lost."""
    return {session.name: session.lost for session in store.page(limit=1000).sessions if session.lost}


def choose(rng: random.Random, model: Model) -> Operation:
    """An operation that is valid for a store with the content of the model."""
    known = sorted(model)
    new = [name for name in NAMES if name not in model]
    kinds = ["append"] * 6 + ["create", "fork", "fork"] * bool(new) + ["delete", "kv", "update"]
    kind = rng.choice(kinds) if known else "create"
    tokens = some_tokens(rng)
    if kind == "create":
        return kind, {"name": rng.choice(new), "tokens": tokens, "ttl": rng.choice([None, 100])}
    name = rng.choice(known)
    length = len(model[name]["tokens"])
    if kind == "append":
        return kind, {"name": name, "tokens": tokens}
    if kind == "fork":
        at = rng.choice([length, rng.randint(0, length), min(256, length)])
        return kind, {"name": name, "new": rng.choice(new), "at": at}
    if kind == "kv":
        return kind, {"name": name, "tokens": rng.randint(0, length)}
    if kind == "update":
        return kind, {"name": name, "meta": {"note": str(rng.random())}}
    return kind, {"name": name}


def some_tokens(rng: random.Random) -> list[int]:
    """A few or many tokens, often with a common beginning."""
    count = rng.choice([0, 1, 3, 40, 256, 300, 600])
    start = rng.choice([0, 0, 0, rng.randrange(1000)])
    return list(range(start, start + count))


def apply(operation: Operation, model: Model) -> None:
    """The operation's effect on the model."""
    kind, what = operation
    if kind == "create":
        model[what["name"]] = {
            "tokens": what["tokens"], "ttl": what["ttl"], "meta": {}, "parent": None, "forked_at": 0, "kv": 0,
        }  # fmt: skip
    elif kind == "append":
        model[what["name"]]["tokens"] = model[what["name"]]["tokens"] + what["tokens"]
    elif kind == "fork":
        source, at = model[what["name"]], what["at"]
        model[what["new"]] = {
            **source, "tokens": source["tokens"][:at], "parent": what["name"], "forked_at": at,
            "kv": min(at, source["kv"]),
        }  # fmt: skip
    elif kind == "kv":
        model[what["name"]]["kv"] = what["tokens"]
    elif kind == "update":
        model[what["name"]]["meta"] = what["meta"]
    else:
        del model[what["name"]]


def perform(operation: Operation, store: SessionStore, durable: bool) -> None:
    """The operation on a store."""
    kind, what = operation
    if kind == "create":
        store.create(what["name"], what["tokens"], ttl=what["ttl"], durable=durable)
    elif kind == "append":
        store.append(what["name"], what["tokens"], durable=durable)
    elif kind == "fork":
        store.fork(what["name"], what["new"], what["at"], durable=durable)
    elif kind == "kv":
        store.set_kv(what["name"], what["tokens"], b"kv", durable=durable)
    elif kind == "update":
        store.update(what["name"], meta=what["meta"], durable=durable)
    else:
        store.delete(what["name"], durable=durable)


def run(folder: str, seed: int, note: Callable[[str], object]) -> None:
    """Run operations until killed; close and reopen the store now and then."""
    rng = random.Random(seed)
    store = SessionStore.open(folder, file_bytes=FILE_BYTES)
    model = observe(store)
    count = 0
    while True:
        operation = choose(rng, model)
        durable = rng.random() < 0.5
        if rng.random() < 0.02:
            store.close()
            store = SessionStore.open(folder, file_bytes=FILE_BYTES)
        note(f"b{count}\n")
        perform(operation, store, durable)
        if durable:
            note(f"d{count}\n")
        apply(operation, model)
        count += 1


def fork_workers() -> None:
    """Fork a worker for each line; print its pid, and when it has ended."""
    for line in sys.stdin:
        folder, seed, notes = line.split()
        pid = os.fork()
        if pid == 0:
            fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                run(folder, int(seed), lambda text, fd=fd: os.write(fd, text.encode()))
            except BaseException as error:
                os.write(fd, f"e{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    fork_workers()
