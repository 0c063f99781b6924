"""Bounds the wait for an engine's answer: once the engine is unhealthy, the route gets a 503 instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from quire.server.errors import unavailable
from quire.server.http import Exchange
from quire.server.lifecycle.supervisor import Supervisor

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""After so long without an answer the engine's health is looked at, again and again."""
PATIENCE = 10
"""How often, if only some of the engines that may have the answer are unhealthy."""


@asynccontextmanager
async def answering(exchange: Exchange, supervisors: Sequence[Supervisor]) -> AsyncIterator[None]:
    """The block waits for one of these engines, and gets a 503 if it is stopped. Inside `exchange.interruptible`."""
    loop = asyncio.get_running_loop()
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        reason = await _wait_until_unhealthy(supervisors)
        exchange.interrupt(unavailable(f"the engine does not answer: {reason}"))

    timer = loop.call_later(ANSWER_SECONDS, lambda: watching.append(loop.create_task(watch())))
    try:
        yield
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


async def answer_or_reason(answer: Awaitable[T], *supervisors: Supervisor) -> tuple[T | None, str]:
    """What one of these engines answers; or None, and why none does."""
    asked = asyncio.ensure_future(answer)
    unhealthy = None
    try:
        if (await asyncio.wait([asked], timeout=ANSWER_SECONDS))[0]:
            return asked.result(), ""
        unhealthy = asyncio.ensure_future(_wait_until_unhealthy(supervisors))
        await asyncio.wait([asked, unhealthy], return_when=asyncio.FIRST_COMPLETED)
        return (asked.result(), "") if asked.done() else (None, unhealthy.result())
    finally:
        for task in (asked, unhealthy):
            if task is not None:
                task.cancel()


async def _wait_until_unhealthy(supervisors: Sequence[Supervisor]) -> str:
    """Waits until no engine is healthy, or one is unhealthy for long; returns why."""
    rounds = 0
    while True:
        found = await asyncio.gather(*(one.health() for one in supervisors))
        wrong = [health.message for health in found if not health.ok]
        rounds = rounds + 1 if wrong else 0
        if len(wrong) == len(found) or rounds > PATIENCE:
            return "; ".join(wrong)
        await asyncio.sleep(ANSWER_SECONDS)
