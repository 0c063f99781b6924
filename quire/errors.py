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


class EngineDeadError(QuireError, RuntimeError):
    """The engine has been shut down or cannot go on."""
