"""One file a family of routes: `async def route(server, exchange)`."""
