"""All errors a user can get. A message says what was wrong, the value, the limit and the remedy."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 4, 4


def short_repr(value: Any) -> str:
    """A value as an error shows it. Costs little however large the value is: `repr` of a text of megabytes takes tenths
    of a second."""
    return _SHORT.repr(value)


class QuireError(Exception):
    """Base of all errors that quire raises."""


class ValidationError(QuireError, ValueError):
    """A value from the caller is invalid. `parameter` is its name, `value` the value."""

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ConfigError(ValidationError):
    """An engine setting is invalid, or two settings contradict each other."""


class UnknownSettingError(ConfigError, TypeError):
    """There is no engine setting with this name."""


class MediaError(ValidationError):
    """An image or video cannot be fetched or decoded, or exceeds a limit. `reason` is a word for metrics."""

    def __init__(
        self, message: str, parameter: str | None = None, value: Any = None, *, reason: str = "invalid"
    ) -> None:
        super().__init__(message, parameter, value)
        self.reason = reason


class ModelNotFoundError(QuireError, ValueError):
    """The name is not a folder, a file, an alias or a reachable Hub id."""


class UnsupportedModelError(QuireError, ValueError):
    """The model's architecture, or a feature it uses, is not implemented."""


class CheckpointError(QuireError, ValueError):
    """A weight file is missing, damaged, or lacks tensors the model needs."""


class AdapterError(QuireError, ValueError):
    """A LoRA adapter is damaged, malicious, for another base model, or of a kind that is not implemented."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter with this name, or its folder does not exist."""


class CacheTooSmallError(QuireError, ValueError):
    """The KV cache is too small for a request or a setting."""


class ModelTooLargeError(QuireError, ValueError):
    """The device's memory is too small for the model's weights and one step."""


class StepError(QuireError, RuntimeError):
    """A step failed on the device; the state of the rows it touched is unknown."""


class StepMemoryError(StepError):
    """The device ran out of memory in a step."""


class DeviceLostError(StepError):
    """A step failed or hangs, and the device is unusable in this process from now on."""


class RankLostError(DeviceLostError):
    """A rank's process has exited, hangs, or is out of sync with the others."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine has been shut down, or has failed for good."""

    was_sent = False
    """Whether the call had reached the engine: it may have been done."""


class OutOfResourcesError(QuireError, RuntimeError):
    """The process or the system is out of file descriptors, processes, threads or memory. It may help to try again."""


SHUT_DOWN = "the engine has been shut down; make a new one"
"""Message of every call after a shutdown."""


class ClusterError(QuireError, RuntimeError):
    """The cluster for the ranks cannot be reached, lacks resources, or has other package versions."""


class ReplicaDownError(EngineDeadError):
    """The replica that a call needs is down. Other replicas keep running."""


class BusyError(QuireError, RuntimeError):
    """There is too much of this work already; the same call may succeed later."""


class StoreError(QuireError, RuntimeError):
    """An operation on a folder of the disk tier or the session store failed."""


class StoreInUseError(StoreError):
    """Another process owns the folder. `pid` is its id, if known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class StoreUnavailableError(StoreError):
    """The folder cannot be used: read-only, not a folder, no permission, or of a newer format version."""


class StoreFullError(StoreError):
    """The disk is full, and the data must not be dropped."""


class SessionNotFoundError(QuireError, KeyError):
    """There is no session with this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class SessionExistsError(ValidationError):
    """A session with this name exists already."""


class SessionBusyError(QuireError, RuntimeError):
    """The session is in a turn, or was changed concurrently."""


class SessionQuotaError(QuireError, RuntimeError):
    """A tenant's sessions use as much of the store as they may."""


class SessionLostError(StoreError):
    """A session's tokens were damaged on disk. `name` is the session's."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def error_by_name(name: str, message: str, parameter: str | None = None) -> QuireError | None:
    """The error that another process raised, from its class's name; None if no such class is defined here."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, ValidationError):
        return kind(message, parameter)
    if isinstance(kind, type) and issubclass(kind, QuireError):
        return kind(message)
    return None
