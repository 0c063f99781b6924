"""A front's own process: `python -m quire.server.fronts.process LINK LISTENING COUNTS`, started by the hub.

The arguments are descriptors: of the socket to the hub, of the listening socket, and of the counters.
"""

from __future__ import annotations

import logging
import socket
import sys

from quire.executor.child import ChildLink, exit_with_peer, ignore_signals, load_context
from quire.resource_limits import raise_descriptor_limit


def main() -> int:
    """Run the process."""
    ignore_signals()
    raise_descriptor_limit()
    link, listening, counts = (int(given) for given in sys.argv[1:4])
    sock = socket.socket(fileno=link)
    sock.set_inheritable(False)
    exit_with_peer(sock)
    # Imported here: it takes a second, and `exit_with_peer` must run before.
    from quire.server.fronts import messages
    from quire.server.fronts.front import FrontLLM, HubEngine, run_front
    from quire.server.observability.logs import set_up
    from quire.server.serve import run_loop

    start = messages.decode_to_front(ChildLink(sock).next_payload())
    assert isinstance(start, messages.StartFront)
    if start.import_path:
        sys.path[:] = start.import_path
    set_up(start.server["log_format"], logging.getLevelName(start.log_level))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config, files, model = load_context(start)
    hub = HubEngine(sock, start, files, model)
    llm = FrontLLM.behind(hub, start.first_id, config, files, model)
    run_loop(run_front(start, hub, llm, socket.socket(fileno=listening), counts))
    llm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
