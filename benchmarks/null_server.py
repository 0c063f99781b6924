"""The real server with an engine that computes nothing: `python benchmarks/null_server.py [MODEL [PORT [FRONTS
[SETTINGS]]]]`.

SETTINGS are of the engine, as JSON. Prints its address when it is ready. NULL_ENGINE_PACE sets the engine's steps per
second (see null_engine.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from quire.api.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.server.config import ServerConfig
from quire.server.serve import serve

MANY = 100_000
"""Requests that may wait: the server is measured, not its limits."""


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else EngineConfig.model
    port = sys.argv[2] if len(sys.argv) > 2 else "0"
    AsyncLLM.engine_module = "benchmarks.null_engine"
    fronts = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    engine = EngineConfig(model=model, **settings)
    config = ServerConfig(port=int(port), api_server_count=fronts, max_queued_requests=MANY)
    return serve(engine, config, lambda server, url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
