"""Files of images for tests, good and bad, and a server on the loopback that answers as if it were public."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
import ssl
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PUBLIC = "93.184.216.34"
"""An address that is judged public. No packet is sent to it: tests connect to the loopback instead."""
HOST = "images.example.com"


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_header(width: int, height: int, rest: bytes = b"") -> bytes:
    """A PNG that says it is so large; its pixels are all black, compressed as far as they are given."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = rest or zlib.compress(b"\0" * min(3 * width + 1, 1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def gif(frames: int, size: int = 1) -> bytes:
    """A GIF of many tiny frames."""
    head = b"GIF89a" + struct.pack("<HH", size, size) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = (
        b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c" + struct.pack("<HHHH", 0, 0, size, size) + b"\0" + b"\x02\x02\x44\x01\0"
    )
    return head + frame * frames + b"\x3b"


def make_certificate(folder: Path, name: str = HOST) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}", "-addext",
        f"subjectAltName=DNS:{name},DNS:*.{name}", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl is needed to make a certificate")
    return certificate, key


class LoopbackServer:
    """A TLS server on the loopback. `answer` writes each response; it gets the path and the connection."""

    def __init__(self, certificate: Path, key: Path, answer: Callable[[str, ssl.SSLSocket], None]) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        self.trust = ssl.create_default_context(cafile=str(certificate))
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: list[str] = []
        """The heads of all requests."""
        self.connected: list[tuple[str, int]] = []
        """Addresses that were connected to, as the client thinks."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        """In place of a connection to the address."""
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(plain,), daemon=True).start()

    def _talk(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._tls.wrap_socket(plain, server_side=True) as link:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (piece := link.recv(4096)):
                    return
                head += piece
            self.requests.append(head.decode("latin-1"))
            self._answer(head.split()[1].decode("latin-1"), link)


def answer_whole(link: ssl.SSLSocket, body: bytes, status: str = "200 OK", **headers: str) -> None:
    given = {"Content_Type": "image/png", "Content_Length": str(len(body)), **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items())]
    link.sendall("\r\n".join([*lines, "", ""]).encode() + body)


def drip(link: ssl.SSLSocket, data: bytes, seconds: float) -> None:
    """Send byte by byte."""
    for byte in data:
        link.sendall(bytes([byte]))
        time.sleep(seconds)


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """How many bytes the process's resident memory has grown at its peak since the start."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    start = resident()
    seen = [start]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max([*seen, resident()]) - start
    finally:
        stop.set()
        thread.join()
