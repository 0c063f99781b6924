"""An engine that dies is restarted, one that hangs is detected, and every request gets a response.

Most of this uses the null engine, whose process starts in a moment: the loop, the scheduler and the messages are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.api.replica import Replica
from quire.errors import EngineDeadError
from quire.server.lifecycle import supervisor as module
from quire.server.lifecycle.supervisor import Supervisor, pauses
from tests.processes import descendants, is_gone

T = TypeVar("T")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu"}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields})


def run(work: Awaitable[T], seconds: float = 120) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


async def final(llm: AsyncLLM, prompt: str = "abc", **fields: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params(**fields))][-1]


async def until(condition: Any, seconds: float = 180.0) -> None:
    """Poll until the condition holds; fails after a time limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


class NullLLM(AsyncLLM):
    """Its engine computes nothing."""

    engine_module = "benchmarks.null_engine"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The null engine takes as long as a real one; temporary files go to a private folder."""
    monkeypatch.setenv("NULL_ENGINE_PACE", "300")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of a tiny model would only wait for each other
    monkeypatch.setenv("TMPDIR", str(tmp_path))


async def metric(llm: AsyncLLM, name: str) -> float:
    return next(metric.value for metric in await llm.get_metrics() if metric.name == f"quire:{name}")


@contextlib.asynccontextmanager
async def supervised(
    model: Path, kind: type[AsyncLLM] = NullLLM, restarts: int = 5, **settings: Any
) -> AsyncIterator[tuple[AsyncLLM, Supervisor]]:
    """`restarts`: max_engine_restarts; with 0 requests fail with their engine."""
    async with kind(model, **SETTINGS, max_engine_restarts=restarts) as llm:
        supervisor = Supervisor(llm, **settings)
        supervisor.start()
        yield llm, supervisor
        await supervisor.stop()


def kill(llm: AsyncLLM, number: signal.Signals = signal.SIGKILL) -> int:
    os.kill(llm.replicas[0].pid, number)
    return llm.replicas[0].pid


class Resources:
    """Resources this process may leak: descriptors, child processes, temporary files."""

    def __init__(self) -> None:
        self.descriptors = Counter(map(self._kind, self._descriptors()))
        self.children = {pid for task in Path("/proc/self/task").iterdir() for pid in self._children(task)}
        self.temporary = os.listdir(os.environ["TMPDIR"])

    @staticmethod
    def _descriptors() -> list[str]:
        found = []
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{entry}"))
        return found

    @staticmethod
    def _kind(target: str) -> str:
        return target.split("[")[0]

    @staticmethod
    def _children(task: Path) -> list[str]:
        try:
            return (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that has just ended
            return []


class TestPauses:
    def test_the_first_restart_is_immediate_and_later_ones_are_delayed(self) -> None:
        assert list(itertools.islice(pauses(), 8)) == [0, 1, 2, 4, 8, 16, 30, 30]

    def test_an_engine_that_cannot_start_is_retried_and_the_status_names_the_cause(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start, tries = Replica.start, list[float]()

        def fail(replica: Replica) -> None:
            tries.append(time.monotonic())
            if len(tries) < 4:
                raise OSError("no more processes")
            start(replica)

        async def work() -> None:
            monkeypatch.setattr(module, "pauses", lambda: (pause / 10 for pause in pauses()))
            async with supervised(tiny_model, restarts=0) as (llm, supervisor):
                monkeypatch.setattr(Replica, "start", fail)
                pid = kill(llm)
                statuses = set()
                while not supervisor.restarts:
                    if not supervisor.is_serving:
                        statuses.add(supervisor.status)
                        assert supervisor.retry_after >= 1
                        with pytest.raises(EngineDeadError):
                            await final(llm)
                        assert not (await supervisor.health()).ok
                    await asyncio.sleep(0.005)
                assert len(tries) == 4
                for wait, (before, after) in zip((0.1, 0.2, 0.4), itertools.pairwise(tries), strict=True):
                    assert wait <= after - before < wait + 1
                assert all(f"the engine's process (pid {pid}) was killed by SIGKILL" in status for status in statuses)
                assert any("restarting it failed: no more processes" in status for status in statuses)
                assert (await final(llm)).finished and supervisor.status == "serving"
                assert (await supervisor.health()).ok

        run(work())


class TestDeath:
    def test_open_requests_go_on_and_new_ones_wait(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NULL_ENGINE_PACE", "20")  # no request ends before the engine is killed

        async def work() -> None:
            async with supervised(tiny_model) as (llm, supervisor):
                monkeypatch.setenv("NULL_ENGINE_PACE", "1000")
                streams = [asyncio.ensure_future(final(llm, max_tokens=200)) for _ in range(5)]
                await until(lambda: llm.token_times.tokens > 50)
                kill(llm)
                await until(lambda: llm.errored)
                health = await supervisor.health()
                assert not health.ok and "SIGKILL" in health.message
                late = await final(llm)
                assert len(late.outputs[0].token_ids) == 20 and supervisor.restarts == 1
                for output in await asyncio.gather(*streams):
                    assert len(output.outputs[0].token_ids) == 200
                assert llm.num_resumed >= 1

        run(work())

    def test_without_restarts_every_open_request_fails_and_the_next_engine_serves(
        self, tiny_model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            async with supervised(tiny_model, restarts=0) as (llm, supervisor):
                assert (await supervisor.health()).ok and supervisor.is_serving
                streams = [llm.generate("abc", params(max_tokens=200)) for _ in range(5)]
                for stream in streams:
                    await anext(stream)
                kill(llm)
                begin = time.monotonic()
                for stream in streams:
                    with pytest.raises(EngineDeadError, match="SIGKILL"):
                        async for _ in stream:
                            pass
                assert time.monotonic() - begin < 2
                await asyncio.sleep(0)
                health = await supervisor.health()
                assert not health.ok and "SIGKILL" in health.message and "it is being restarted" in health.message
                assert 1 <= supervisor.retry_after <= 30
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await final(llm)
                await until(lambda: supervisor.is_serving)
                assert (await final(llm)).finished
                assert (await supervisor.health()).ok

        with caplog.at_level(logging.WARNING):
            run(work())
        assert "killed by SIGKILL" in caplog.text and "a new engine is serving" in caplog.text

    def test_an_engine_that_dies_while_idle_is_restarted(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with supervised(tiny_model) as (llm, supervisor):
                kill(llm)
                await until(lambda: supervisor.restarts == 1)
                assert (await final(llm)).finished

        run(work())

    def test_a_restart_started_elsewhere_is_not_repeated(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with supervised(tiny_model) as (llm, supervisor):
                await llm.restart()
                pid = llm.replicas[0].pid
                await asyncio.sleep(0.2)
                assert llm.replicas[0].pid == pid and supervisor.is_serving

        run(work())

    @pytest.mark.parametrize("how", ["stop the supervisor", "shut the engine down"])
    def test_stopping_during_a_restart_leaves_nothing_behind(self, tiny_model: Path, how: str) -> None:
        async def work() -> None:
            await asyncio.to_thread(int)  # the pool's first thread, and what it opens
            before = Resources()
            llm = NullLLM(tiny_model, **SETTINGS)
            supervisor = Supervisor(llm)
            supervisor.start()
            await final(llm)
            kill(llm)
            await until(lambda: llm.replicas[0].starting is not None)
            pid = llm.replicas[0].starting.pid  # type: ignore[union-attr]
            begin = time.monotonic()
            if how == "stop the supervisor":
                await supervisor.stop()
                llm.shutdown()
            else:
                llm.shutdown()
                await asyncio.sleep(0.1)
                await supervisor.stop()
            assert time.monotonic() - begin < 5
            assert not Path(f"/proc/{pid}").exists()
            with pytest.raises(EngineDeadError):
                await final(llm)
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.restart()
            after = Resources()
            assert not after.children - before.children
            assert not after.descriptors - before.descriptors  # resources of other tests may have been released since

        run(work())

    @pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.slow)])
    def test_kills_at_any_moment_under_load(self, tiny_model: Path, count: int) -> None:
        run(kills_under_load(tiny_model, NullLLM, count), 600)

    def test_a_kill_of_a_real_engine_under_load(self, tiny_model: Path) -> None:
        run(kills_under_load(tiny_model, AsyncLLM, 1))

    @pytest.mark.slow
    def test_many_kills_of_a_real_engine_under_load(self, tiny_model: Path) -> None:
        """With its matcher processes."""
        run(kills_under_load(tiny_model, AsyncLLM, 20, with_forms=True), 1800)


async def kills_under_load(model: Path, kind: type[AsyncLLM], count: int, with_forms: bool = False) -> None:
    """Constant streams with kills in between: every request gets all its tokens."""
    rng = random.Random(count)
    ends: Counter[str] = Counter()
    stopping = False

    async def user(llm: AsyncLLM) -> None:
        while not stopping:
            size, constraint = rng.randint(1, 120), None
            if with_forms and rng.random() < 0.25:
                constraint = StructuredOutputsParams(regex=f"[a-z]{{{1 + size % 7}}}")
            prompt = "the world"[: rng.randint(1, 9)]
            asked = final(llm, prompt, max_tokens=size, structured_outputs=constraint)
            # A request that is never answered shows as a timeout.
            (output,) = (await asyncio.wait_for(asked, 180 if with_forms else 60)).outputs
            assert constraint is not None or (len(output.token_ids) == size and output.finish_reason == "length")
            ends["answered"] += 1

    async with supervised(model, kind, settled_seconds=0) as (llm, supervisor):
        users = [asyncio.ensure_future(user(llm)) for _ in range(16)]
        await until(lambda: ends["answered"] > 20)
        kill(llm)
        await until(lambda: supervisor.restarts == 1)
        before, times = Resources(), []
        for killed in range(1, count + 1):
            answered = ends["answered"]
            await until(lambda answered=answered: ends["answered"] > answered + 5)
            await asyncio.sleep(rng.random() / 2)
            assert "/dev/shm" not in Path(f"/proc/{llm.replicas[0].pid}/maps").read_text()  # so none can be left
            family = descendants(llm.replicas[0].pid)
            assert family or not with_forms
            kill(llm)
            begin = time.monotonic()
            await until(lambda killed=killed: supervisor.restarts == killed + 1)
            answered = ends["answered"]
            await until(lambda answered=answered: ends["answered"] > answered)
            times.append(time.monotonic() - begin)
            assert all(map(is_gone, family))
        await asyncio.sleep(0.1)
        after = Resources()
        stopping = True
        await asyncio.gather(*users)
        assert llm.num_resumed >= count
        assert after.children - before.children == {str(llm.replicas[0].pid)}
        assert not after.descriptors - before.descriptors  # resources of other tests may have been released since
        assert after.temporary == before.temporary
        (replica,) = llm.replicas
        assert llm.num_open_requests == 0 and not replica.streams
        assert not replica.calls.keys() - {min(replica.calls)}
        assert await metric(llm, "num_blocks_used") == await metric(llm, "num_requests_running") == 0
    times.sort()
    print(
        f"{count} kills: {dict(ends)}; serving again after {times[len(times) // 2]:.2f} s, at worst {times[-1]:.2f} s"
    )


class TestHanging:
    def test_a_stopped_loop_is_unhealthy_until_it_continues(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with supervised(tiny_model, stall_seconds=3.0) as (llm, supervisor):
                await final(llm)
                kill(llm, signal.SIGSTOP)
                begin = time.monotonic()
                first, second = await asyncio.gather(supervisor.health(), supervisor.health())
                assert time.monotonic() - begin < 5
                assert not first.ok and not second.ok
                assert "the engine's loop has made no step for" in first.message
                assert first.message.endswith("with nothing to do")
                questions = llm.replicas[0].calls
                assert len(questions) == 2  # one pending check for all clients, and the wait for its death
                kill(llm, signal.SIGCONT)
                await until(lambda: not supervisor._probe.is_suspect)
                assert (await supervisor.health()).ok

        run(work())

    def test_a_long_step_is_not_a_hang_until_it_takes_too_long(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with supervised(tiny_model, stall_seconds=4.0) as (llm, supervisor):
                stream = llm.generate("abc", params(max_tokens=200))
                await anext(stream)
                kill(llm, signal.SIGSTOP)
                assert (await supervisor.health()).ok  # a step may take two seconds
                await asyncio.sleep(2.2)
                health = await supervisor.health()
                assert not health.ok and "with 1 requests open" in health.message
                kill(llm, signal.SIGCONT)
                assert [output async for output in stream][-1].finished

        run(work())

    def test_a_loop_that_answers_but_makes_no_step_is_unhealthy(self, tiny_model: Path) -> None:
        """A scheduler that plans nothing for waiting requests: the loop runs and makes no progress."""
        policy = "tests.server.idle_policy.IdlePolicy"

        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS, scheduling_policy=policy) as llm:
                supervisor = Supervisor(llm, stall_seconds=0.5)
                waiting = asyncio.ensure_future(final(llm))
                await until(lambda: llm.replicas[0].streams)
                begin = time.monotonic()
                while (await supervisor.health()).ok:
                    assert time.monotonic() - begin < 10
                    await asyncio.sleep(0.1)
                assert time.monotonic() - begin >= 0.5
                waiting.cancel()

        run(work())

    @pytest.mark.parametrize("restarts", [0, 5])
    def test_an_engine_that_hangs_too_long_is_killed_and_restarted(self, tiny_model: Path, restarts: int) -> None:
        async def work() -> None:
            limits = {"stall_seconds": 0.5, "hang_timeout": 1.0}
            async with supervised(tiny_model, restarts=restarts, **limits) as (llm, supervisor):
                stream = llm.generate("abc", params(max_tokens=200))
                await anext(stream)
                pid = kill(llm, signal.SIGSTOP)
                begin = time.monotonic()
                if restarts:  # the request goes on at the next engine
                    assert len([output async for output in stream][-1].outputs[0].token_ids) == 200
                else:
                    with pytest.raises(EngineDeadError, match="killed: the engine's loop has made no step for"):
                        async for _ in stream:
                            pass
                assert 1.0 <= time.monotonic() - begin < 10
                await until(lambda: supervisor.restarts == 1)
                assert not Path(f"/proc/{pid}").exists()
                assert (await final(llm)).finished and (await supervisor.health()).ok

        run(work())

    def test_an_idle_server_is_not_checked(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work() -> None:
            async with supervised(tiny_model, hang_timeout=0.2) as (llm, _):
                await final(llm)
                await asyncio.sleep(0.2)
                monkeypatch.setattr(llm, "report_health", None)  # any health check would fail
                await asyncio.sleep(0.5)
                monkeypatch.undo()
                assert (await final(llm)).finished

        run(work())
