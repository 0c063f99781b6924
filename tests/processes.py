"""Processes: children, open files and memory, from /proc."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Running child processes."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if not is_gone(child)]


def descendants(pid: int) -> list[int]:
    """Children and their descendants."""
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def descriptors(pid: int) -> dict[str, int]:
    """Number of open file descriptors, by kind."""
    found: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            found["file" if target.startswith("/") else target.split("[")[0]] += 1
    return dict(found)


def rss(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_memory(pid: int) -> int:
    """Memory of a process that is not the content of files, resident or swapped out, in bytes. How much of its files
    is resident, libraries included, the kernel decides: it takes pages back when other processes need room."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line[1]) << 10 for line in lines if line and line[0] in ("RssAnon:", "VmSwap:"))
