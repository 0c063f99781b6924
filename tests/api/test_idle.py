"""Without requests neither process uses CPU, and the next request starts at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import AsyncLLM, SamplingParams

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

IDLE_SECONDS = 2.0
TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def allm(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, dtype="float32", num_gpu_blocks_override=64, device="cpu")
    yield llm
    llm.shutdown()


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


async def first_token_after(llm: AsyncLLM) -> tuple[float, float]:
    """Seconds until the engine scheduled a request, and until its first token was read."""
    begin = time.monotonic()
    stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    output = await anext(stream)
    read = time.monotonic() - begin
    async for _ in stream:
        pass
    assert output.metrics is not None
    return output.metrics.scheduled_ts - begin, read


def test_idle_takes_no_cpu(allm: AsyncLLM) -> None:
    async def use_and_rest() -> dict[str, float]:
        await first_token_after(allm)
        await asyncio.sleep(0.3)
        pids = {"front": os.getpid(), "engine": allm.replicas[0].pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await asyncio.sleep(IDLE_SECONDS)
        return {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}

    used = asyncio.run(use_and_rest())
    assert used["engine"] <= 2 * TICK, used
    assert used["front"] <= 0.02 * IDLE_SECONDS, used  # with pytest's own work


def test_a_request_after_idling_starts_at_once(allm: AsyncLLM) -> None:
    async def busy_and_rested() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        await first_token_after(allm)
        busy = [await first_token_after(allm) for _ in range(5)]
        rested = []
        for _ in range(5):
            await asyncio.sleep(0.3)
            rested.append(await first_token_after(allm))
        return busy, rested

    busy, rested = asyncio.run(busy_and_rested())
    assert min(taken for taken, _ in rested) < 0.05
    assert min(read for _, read in rested) < 0.05 + 2 * min(read for _, read in busy)
