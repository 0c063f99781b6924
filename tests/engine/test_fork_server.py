"""The grammar fork server: what its process loads, and when engines start it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import AsyncLLM, SamplingParams, StructuredOutputsParams
from quire.engine.grammar import wire
from quire.engine.grammar.fork_server import ForkServerClient
from quire.loading.files import local_files
from tests.conftest import TINY_VOCAB
from tests.processes import children

NEEDS_MORE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "xgrammar.matcher":
            import torch
            torch.nn.Module

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` with which xgrammar needs a part of torch that it does not need today."""


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[[], ForkServerClient]]:
    made: list[ForkServerClient] = []

    def make() -> ForkServerClient:
        files = local_files("tiny", tiny_model).to_plain()
        spec = wire.ForkServerSpec(None, files, False, None, TINY_VOCAB, [1], rows=2, memory_bytes=1 << 30)
        made.append(ForkServerClient(spec))
        while not made[-1].is_ready:
            made[-1].poll()
            assert not made[-1].death
            time.sleep(0.01)
        return made[-1]

    yield make
    for client in made:
        client.close()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_fork_server_that_exits_leaves_no_zombie(start: Callable[[], ForkServerClient]) -> None:
    """It exits when it is idle, and its client may be idle as well."""
    client = start()
    os.kill(client.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{client.pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.close()
    client.poll()
    assert client.death


def test_it_exits_in_silence_with_an_engine_that_was_killed(tiny_model: Path) -> None:
    """Messages that the engine had not read yet reset the connection."""
    files = local_files("tiny", tiny_model).to_plain()
    spec = wire.ForkServerSpec(None, files, False, None, TINY_VOCAB, [1], rows=2, memory_bytes=1 << 30)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.grammar.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
    with ours:
        ours.send(wire.encode(spec))
        assert ours.recv(wire.MESSAGE_BYTES, socket.MSG_PEEK) == wire.READY
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_torch_stays_out_of_the_process(start: Callable[[], ForkServerClient]) -> None:
    assert not has_torch(start().pid)


@pytest.mark.slow
def test_an_xgrammar_that_needs_more_of_torch_gets_it(
    start: Callable[[], ForkServerClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEEDS_MORE)
    monkeypatch.syspath_prepend(tmp_path)
    assert has_torch(start().pid)


def fork_servers(pid: int) -> list[int]:
    """Of an engine's process."""
    return [
        one for one in children(pid) if b"quire.engine.grammar.process" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def test_engines_get_ready_when_another_gets_a_grammar(tiny_model: Path) -> None:
    async def generate(llm: AsyncLLM, form: StructuredOutputsParams | None) -> str:
        params = SamplingParams(max_tokens=8, structured_outputs=form)
        return [output async for output in llm.generate("the world", params)][-1].outputs[0].text

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def work() -> None:
        settings = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", "data_parallel_size": 2}
        async with AsyncLLM(tiny_model, **settings) as llm:
            one, other = llm.replicas
            await generate(llm, None)
            assert not fork_servers(one.pid) and not fork_servers(other.pid), "none is used yet"
            assert await generate(llm, StructuredOutputsParams(choice=["aa"])) == "aa"
            await until(lambda: bool(fork_servers(one.pid) and fork_servers(other.pid)))
            killed = one.pid
            os.kill(killed, signal.SIGKILL)
            await until(lambda: one.pid != killed and not one.death)
            assert fork_servers(one.pid), "the next engine of its place starts with one"

    asyncio.run(asyncio.wait_for(work(), 120))
