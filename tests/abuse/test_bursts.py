"""Many small requests at once are not prepared in one go: in between, running streams get their tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire.server.lifecycle.loop_turns import AT_ONCE, LoopTurns
from quire.server.protocol.fields import FieldReader
from tests.server.conftest import Live

CLIENTS = 200
PATIENCE_SECONDS = 60.0


class PassCounter:
    """Counts passes of an event loop: between two of them it looks at its sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.passes = 0
        self._loop = loop
        self._is_over = False
        loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        self.passes += 1
        if not self._is_over:
            self._loop.call_soon(self._count)

    def close(self) -> None:
        self._is_over = True


def test_a_burst_is_prepared_in_many_passes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pass: Counter[int] = Counter()
    order: list[int] = []
    decode = FieldReader.decode

    def noted(self: FieldReader, data: bytes, kind: Any) -> Any:
        in_pass[counter.passes] += 1
        body = decode(self, data, kind)
        order.append(body.seed)
        return body

    monkeypatch.setattr(FieldReader, "decode", noted)
    held = threading.Event()
    live.call(lambda: held.wait(PATIENCE_SECONDS))  # type: ignore[arg-type, return-value]
    counter = PassCounter(live._loop)
    address = urlsplit(live.url)
    clients = []
    for number in range(CLIENTS):
        body = json.dumps({"prompt": "abc", "max_tokens": 1, "seed": number}).encode()
        client = socket.create_connection((address.hostname, address.port or 80), PATIENCE_SECONDS)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        clients.append(client)
    held.set()  # now all of them are there at once
    answers = []
    for client in clients:
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
        client.close()
        answers.append(data.split()[1])
    counter.close()
    assert answers == [b"200"] * CLIENTS
    assert max(in_pass.values()) <= 2 * AT_ONCE, in_pass
    assert sorted(order) == list(range(CLIENTS))
    live.assert_idle()


def test_turns_are_in_order_and_a_cancelled_one_is_passed_on() -> None:
    async def work() -> None:
        turns, seen = LoopTurns(), []

        async def one(number: int) -> None:
            await turns.take()
            seen.append(number)

        tasks = [asyncio.ensure_future(one(number)) for number in range(5 * AT_ONCE)]
        await asyncio.sleep(0)
        assert seen == list(range(AT_ONCE))
        gone = {AT_ONCE, AT_ONCE + 3, 3 * AT_ONCE}
        for number in gone:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert seen == [number for number in range(5 * AT_ONCE) if number not in gone]
        await asyncio.sleep(0)
        assert not turns._is_counting
        await asyncio.wait_for(turns.take(), PATIENCE_SECONDS)  # and it works again

    asyncio.run(work())
