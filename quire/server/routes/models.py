"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.http import Exchange
from quire.server.routing import Route


class ModelCard(msgspec.Struct):
    """A served model."""

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


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """List the names under which the model is served."""
    await exchange.reply(ModelList([_card(context, name) for name in context.names]))


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve a served model."""
    name = exchange.path_params["model"]
    context.check_model(name)
    await exchange.reply(_card(context, name))


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=context.created, max_model_len=context.max_model_len, root=context.llm.config.model
    )


ROUTES = [
    Route("GET", "/v1/models", list_models, answer=ModelList),
    Route("GET", "/v1/models/{model:path}", retrieve, answer=ModelCard, errors=(404,)),
]
