"""Many readers at once, some slow, and prompts that take long to prepare: the event loop is not blocked."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import AsyncLLM, RequestOutputKind, SamplingParams

T = TypeVar("T")
PAGE = resource.getpagesize()


class NullLLM(AsyncLLM):
    """Its engine computes nothing: these tests are about the front process."""

    engine_module = "benchmarks.null_engine"


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)


def run(work: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(bounded())


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


async def read(llm: AsyncLLM, count: int, pause: float = 0.0) -> tuple[int, int]:
    """The tokens of a request, and the outputs they came in."""
    tokens = outputs = 0
    async for output in llm.generate([5, 6, 7], params(count)):
        tokens += len(output.outputs[0].token_ids)
        outputs += 1
        if pause:
            await asyncio.sleep(pause)
    return tokens, outputs


def test_five_hundred_streams_at_once_leave_no_memory_behind(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "200")

    async def work() -> list[int]:
        used = []
        async with NullLLM(tiny_model) as llm:
            for _ in range(5):
                results = await asyncio.gather(*(read(llm, 40) for _ in range(500)))
                assert {tokens for tokens, _ in results} == {40}
                assert not (llm._streams or llm.replicas[0].streams or llm._outputs._open)
                used.append(resident_bytes())
        return used

    used = run(work())
    # Later rounds need no new memory; 500 streams of this size hold several MB while they run.
    assert used[-1] - used[1] < 2 * 2**20, [size >> 10 for size in used]


def test_unread_outputs_of_slow_readers_are_merged_to_one_each(tiny_model: Path) -> None:
    """An engine without delays makes all tokens at once: a reader of one output has the rest waiting."""

    async def slow(llm: AsyncLLM) -> list[int]:
        sizes = []
        async for output in llm.generate([5, 6, 7], params(200)):
            sizes.append(len(output.outputs[0].token_ids))
            assert output.outputs[0].text
            await asyncio.sleep(0.5)
        return sizes

    async def work() -> list[list[int]]:
        async with NullLLM(tiny_model) as llm:
            return await asyncio.gather(*(slow(llm) for _ in range(50)))

    for sizes in run(work()):
        assert sum(sizes) == 200
        assert len(sizes) < 20


def test_a_slow_reader_does_not_delay_others(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "100")

    async def work() -> tuple[tuple[int, int], tuple[int, int]]:
        async with NullLLM(tiny_model) as llm:
            slow = asyncio.ensure_future(read(llm, 200, pause=0.3))
            quick = [asyncio.ensure_future(read(llm, 200)) for _ in range(5)]
            done, _ = await asyncio.wait(quick, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result(), await slow

    (tokens, outputs), (slow_tokens, slow_outputs) = run(work())
    assert tokens == slow_tokens == 200
    assert outputs > 4 * slow_outputs


def test_a_huge_prompt_does_not_block_the_loop(tiny_model: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def work() -> int:
        async with NullLLM(tiny_model) as llm:
            clock = asyncio.ensure_future(tick())
            await asyncio.sleep(0.01)
            before = ticks
            asked = params(1, truncate_prompt_tokens=100)
            outputs = [output async for output in llm.generate("the world " * 60_000, asked)]
            clock.cancel()
            assert len(outputs[-1].prompt_token_ids) == 100
            return ticks - before

    assert run(work()) > 20
