"""Every error a user can meet. Each says what was wrong, the value, the limit and what to do."""

from __future__ import annotations

from typing import Any


class QuireError(Exception):
    """Base of all errors raised on purpose by quire."""


class ValidationError(QuireError, ValueError):
    """A value given by the caller is wrong. `parameter` names it, `value` holds it."""

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ConfigError(ValidationError):
    """An engine setting is wrong, or two settings contradict each other."""


class UnknownSettingError(ConfigError, TypeError):
    """There is no engine setting of this name."""


class ModelNotFoundError(QuireError, ValueError):
    """No model answers to this name: not a folder, a file, an alias or a reachable Hub id."""


class UnsupportedModelError(QuireError, ValueError):
    """The model is there, but its architecture or a feature of it is not implemented."""


class CheckpointError(QuireError, ValueError):
    """A weight file is missing, damaged, or does not hold the tensors the model needs."""


class CacheTooSmallError(QuireError, ValueError):
    """The KV cache cannot hold what is asked of it."""


class ModelTooLargeError(QuireError, ValueError):
    """The device has not the memory for the model's weights and one step."""


class StepError(QuireError, RuntimeError):
    """A step failed on the device; the state of the rows it touched is unknown."""


class StepMemoryError(StepError):
    """The device had no memory for a step."""


class DeviceLostError(StepError):
    """A step failed, or hangs, and took the device with it: nothing more can run there in this process."""


class RankLostError(DeviceLostError):
    """A process that holds a part of the model has died, hangs, or is out of step with the others."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine has been shut down or cannot go on."""


SHUT = "the engine has been shut down; make a new one"
"""What every call is told after that."""


class ClusterError(QuireError, RuntimeError):
    """The cluster that is to hold the ranks cannot be reached, has too little, or has other software."""


class ReplicaDownError(EngineDeadError):
    """One of several engines is down, and what was asked for is there. The others go on."""


class StoreError(QuireError, RuntimeError):
    """A folder that keeps memory on disk cannot do what was asked of it."""


class StoreInUseError(StoreError):
    """Another process owns the folder. `pid` is that process, where known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class StoreUnavailableError(StoreError):
    """The folder cannot be used at all: read-only, no folder, no permission, or of a newer version."""


class StoreFullError(StoreError):
    """The disk has no room left for something that must not be dropped."""


class SessionNotFoundError(QuireError, KeyError):
    """No session answers to this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class SessionExistsError(ValidationError):
    """A session of this name exists already."""


class SessionBusyError(QuireError, RuntimeError):
    """The session is in the middle of a turn, or has changed under the caller's feet."""


class SessionLostError(StoreError):
    """The session's tokens were damaged on disk. `name` says which session, the message what happened."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def told(name: str, message: str, parameter: str | None = None) -> QuireError | None:
    """An error that was raised in another process, by the name of its class; None if it is none of these."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, ValidationError):
        return kind(message, parameter)
    if isinstance(kind, type) and issubclass(kind, QuireError):
        return kind(message)
    return None
