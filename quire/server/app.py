"""The ASGI application: checks the key, calls the route, converts exceptions to responses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import ConfigError
from quire.registry import resolve
from quire.server.auth import check_origin, tenant_of
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.errors import ApiError, as_api_error, in_client_terms, not_served
from quire.server.http import ClientDisconnectedError, Exchange
from quire.server.observability.observer import ROUTE
from quire.server.openapi import document
from quire.server.routing import ADMIN, ENGINE, PAGE, Route

ROUTE_MODULES = [
    "chat", "batch_chat", "completions", "responses", "conversations", "messages", "embeddings", "scoring", "models",
    "tokenize", "sessions", "system", "invocations",
]  # fmt: skip
"""Modules of `quire.server.routes`, each with its `ROUTES`."""

OF_CLASSIFIERS = ("scoring", "invocations")
"""Those whose routes a classifier answers, of all that ask the engine."""

LONGEST_PATH = 100
"""Characters of an unknown path that its 404 repeats."""

OPENAPI = "/openapi.json"

EXCHANGE = "quire.exchange"
"""Key of the ASGI scope that holds the `Exchange`."""


def make_app(context: ServerContext) -> ASGIApp:
    """The application of one server."""
    routes = routes_of(context)
    context.openapi = document(context, routes)
    app: ASGIApp = App(context, routes)
    if context.config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(context.config.allowed_origins),
            allow_methods=list(context.config.allowed_methods),
            allow_headers=list(context.config.allowed_headers),
            allow_credentials=context.config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", "X-Quire-Ignored"],
        )
    for made in find_middleware(context.config):
        app = made(app) if isinstance(made, type) else BaseHTTPMiddleware(app, dispatch=made)
    return app


def routes_of(context: ServerContext) -> list[Route]:
    """Every route of a server."""
    names = [*ROUTE_MODULES, *(["page", "engine"] if context.config.page else [])]
    names += ["admin"] if context.admin_keys else []
    if context.config.allowed_lora_path and context.llm.config.enable_lora:
        names.append("adapters")
    routes = [route for name in names for route in _routes_in(name)]
    if context.llm.info.model.class_head is not None:
        answers = {route.path for name in OF_CLASSIFIERS for route in _routes_in(name)}
        routes = [
            replace(route, handler=_only_classifies) if route.generates and route.path not in answers else route
            for route in routes
        ]
    return [route for route in routes if not (context.config.disable_fastapi_docs and route.path == OPENAPI)]


def _routes_in(module: str) -> list[Route]:
    found: list[Route] = import_module(f"quire.server.routes.{module}").ROUTES
    return found


async def _only_classifies(context: ServerContext, exchange: Exchange) -> None:
    raise not_served(f"{context.names[0]} classifies: it neither generates nor embeds; /classify has its answers")


def find_middleware(config: ServerConfig) -> list[Any]:
    """The user's middleware: classes, and async functions (request, call_next)."""
    found = [resolve("middleware", path.replace(":", "."), {}) for path in config.middleware]
    for path, made in zip(config.middleware, found, strict=True):
        if not (isinstance(made, type) or inspect.iscoroutinefunction(made)):
            raise ConfigError(f"middleware {path} is neither a class nor an async function", "middleware", path)
    return found


class App:
    """Answers every request, with the route's response or an error."""

    def __init__(self, context: ServerContext, routes: Sequence[Route]) -> None:
        self._context = context
        self._root = context.config.root_path
        self._first_parts = {_first_part(route.path) for route in routes}
        self._public = {route.path for route in routes if route.is_public}
        self._admin = {route.path for route in routes if route.needs_admin}
        self._styles = {route.path: route.error_style for route in routes if route.error_style is not None}
        self._router = Router(
            [
                StarletteRoute(route.path, Endpoint(context, route), methods=[route.method], name=route.path)
                for route in routes
            ],
            redirect_slashes=False,
            default=_no_such_route,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        context = self._context
        self._normalize(scope)
        exchange = Exchange(scope, receive, send, context.limits)
        scope[EXCHANGE] = exchange
        if (style := self._styles.get(scope["path"])) is not None:
            exchange.error_body, exchange.error_event = style.body, style.event
        scope["app"] = self  # makes the router raise for a wrong method
        context.exchanges.add(exchange)
        with context.observer.http_request(exchange):
            await self._answer(exchange, receive, send)

    def _normalize(self, scope: Scope) -> None:
        """Make the path that of a route, whether it came with the prefix or a last slash or without: keys, routes and
        logs see one."""
        scope["root_path"] = ""
        path = scope["path"]
        rest = path.removeprefix(self._root)
        if self._root and rest != path and rest.startswith("/") and _first_part(rest) in self._first_parts:
            path = rest
        if path.endswith("/") and path != "/" and not path.startswith(PAGE):
            path = path[:-1]  # probes and clients add a slash
        if path != scope["path"]:
            scope["path"] = path
            scope["raw_path"] = path.encode()

    async def _answer(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        context, scope = self._context, exchange.scope
        try:
            if self._root and scope["path"] == self._root and context.config.page:
                await exchange.reply(b"", 308, {"Location": self._root.rpartition("/")[2] + "/"})  # for relative links
                return
            self._authenticate(exchange)
            await self._router(scope, receive, send)
        except asyncio.CancelledError:
            await self._send_interruption(exchange)
        except ClientDisconnectedError:
            pass
        except HTTPException as error:
            await exchange.fail(_from_starlette(error, scope["method"]))
        except Exception as error:
            await exchange.fail(in_client_terms(as_api_error(error, context.retry_after), exchange.client_names))
        finally:
            context.exchanges.discard(exchange)
            del scope[EXCHANGE]  # a reference cycle, which would live until the next garbage collection
            exchange.end()

    def _authenticate(self, exchange: Exchange) -> None:
        """Check the key and set the tenant."""
        context = self._context
        if context.config.enable_request_id_headers:
            exchange.extra_headers.append((b"x-request-id", exchange.id.encode()))
        path = exchange.scope["path"]
        if path in self._public or (context.config.page and path.startswith(PAGE)):
            return
        if path.startswith((ADMIN, ENGINE)):
            check_origin(exchange.headers, context.config.allowed_origins)
        if (path.startswith(ADMIN) or path in self._admin) and context.admin_keys:
            context.admin_keys.check(exchange.headers)
        elif context.keys:
            exchange.tenant = context.keys.check(exchange.headers)
        else:
            exchange.tenant = tenant_of(exchange.headers)

    async def _send_interruption(self, exchange: Exchange) -> None:
        """The route was cancelled: send the reason if `interrupt` did it, otherwise cancel."""
        why = exchange.interruption
        if why is None:
            raise asyncio.CancelledError
        if isinstance(why, ApiError):
            await exchange.fail(why)


class Endpoint:
    """A route as an ASGI application."""

    def __init__(self, context: ServerContext, route: Route) -> None:
        self._context = context
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._route.path
        handler = self._context.hub_handler if self._route.is_hubs else None
        await (handler or self._route.handler)(self._context, scope[EXCHANGE])


def _first_part(path: str) -> str:
    return path.split("/", 2)[1]


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    shown = path if len(path) <= LONGEST_PATH and path.isprintable() else ascii(path[:LONGEST_PATH]) + "…"
    raise not_served(f"there is no {scope['method']} {shown} here; /openapi.json lists the routes")


def _from_starlette(error: HTTPException, method: str) -> ApiError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(405, f"{method} is not allowed for this path: use {allowed}", headers=error.headers)
    return ApiError(error.status_code, error.detail, headers=error.headers)
