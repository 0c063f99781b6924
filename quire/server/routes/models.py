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
    """The model's name or folder; of an adapter: its folder."""
    object: str = "model"
    owned_by: str = "quire"
    parent: str | None = None
    """Of an adapter: the model that it is for."""
    modalities: tuple[str, ...] = ("text",)
    """What the model reads: text, images, videos."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """List the names under which the model is served, and its adapters."""
    names = [*context.names, *(entry.name for entry in context.adapters)]
    await exchange.reply(ModelList([_card(context, name) for name in names]))


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve a served model."""
    name = exchange.path_params["model"]
    context.check_model(exchange, name)
    await exchange.reply(_card(context, name))


def _card(context: ServerContext, name: str) -> ModelCard:
    card = ModelCard(
        id=name,
        created=context.created,
        max_model_len=context.max_model_len,
        root=context.llm.config.model,
        modalities=context.llm.inputs.media.modalities,
    )
    if (entry := context.adapters.get(name)) is not None:
        card.parent, card.root = entry.base_model_name or context.names[0], entry.path
    return card


ROUTES = [
    Route("GET", "/v1/models", list_models, answer=ModelList),
    Route("GET", "/v1/models/{model:path}", retrieve, answer=ModelCard, errors=(404,)),
]
