"""One file per family of routes: `async def route(context, exchange)`."""
