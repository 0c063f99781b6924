"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from quire.server.context import ServerContext
from quire.server.http import Exchange
from quire.server.protocol.models import ModelCard, ModelList
from quire.server.routing import Route


async def list_models(server: ServerContext, exchange: Exchange) -> None:
    """Every name the model answers to."""
    await exchange.reply(ModelList([_card(server, name) for name in server.names]))


async def retrieve(server: ServerContext, exchange: Exchange) -> None:
    """One of them."""
    name = exchange.path_params["model"]
    server.check_model(name)
    await exchange.reply(_card(server, name))


def _card(server: ServerContext, name: str) -> ModelCard:
    return ModelCard(id=name, created=server.created, max_model_len=server.max_model_len, root=server.llm.config.model)


ROUTES = [
    Route("GET", "/v1/models", list_models, answer=ModelList),
    Route("GET", "/v1/models/{model:path}", retrieve, answer=ModelCard, errors=(404,)),
]
