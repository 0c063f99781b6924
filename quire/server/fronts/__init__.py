"""Several front processes on one port (`--api-server-count`).

The first process, the hub, owns the engines, the router, admission, metrics and the admin routes, and serves requests
like the others. Each further front reads the same listening socket, renders, tokenizes, detokenizes and writes streams,
and reaches the engines through the hub:

    client ─→ front ─→ Add ─→ hub ─→ Add ─→ engine
    client ←─ front ←─ Outputs ←─ hub ←─ Outputs ←─ engine        one message a step for each front

A front speaks the engine's own messages (`quire.engine.ipc`), and a few more (`messages.py`).
"""
