"""Fetches media from https URLs, from allowed hosts with public addresses only.

A name is resolved once for each hop. Every address of it is judged before a packet is sent, and the connection is made
to a judged address, so that a second answer of the resolver has no effect. Redirects are followed by hand, each judged
like the first URL. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from quire.errors import MediaError, short_repr
from quire.media.addresses import is_public
from quire.media.limits import MAX_REDIRECTS, Check, MediaLimits, no_check

HTTPS_PORT = 443
LONGEST_URL = 4096
PIECE_BYTES = 1 << 16
HEADER_BYTES = 1 << 18
"""Most bytes of a response besides its body."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
BINARY_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Content types that say nothing; the file's own first bytes do."""

Resolve = Callable[[str, int], Sequence[str]]
"""Addresses of a host, given its name and the port."""
Connect = Callable[[str, int, float], socket.socket]
"""A TCP connection to an address and port, within so many seconds."""


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system resolves it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A connection to an address, which is no name."""
    return socket.create_connection((address, port), timeout=seconds)


class Fetcher:
    """Fetches files within `limits`. Any thread may call it."""

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Resolve = resolve,
        connect: Connect = connect,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`resolve`, `connect`, `tls`: the system's, unless a test gives its own."""
        self._limits = limits
        self._resolve = resolve
        self._connect = connect
        self._tls = tls
        self._exact, self._below = _host_rules(limits.allowed_hosts)

    def fetch(self, url: str, kinds: Sequence[str] = ("image/",), check: Check = no_check) -> bytes:
        """The file that a URL names; `kinds`: prefixes of the content types it may have."""
        if not self._limits.allowed_hosts:
            raise MediaError(
                "this server fetches no URLs: send the image as a data URL (data:image/png;base64,…), or start the "
                "server with --allowed-media-hosts",
                reason="url",
            )
        deadline = time.monotonic() + self._limits.timeout
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._get(url, kinds, deadline, check)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer.location)
        except (TimeoutError, OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            raise self._failed(url, error, deadline) from None
        raise MediaError(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects", reason="redirect")

    def _get(self, url: str, kinds: Sequence[str], deadline: float, check: Check) -> bytes | _Redirect:
        parts, host, port = self._checked(url)
        address = self._judged(host, port)
        check()
        plain = self._connect(address, port, _left(deadline))
        link = _Link(plain, deadline, self._limits.max_bytes + HEADER_BYTES, check)
        try:
            link.secure(self._tls or ssl.create_default_context(), host)
            return self._exchange(link, parts, host, port, kinds)
        finally:
            link.close()

    def _exchange(
        self, link: _Link, parts: SplitResult, host: str, port: int, kinds: Sequence[str]
    ) -> bytes | _Redirect:
        shown = f"[{host}]" if ":" in host else host
        lines = [
            f"GET {_path(parts)} HTTP/1.1",
            f"Host: {shown}" if port == HTTPS_PORT else f"Host: {shown}:{port}",
            "User-Agent: quire",
            "Accept: image/*, video/*;q=0.5, */*;q=0.1",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        link.send("\r\n".join([*lines, "", ""]).encode("ascii"))
        response = http.client.HTTPResponse(link, method="GET")  # type: ignore[arg-type]  # it needs `makefile` only
        response.begin()
        url = parts.geturl()
        if response.status in REDIRECTS:
            location = response.getheader("Location")
            if not location or len(location) > LONGEST_URL:
                raise MediaError(f"{_shown(url)}: a redirect without a usable Location", reason="redirect")
            return _Redirect(location)
        if response.status != 200:
            raise MediaError(f"{_shown(url)}: its server answered with status {response.status}", reason="fetch")
        self._check_headers(url, response, kinds)
        return self._read(url, response)

    def _check_headers(self, url: str, response: http.client.HTTPResponse, kinds: Sequence[str]) -> None:
        coding = (response.getheader("Content-Encoding") or "identity").strip().lower()
        if coding != "identity":
            raise MediaError(f"{_shown(url)}: Content-Encoding {coding[:40]!r} is not accepted", reason="type")
        kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
        if kind not in BINARY_TYPES and not any(kind.startswith(prefix) for prefix in kinds):
            raise MediaError(f"{_shown(url)}: its content type is {kind[:60]!r}, which is no image", reason="type")
        declared = response.getheader("Content-Length")
        if declared is not None and declared.isdecimal() and int(declared) > self._limits.max_bytes:
            raise self._too_large(url, int(declared))

    def _read(self, url: str, response: http.client.HTTPResponse) -> bytes:
        pieces, size = [], 0
        while piece := response.read(PIECE_BYTES):
            size += len(piece)
            if size > self._limits.max_bytes:
                raise self._too_large(url, size)
            pieces.append(piece)
        return b"".join(pieces)

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """The URL's parts, its host and port, if they are allowed."""
        if len(url) > LONGEST_URL:
            raise MediaError(f"a URL of {len(url)} characters; at most {LONGEST_URL}", reason="url")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise MediaError(f"{_shown(url)} is not a URL", reason="url") from None
        if parts.scheme.lower() != "https":
            raise MediaError(f"{_shown(url)}: only https URLs are fetched", reason="url")
        if parts.username is not None or parts.password is not None:
            raise MediaError(f"{_shown(parts.hostname or '')}: a URL with a user name is not fetched", reason="url")
        host = _host_name(parts.hostname or "")
        port = HTTPS_PORT if port is None else port
        if not host or not self._is_allowed(host, port):
            raise MediaError(
                f"the host {short_repr(parts.netloc[:200])} is not among those that images are fetched from "
                "(--allowed-media-hosts)",
                reason="url",
            )
        return parts, host, port

    def _is_allowed(self, host: str, port: int) -> bool:
        if (host, port) in self._exact:
            return True
        return any(port == allowed and (not below or host.endswith(f".{below}")) for below, allowed in self._below)

    def _judged(self, host: str, port: int) -> str:
        """An address of the host; raises unless all that it resolves to are public."""
        try:
            found = self._resolve(host, port)
        except (OSError, UnicodeError):
            raise MediaError(f"the host {short_repr(host)} cannot be resolved", reason="fetch") from None
        if not found or not all(is_public(address) for address in found):
            raise MediaError(
                f"the host {short_repr(host)} has an address that is not public, and is not fetched from",
                reason="address",
            )
        return found[0]

    def _failed(self, url: str, error: Exception, deadline: float) -> MediaError:
        if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            return MediaError(
                f"{_shown(url)}: not fetched within {self._limits.timeout:g} seconds (--media-timeout)", reason="time"
            )
        return MediaError(f"{_shown(url)} cannot be fetched: {type(error).__name__}", reason="fetch")

    def _too_large(self, url: str, size: int) -> MediaError:
        return MediaError(
            f"{_shown(url)} has {size} bytes or more; at most {self._limits.max_bytes} (--max-image-bytes)",
            reason="bytes",
        )


class _Redirect:
    """An answer that names another URL."""

    def __init__(self, location: str) -> None:
        self.location = location


class _Link(io.RawIOBase):
    """A connection whose whole use ends at a deadline, and that reads a bounded number of bytes."""

    def __init__(self, plain: socket.socket, deadline: float, most: int, check: Check) -> None:
        self._socket = plain
        self._deadline = deadline
        self._left = most
        self._check = check

    def secure(self, tls: ssl.SSLContext, host: str) -> None:
        """Begin TLS: the certificate must be the host's."""
        self._socket.settimeout(_left(self._deadline))
        self._socket = tls.wrap_socket(self._socket, server_hostname=host)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(_left(self._deadline))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What an HTTP response reads from."""
        return io.BufferedReader(self, PIECE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._check()
        self._socket.settimeout(_left(self._deadline))
        size = self._socket.recv_into(buffer)
        self._left -= size
        if self._left < 0:
            raise MediaError("the response has too many bytes", reason="bytes")
        return size

    def close(self) -> None:
        self._socket.close()
        super().close()


def _left(deadline: float) -> float:
    """Seconds until the deadline; raises after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _host_rules(hosts: Sequence[str]) -> tuple[frozenset[tuple[str, int]], list[tuple[str, int]]]:
    """Hosts that are allowed by name, and names below which all are ("": any), each with its port."""
    exact, below = set(), []
    for entry in hosts:
        name, mark, port = entry.rpartition(":")
        has_port = bool(mark) and port.isdecimal() and not (":" in name and not name.endswith("]"))
        host, number = (name, int(port)) if has_port else (entry, HTTPS_PORT)
        if host == "*":
            below.append(("", number))
        elif host.startswith("*."):
            below.append((_host_name(host[2:]), number))
        else:
            exact.add((_host_name(host.strip("[]")), number))
    return frozenset(exact), below


def _host_name(name: str) -> str:
    """A host in the form in which names are compared; "" if it is none."""
    name = name.strip().rstrip(".").lower()
    try:
        return name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _path(parts: SplitResult) -> str:
    """The path and query of a request line; raises for characters that would end it."""
    path = parts.path or "/"
    whole = f"{path}?{parts.query}" if parts.query else path
    if not whole.isascii() or any(character <= " " or character == "\x7f" for character in whole):
        from urllib.parse import quote

        whole = quote(whole, safe="/?&=+:;,@!$'()*~%-._[]")
    return whole


def _shown(url: str) -> str:
    """A URL in an error: its query may hold a secret, and is left out."""
    return short_repr(url.partition("?")[0][:200])
