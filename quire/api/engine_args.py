"""`EngineArgs`: vLLM's name for the settings of an engine."""

from __future__ import annotations

import os
from typing import Any

from quire.api.compat import drop_neutral
from quire.config import EngineConfig


class EngineArgs(EngineConfig):
    """`EngineConfig` that also takes what `LLM` takes: vLLM's arguments that ask for nothing."""

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        super().__init__(model=os.fspath(model), **drop_neutral(settings))


AsyncEngineArgs = EngineArgs
