"""Process 1 of a container: starts the command as its child, passes signals on, and reaps orphans.

When an engine is killed, the system hands the processes that it had started (ranks, grammars) to process 1. A server
does not know them, and would keep each as a zombie.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

FORWARDED = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2))


def fork_if_first() -> None:
    """Returns in the process that is to run the command: this one, unless it is process 1; then its child. The
    parent exits with the child's status. To be called before there are threads."""
    if os.getpid() != 1:
        return
    signals = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child:
        os._exit(_watch(child, signals))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(child: int, signals: Collection[signal.Signals]) -> int:
    """Reap and pass on until the child has ended; returns its exit code, or 128 and the signal that killed it."""
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo != signal.SIGCHLD:
            if info.si_code <= 0:  # sent by a process: what a terminal sends, the child has got as well
                os.kill(child, info.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
