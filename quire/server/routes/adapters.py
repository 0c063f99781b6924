"""Loading and unloading adapters while the server runs; only with --allowed-lora-path and --admin-key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from quire.api.adapters import AdapterEntry
from quire.errors import AdapterError, AdapterNotFoundError, short_repr
from quire.messages.lora import LoRARequest, check_adapter_name
from quire.server.context import ServerContext
from quire.server.errors import ApiError, not_found
from quire.server.http import Exchange
from quire.server.protocol.common import Body
from quire.server.protocol.values import Name
from quire.server.routing import Route


class LoadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/load_lora_adapter; names are vLLM's."""

    lora_name: Name
    lora_path: Name
    """A folder under --allowed-lora-path; a relative one is looked for in each of them."""
    load_inplace: bool = False
    """Replace the adapter of the same name; without, a name that is loaded is refused."""
    base_model_name: str | None = None
    pinned: bool = False
    """It leaves the device only if no other adapter can make room."""
    is_3d_lora_weight: bool = False
    """Accepted without effect: how experts are stored is found from the tensors."""


class UnloadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/unload_lora_adapter; names are vLLM's."""

    lora_name: Name
    lora_int_id: int | None = None
    """Accepted without effect."""


class AdapterAnswer(msgspec.Struct):
    """An adapter that was loaded or unloaded."""

    id: str
    parent: str
    rank: int
    bytes: int
    """Of its tensors."""
    digest: str
    """Of its content."""
    message: str
    """What was done."""
    object: str = "adapter"


async def load(context: ServerContext, exchange: Exchange) -> None:
    """Load an adapter: its files are checked, and requests can name it as their model from now on. Running requests
    are not disturbed; engines read the adapter for its first request."""
    request = await exchange.read_json(LoadAdapterRequest)
    if not request.lora_name:
        raise _wrong("lora_name is empty", "lora_name")
    name = check_adapter_name(request.lora_name, "lora_name")
    if name in context.names:
        raise _wrong(f"{short_repr(name)} is the name of the model itself", "lora_name")
    if name in context.adapters and not request.load_inplace:
        raise _wrong(f"the adapter {short_repr(name)} has already been loaded: load_inplace replaces it", "lora_name")
    folder = _allowed(context, request.lora_path)
    number = 1 + max((entry.number for entry in context.adapters), default=0)
    async with exchange.interruptible(context.deadline(None)):
        try:
            wanted = LoRARequest(
                name, number, str(folder), request.base_model_name, load_inplace=request.load_inplace,
                pinned=request.pinned,
            )  # fmt: skip
            # If the client leaves now, all fronts must have the adapter nevertheless, or none.
            entry = await asyncio.shield(asyncio.ensure_future(_add(context, wanted)))
        except AdapterNotFoundError as error:
            raise not_found(_without_folder(error, folder), "lora_path") from None
        except AdapterError as error:
            raise _wrong(_without_folder(error, folder), "lora_path") from None
        await exchange.reply(_answer(context, entry, "loaded"))


async def _add(context: ServerContext, wanted: LoRARequest) -> AdapterEntry:
    entry = await asyncio.to_thread(context.adapters.add, wanted)
    await context.share_adapters()
    return entry


async def unload(context: ServerContext, exchange: Exchange) -> None:
    """Unload an adapter: new requests cannot name it; those that have begun go on with it to their end."""
    request = await exchange.read_json(UnloadAdapterRequest)
    if not request.lora_name:
        raise _wrong("lora_name is empty", "lora_name")
    try:
        entry = context.adapters.remove(request.lora_name)
    except AdapterNotFoundError as error:
        raise not_found(str(error), "lora_name") from None
    await context.share_adapters()
    await exchange.reply(_answer(context, entry, "unloaded"))


def _allowed(context: ServerContext, given: str) -> Path:
    """The folder, if it is under an allowed one when all links are followed."""
    if "\0" not in given:
        for root in context.config.allowed_lora_path:
            top = Path(root).resolve()
            try:
                folder = (top / given).resolve()
            except (OSError, RuntimeError):  # a loop of links
                continue
            if folder != top and folder.is_relative_to(top):
                return folder
    raise _wrong(f"lora_path {short_repr(given)} is not a folder under --allowed-lora-path", "lora_path")


def _wrong(message: str, field: str) -> ApiError:
    """A 400 of the type that vLLM gives it."""
    return ApiError(400, message, "InvalidUserInput", field)


def _without_folder(error: Exception, folder: Path) -> str:
    """The message without the server's own paths."""
    return str(error).replace(str(folder), folder.name)


def _answer(context: ServerContext, entry: AdapterEntry, done: str) -> AdapterAnswer:
    # vLLM answers with a text; clients look for "success" in it.
    message = f"the adapter {short_repr(entry.name)} was {done} successfully"
    return AdapterAnswer(entry.name, context.names[0], entry.rank, entry.nbytes, entry.digest.hex(), message)


ROUTES = [
    Route(
        "POST",
        "/v1/load_lora_adapter",
        load,
        body=LoadAdapterRequest,
        answer=AdapterAnswer,
        errors=(503,),
        needs_admin=True,
        is_hubs=True,
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        unload,
        body=UnloadAdapterRequest,
        answer=AdapterAnswer,
        needs_admin=True,
        is_hubs=True,
    ),
]
