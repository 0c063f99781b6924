"""How a process of ours ended, in words."""

from __future__ import annotations

import signal
import subprocess


def describe_end(process: subprocess.Popen[bytes], what: str) -> str:
    """`what` says which process it is."""
    code = process.poll()
    name = f"{what} (pid {process.pid})"
    if code is None:
        return f"{name} has closed its connection"
    if code >= 0:
        return f"{name} has ended with exit code {code}"
    try:
        by = signal.Signals(-code).name
    except ValueError:
        by = f"signal {-code}"
    hint = ": the system does that when memory runs out" if by == "SIGKILL" else ""
    return f"{name} was killed by {by}{hint}"
