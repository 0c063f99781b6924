"""A reverse proxy that has a server below a path and strips it, as nginx with `location /a/ { proxy_pass …/; }`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@contextmanager
def proxied(url: str, path: str) -> Iterator[str]:
    """The address of `url` behind the proxy, below `path`; other paths are 404, as they may be other services."""
    client = httpx.Client(base_url=url, timeout=60)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def _forward(self) -> None:
            if not self.path.startswith(path + "/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            inner = self.path.removeprefix(path)
            with client.stream(self.command, inner, content=body or None, headers=headers) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                try:
                    for piece in answer.iter_raw():
                        self.wfile.write(piece)
                        self.wfile.flush()
                except OSError:  # the browser left
                    pass
            self.close_connection = True

        do_GET = do_POST = _forward  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{path}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        client.close()
