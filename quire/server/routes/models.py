"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from quire.server.context import ServerContext
from quire.server.http import Exchange
from quire.server.protocol.models import ModelCard, ModelList
from quire.server.routing import Route


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """Every name the model answers to."""
    await exchange.reply(ModelList([_card(context, name) for name in context.names]))


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """One of them."""
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
