"""A server that fetches images, from a server on the loopback that counts as public; and clients that hang up."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from quire.media.fetching import Fetcher
from quire.media.loading import MediaLoader
from tests.media.files import (
    HOST,
    PUBLIC,
    LoopbackServer,
    answer_whole,
    data_url,
    encoded,
    make_certificate,
    noise,
    peak_memory,
    png_header,
)
from tests.media.test_server import CHAT, FIXED, asked, by_url, chat, refused, text_part
from tests.server.conftest import Live

IMAGE = noise(40, 24, seed=30)


def answer(path: str, link: ssl.SSLSocket) -> None:
    match path:
        case "/a.png":
            answer_whole(link, encoded(IMAGE))
        case "/moved":
            answer_whole(link, b"", "302 Found", Location=f"https://inner.{HOST}/latest")
        case "/slow":
            time.sleep(20)
        case "/endless":
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
            while True:
                link.sendall(bytes(1 << 16))


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    folder: Path = tmp_path_factory.mktemp("tls")
    server = LoopbackServer(*make_certificate(folder), answer)
    yield server
    server.close()


@pytest.fixture
def fetching(seeing: Live, outside: LoopbackServer) -> Iterator[Live]:
    media = seeing.server.llm.inputs.media
    before = media.loader

    def resolve(host: str, port: int) -> list[str]:
        return ["169.254.169.254"] if host.startswith("inner.") else [PUBLIC]

    media.loader = MediaLoader(before.limits, Fetcher(before.limits, resolve, outside.connect, outside.trust))
    yield seeing
    media.loader = before


def test_an_image_by_its_url_is_the_same_image(fetching: Live, outside: LoopbackServer) -> None:
    made = chat(fetching, asked(by_url(f"https://{HOST}/a.png"), text_part("what?")))
    sent = chat(fetching, asked(by_url(data_url(encoded(IMAGE))), text_part("what?")))
    assert made["choices"] == sent["choices"]
    assert set(outside.connected) == {(PUBLIC, 443)}


@pytest.mark.parametrize(
    "path, says",
    [
        ("moved", "not public"),
        ("slow", "within 2 seconds (--media-timeout)"),
        ("endless", "at most 1048576 (--max-image-bytes)"),
    ],
)
def test_servers_that_attack(fetching: Live, path: str, says: str) -> None:
    refused(fetching, by_url(f"https://{HOST}/{path}"), says)


def wait_for(is_true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_hangs_up_ends_the_work(fetching: Live, outside: LoopbackServer) -> None:
    pool = fetching.server.llm.media_work
    count = len(outside.connected)
    body = {**FIXED, "messages": asked(by_url(f"https://{HOST}/slow"), text_part("?"))}
    with httpx.Client(base_url=fetching.url, timeout=60) as client:
        stop = threading.Thread(target=lambda: (wait_for(lambda: len(outside.connected) > count), client.close()))
        stop.start()
        with pytest.raises((httpx.HTTPError, RuntimeError, OSError, AttributeError)):
            client.post(CHAT, json=body, timeout=0.7)
        stop.join()
    wait_for(lambda: not fetching.server.exchanges)
    # The thread ends with the fetch, whose time is bounded; other requests have others.
    assert chat(fetching, asked(by_url(data_url(encoded(IMAGE))), text_part("what?")), max_tokens=1)["choices"]
    wait_for(lambda: pool.num_running == 0)


def test_memory_stays_flat_under_bombs(seeing: Live) -> None:
    bombs = [
        data_url(png_header(50_000, 50_000)), data_url(png_header(1200, 1200)),
        data_url(encoded(noise(700, 700))[:9000]), data_url(b"<svg/>", "image/svg+xml"), "https://169.254.169.254/", "https://localhost/",
    ]  # fmt: skip
    seeing.post(CHAT, {**FIXED, "messages": asked(by_url(bombs[0]))})
    with peak_memory() as grown:
        for _ in range(20):
            for bomb in bombs:
                answered = seeing.post(CHAT, {**FIXED, "messages": asked(by_url(bomb), text_part("?"))})
                assert answered.status_code == 400
        assert grown() < 48 << 20
    assert seeing.server.llm.inputs.media.loader.memory.held == 0
    page = seeing.client.get("/metrics").text
    assert 'quire:media_refused_total{engine="0",model_name="tiny",reason="pixels"}' in page
    assert "quire:media_items_total" in page and "quire:mm_cache_hits_total" in page
