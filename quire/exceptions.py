"""Errors, in vLLM's module and under its names: `from quire.exceptions import VLLMValidationError`."""

from quire.errors import AdapterNotFoundError as LoRAAdapterNotFoundError
from quire.errors import EngineDeadError as EngineDeadError
from quire.errors import QuireError as VLLMError
from quire.errors import StepError as EngineGenerateError
from quire.errors import ValidationError as VLLMClientError
from quire.errors import ValidationError as VLLMValidationError

__all__ = [
    "EngineDeadError",
    "EngineGenerateError",
    "LoRAAdapterNotFoundError",
    "VLLMClientError",
    "VLLMError",
    "VLLMValidationError",
]
