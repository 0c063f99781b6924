"""Limits of the operating system on files, processes and threads: raised at start, and named when they are hit."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time

from quire.errors import OutOfResourcesError

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65536
SPARE_DESCRIPTORS = 32
"""Descriptors that connections leave free, for files, pipes and processes that requests need."""
LOG_SECONDS = 10.0
"""A cause is logged again after this long."""

_RESOURCES = {
    errno.EMFILE: "this process has no free file descriptor",
    errno.ENFILE: "the system has no free file descriptor",
    errno.ENOMEM: "the system has no free memory",
    errno.EAGAIN: "the system allows no more processes or threads",
}
_logged: dict[str, float] = {}


def raise_descriptor_limit() -> None:
    """Raise the limit on open files as far as allowed: each connection needs one, and the usual limit is 1,024."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every platform, and not always permitted
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_DESCRIPTORS if hard < 0 else min(hard, MAX_DESCRIPTORS)  # -1: no limit
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """How many files this process may have open; 0: not known."""
    try:
        import resource
    except ImportError:
        return 0
    return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def are_descriptors_short(descriptor: int) -> bool:
    """Whether the process should open no more connections, given the newest descriptor: the system hands out the lowest
    free number."""
    limit = descriptor_limit()
    return 0 < limit <= descriptor + min(SPARE_DESCRIPTORS, limit // 4)


def as_resource_error(error: BaseException) -> OutOfResourcesError | None:
    """The error if it means that the process or the system is out of a resource; the cause is logged. None: it means
    something else."""
    if isinstance(error, OSError) and error.errno in _RESOURCES:
        reason = _RESOURCES[error.errno]
    elif isinstance(error, MemoryError):
        reason = _RESOURCES[errno.ENOMEM]
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        reason = _RESOURCES[errno.EAGAIN]
    else:
        return None
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        reason += f": {_open_files()} of {descriptor_limit()} are in use. Raise the limit (ulimit -n, LimitNOFILE=)"
    log_cause(reason)
    return OutOfResourcesError(reason)


def out_of_memory_reason(error: BaseException) -> str:
    """One line for an error at start that means too little memory; empty: it means something else."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    is_mapping = isinstance(error, (ImportError, OSError)) and (
        "failed to map segment" in text or "annot allocate memory" in text
    )
    if not is_mapping and not isinstance(error, MemoryError) and "can't allocate memory" not in text:
        return ""
    limit = _memory_limit()
    return (
        f"there is too little memory to start{limit} ({text}): allow more (ulimit -v, the container's limit), or use a "
        "smaller model"
    )


def _memory_limit() -> str:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            return f", ulimit -v allows {most / 2**30:.2f} GiB"
    return ""


def log_cause(reason: str) -> None:
    """Log why requests are refused, not more than once in LOG_SECONDS."""
    now, kind = time.monotonic(), reason.partition(":")[0]
    if now - _logged.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
        _logged[kind] = now
        logger.error("requests are refused with 503: %s", reason)


def _open_files() -> str:
    try:
        return str(len(os.listdir("/proc/self/fd")))
    except OSError:  # listing them takes a descriptor
        return "all"
