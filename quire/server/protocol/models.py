"""/v1/models."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    """A model that can be asked for."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "quire"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
