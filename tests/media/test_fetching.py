"""Fetching images: from allowed hosts at public addresses only, within bounds of bytes and time."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import MediaError
from quire.media.fetching import Fetcher
from quire.media.limits import MediaLimits
from tests.media.files import (
    HOST,
    PUBLIC,
    LoopbackServer,
    answer_whole,
    drip,
    encoded,
    make_certificate,
    noise,
    peak_memory,
)

URL = f"https://{HOST}/a.png"
PNG = encoded(noise(20, 10))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def serve(certificate: tuple[Path, Path]) -> Iterator[Callable[..., LoopbackServer]]:
    opened = []

    def start(answer: Callable[[str, ssl.SSLSocket], None]) -> LoopbackServer:
        opened.append(LoopbackServer(*certificate, answer))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def fetcher(server: LoopbackServer, resolve: Any = None, **limits: Any) -> Fetcher:
    given = MediaLimits(**{"allowed_hosts": (HOST,), "timeout": 5.0, **limits})
    return Fetcher(given, resolve or (lambda host, port: [PUBLIC]), server.connect, server.trust)


def no_connection(address: str, port: int, seconds: float) -> Any:
    raise AssertionError(f"a connection to {address}:{port}")


def refused(fetch: Fetcher, url: str, says: str) -> MediaError:
    with pytest.raises(MediaError, match=says) as caught:
        fetch.fetch(url)
    return caught.value


class TestWhatIsFetched:
    def test_an_image_of_an_allowed_host(self, serve: Callable[..., LoopbackServer]) -> None:
        server = serve(lambda path, link: answer_whole(link, PNG))
        assert fetcher(server).fetch(f"https://{HOST}/cats/a b.png?size=2#x") == PNG
        assert server.connected == [(PUBLIC, 443)]
        (head,) = server.requests
        assert head.startswith("GET /cats/a%20b.png?size=2 HTTP/1.1\r\n")
        assert f"Host: {HOST}\r\n" in head and "Accept-Encoding: identity" in head

    def test_a_chunked_body(self, serve: Callable[..., LoopbackServer]) -> None:
        def answer(path: str, link: ssl.SSLSocket) -> None:
            pieces = [PNG[:100], PNG[100:]]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            link.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)

        assert fetcher(serve(answer)).fetch(URL) == PNG

    @pytest.mark.parametrize("allowed", [f"*.{HOST}", "*", f"cdn.{HOST}"])
    def test_hosts_below_a_name_or_any(self, serve: Callable[..., LoopbackServer], allowed: str) -> None:
        server = serve(lambda path, link: answer_whole(link, PNG))
        assert fetcher(server, allowed_hosts=(allowed,)).fetch(f"https://CDN.{HOST}./x") == PNG

    def test_redirects_are_followed_by_hand(self, serve: Callable[..., LoopbackServer]) -> None:
        def answer(path: str, link: ssl.SSLSocket) -> None:
            if path == "/a.png":
                answer_whole(link, b"", "302 Found", Location="/b.png")
            else:
                answer_whole(link, PNG)

        server = serve(answer)
        asked: list[str] = []

        def resolve(host: str, port: int) -> list[str]:
            asked.append(host)
            return [PUBLIC]

        assert fetcher(server, resolve).fetch(URL) == PNG
        assert asked == [HOST, HOST]


class TestWhatIsNotFetched:
    @pytest.mark.parametrize(
        "url, says",
        [
            ("http://images.example.com/a.png", "only https"),
            ("ftp://images.example.com/a.png", "only https"),
            ("https://other.example.com/a.png", "not among those"),
            ("https://images.example.com.evil.example/a", "not among those"),
            ("https://evilimages.example.com/a", "not among those"),
            ("https://images.example.com:22/a", "not among those"),
            ("https://a:b@images.example.com/a", "user name"),
            ("https://images.example.com@evil.example/a", "user name"),
            ("https:///a", "not among those"),
            ("https://[::1", "not a URL"),
            ("https://images.example.com:99999/", "not a URL"),
            ("https://169.254.169.254/latest/meta-data", "not among those"),
            ("https://" + "a" * 5000, "characters"),
        ],
    )
    def test_urls_that_are_not_allowed(self, url: str, says: str) -> None:
        limits = MediaLimits(allowed_hosts=(HOST,))
        refused(Fetcher(limits, lambda host, port: [PUBLIC], no_connection), url, says)

    def test_nothing_unless_hosts_are_allowed(self) -> None:
        refused(Fetcher(MediaLimits(), lambda host, port: [PUBLIC], no_connection), URL, "--allowed-media-hosts")

    @pytest.mark.parametrize(
        "found", [["169.254.169.254"], ["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], []]
    )
    def test_names_that_resolve_to_the_servers_own_network(self, found: list[str]) -> None:
        fetch = Fetcher(MediaLimits(allowed_hosts=("*",)), lambda host, port: found, no_connection)
        assert refused(fetch, "https://rebound.example/a.png", "not public").reason == "address"

    @pytest.mark.parametrize(
        "host", ["169.254.169.254", "localhost", "127.1", "0x7f000001", "2130706433", "[::1]", "[::ffff:127.0.0.1]"]
    )
    def test_addresses_in_the_url_are_judged_as_the_system_resolves_them(self, host: str) -> None:
        fetch = Fetcher(MediaLimits(allowed_hosts=("*",)), connect=no_connection)
        refused(fetch, f"https://{host}/a.png", "not public|cannot be resolved")

    def test_an_answer_of_the_resolver_that_changes_has_no_effect(self, serve: Callable[..., LoopbackServer]) -> None:
        server = serve(lambda path, link: answer_whole(link, PNG))
        answers = iter([[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])
        assert fetcher(server, lambda host, port: next(answers)).fetch(URL) == PNG
        assert server.connected == [(PUBLIC, 443)]  # the judged address, not a name that is resolved again

    @pytest.mark.parametrize(
        "location, says",
        [
            ("https://169.254.169.254/latest", "not among those"),
            ("http://images.example.com/b.png", "only https"),
            ("https://localhost/b.png", "not among those"),
            ("file:///etc/passwd", "only https"),
            (f"https://inner.{HOST}/b.png", "not public"),
        ],
    )
    def test_redirects_are_judged_like_the_first_url(
        self, serve: Callable[..., LoopbackServer], location: str, says: str
    ) -> None:
        server = serve(lambda path, link: answer_whole(link, b"", "301 Moved", Location=location))

        def resolve(host: str, port: int) -> list[str]:
            return ["10.1.2.3"] if host.startswith("inner") else [PUBLIC]

        refused(fetcher(server, resolve, allowed_hosts=(HOST, f"*.{HOST}")), URL, says)
        assert len(server.connected) == 1

    def test_redirects_without_end(self, serve: Callable[..., LoopbackServer]) -> None:
        server = serve(lambda path, link: answer_whole(link, b"", "307 Again", Location=path + "x"))
        refused(fetcher(server), URL, "more than 3 redirects")
        assert len(server.connected) == 4

    def test_a_server_with_another_certificate(self, serve: Callable[..., LoopbackServer]) -> None:
        server = serve(lambda path, link: answer_whole(link, PNG))
        refused(fetcher(server, allowed_hosts=("*",)), "https://other.example/a.png", "cannot be fetched: SSL")
        assert server.requests == []

    @pytest.mark.parametrize(
        "headers, says",
        [
            ({"Content_Type": "text/html; charset=utf-8"}, "'text/html', which is no image"),
            ({"Content_Encoding": "gzip"}, "Content-Encoding 'gzip'"),
            ({"Content_Length": "999999999"}, "at most 1000000 "),
        ],
    )
    def test_answers_that_are_no_image(
        self, serve: Callable[..., LoopbackServer], headers: dict[str, str], says: str
    ) -> None:
        server = serve(lambda path, link: answer_whole(link, PNG, **headers))
        refused(fetcher(server, max_bytes=1_000_000), URL, says)

    @pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content"])
    def test_answers_with_another_status(self, serve: Callable[..., LoopbackServer], status: str) -> None:
        server = serve(lambda path, link: answer_whole(link, b"", status))
        refused(fetcher(server), URL, status[:3])

    def test_no_secret_of_a_url_is_repeated(self, serve: Callable[..., LoopbackServer]) -> None:
        server = serve(lambda path, link: answer_whole(link, b"", "403 Forbidden"))
        assert "hunter2" not in str(refused(fetcher(server), f"{URL}?key=hunter2", "403"))


class TestBounds:
    @pytest.mark.parametrize("what", ["head", "body", "nothing"])
    def test_a_slow_server_has_so_much_time_in_all(self, serve: Callable[..., LoopbackServer], what: str) -> None:
        def answer(path: str, link: ssl.SSLSocket) -> None:
            if what == "nothing":
                time.sleep(3)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
            if what == "body":
                link.sendall(head)
            drip(link, b"x" * 300 if what == "body" else head, 0.02)

        begin = time.monotonic()
        refused(fetcher(serve(answer), timeout=0.5), URL, "within 0.5 seconds")
        assert time.monotonic() - begin < 2.5

    def test_a_body_without_end(self, serve: Callable[..., LoopbackServer]) -> None:
        def answer(path: str, link: ssl.SSLSocket) -> None:
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
            while True:
                link.sendall(bytes(1 << 16))

        with peak_memory() as grown:
            refused(fetcher(serve(answer), max_bytes=4 << 20), URL, "at most 4194304")
            assert grown() < 48 << 20

    def test_headers_without_end(self, serve: Callable[..., LoopbackServer]) -> None:
        def answer(path: str, link: ssl.SSLSocket) -> None:
            link.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                link.sendall(b"X-A: " + b"b" * 60_000 + b"\r\n")

        refused(fetcher(serve(answer), max_bytes=1000), URL, "too many bytes|cannot be fetched")

    def test_work_that_is_no_longer_wanted_ends(self, serve: Callable[..., LoopbackServer]) -> None:
        class UnwantedError(Exception):
            pass

        calls = []

        def check() -> None:
            calls.append(1)
            if len(calls) > 3:
                raise UnwantedError

        server = serve(lambda path, link: drip(link, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", 0.01))
        with pytest.raises(UnwantedError):
            fetcher(server).fetch(URL, check=check)
