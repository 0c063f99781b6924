"""Threads for the work of requests: turns between tenants, work of callers that left, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.api import work_pool
from quire.api.work_pool import AbandonedError, WorkPool, check_abandoned
from quire.errors import EngineDeadError


class Gate:
    """Work that runs until it is opened, and what ran in which order."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(30)
        return name

    async def has_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        pool = WorkPool()
        assert await pool.run(lambda a, b: a + b, 2, 3) == 5
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await pool.run(threading.get_ident) != threading.get_ident()

    run(main())


def test_another_tenant_does_not_wait_for_the_work_of_one() -> None:
    """A tenant never has all threads."""

    async def main() -> None:
        pool, gate = WorkPool(threads=2), Gate()
        flood = [asyncio.ensure_future(pool.run(gate.work, f"a{i}", tenant="a")) for i in range(20)]
        await gate.has_begun(2)
        assert await pool.run(lambda: "b", tenant="b") == "b"
        assert gate.begun == ["a0", "a1"] and pool.num_waiting == 18
        gate.open.set()
        assert await asyncio.gather(*flood) == [f"a{i}" for i in range(20)]

    run(main())


def test_tenants_take_turns() -> None:
    async def main() -> None:
        pool, order = WorkPool(threads=1), []
        gates = [Gate(), Gate()]
        held = [asyncio.ensure_future(pool.run(gate.work, "x", tenant=f"x{i}")) for i, gate in enumerate(gates)]
        await asyncio.gather(*(gate.has_begun(1) for gate in gates))  # both threads are busy
        names = [f"{tenant}{i}" for tenant in "abc" for i in range(3)]
        many = [asyncio.ensure_future(pool.run(order.append, name, tenant=name[0])) for name in names]
        await settled(lambda: pool.num_waiting == len(names))
        gates[0].open.set()
        await asyncio.gather(*many)
        assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
        gates[1].open.set()
        await asyncio.gather(*held)

    run(main())


def test_work_of_callers_that_left_is_not_started() -> None:
    async def main() -> None:
        pool, gate = WorkPool(threads=1), Gate()
        first = asyncio.ensure_future(pool.run(gate.work, "first"))
        await gate.has_begun(1)
        waiting = [asyncio.ensure_future(pool.run(gate.work, f"late {i}")) for i in range(5)]
        await settled(lambda: pool.num_waiting == 5)
        for task in waiting[:4]:
            task.cancel()
        await settled(lambda: pool.num_waiting == 1)
        gate.open.set()
        assert await first == "first" and await waiting[4] == "late 4"
        assert gate.begun == ["first", "late 4"]

    run(main())


def test_running_work_is_told_that_its_caller_has_left() -> None:
    async def main() -> None:
        pool, outcome = WorkPool(threads=1), []

        def work() -> None:
            outcome.append("begun")
            try:
                while True:
                    check_abandoned()
                    time.sleep(0.001)
            except AbandonedError:
                outcome.append("abandoned")

        task = asyncio.ensure_future(pool.run(work))
        await settled(lambda: outcome == ["begun"])
        task.cancel()
        await settled(lambda: outcome == ["begun", "abandoned"] and pool.num_running == 0)

    run(main())
    check_abandoned()  # does nothing here


def test_closing_waits_for_no_work() -> None:
    async def main() -> None:
        pool, gate = WorkPool(threads=1), Gate()
        running = asyncio.ensure_future(pool.run(gate.work, "hangs"))
        await gate.has_begun(1)
        waiting = asyncio.ensure_future(pool.run(gate.work, "waits"))
        await settled(lambda: pool.num_waiting == 1)
        pool.close()
        with pytest.raises(EngineDeadError):
            await waiting
        with pytest.raises(EngineDeadError):
            await pool.run(lambda: None)
        gate.open.set()
        assert await running == "hangs" and gate.begun == ["hangs"]

    run(main())


def test_idle_threads_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_pool, "IDLE_SECONDS", 0.01)

    async def main() -> None:
        pool = WorkPool(threads=2)
        await asyncio.gather(*(pool.run(time.sleep, 0.001) for _ in range(10)))
        await settled(lambda: pool._threads == 0)
        assert await pool.run(lambda: 1) == 1

    run(main())
