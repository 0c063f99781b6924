"""Engines and ranks killed again and again under load: every stream is whole and has the tokens of an undisturbed run.

`pytest -m slow -s tests/api/test_survival_storm.py` prints the pauses. STORM_KILLS is the number of kills of each
storm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.api.replica import Replica
from quire.errors import EngineDeadError, SessionNotFoundError
from tests.processes import children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu"}
KILLS = int(os.environ.get("STORM_KILLS", "200"))
USERS = 8
PATIENCE_SECONDS = 600.0
"""Nothing takes longer, even where the engine's processes get a tenth of a core."""
START_KILLS = 0.1
"""Share of kills that are followed by one of the engine that is being started."""


class Case:
    """A request and the tokens that an undisturbed engine draws."""

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        self.prompt = [rng.randrange(5, 110) for _ in range(rng.randint(1, 60))]
        size = rng.randint(20, 150)
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1.0},
            {"temperature": 1.0, "n": 3},
            {"temperature": 1.0, "presence_penalty": 1.0, "min_tokens": size - 5, "ignore_eos": False},
            {"temperature": 1.0, "logprobs": 2},
            {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex=f"[a-z ]{{{size}}}")},
        ]
        fields = {"ignore_eos": True, "max_tokens": size, "seed": rng.getrandbits(30), **rng.choice(kinds)}
        self.params = SamplingParams(**fields)
        (output,) = llm.generate([self.prompt], self.params, use_tqdm=False)
        self.expected = [(list(one.token_ids), one.text, one.finish_reason) for one in output.outputs]
        self.params.output_kind = RequestOutputKind.DELTA


class Storm:
    """Users that stream without a pause, and what happens to their streams."""

    def __init__(self, llm: AsyncLLM, cases: list[Case], seed: int) -> None:
        self.llm = llm
        self.rng = random.Random(seed)
        self.cases = cases
        self.ends: Counter[str] = Counter()
        self.pauses: dict[str, list[float]] = {"plain": [], "with a grammar": []}
        """Seconds from a kill to the next output of each stream that had begun at the engine. A grammar is compiled
        again, by processes that the new engine starts first."""
        self._killed_at: dict[str, float] = {}
        """Streams that have had no output since their engine was killed."""
        self._names = 0
        self._is_over = False

    async def run(self, kills: int, kill: Callable[[], Awaitable[None]]) -> None:
        users = [asyncio.ensure_future(self._user()) for _ in range(USERS)]
        try:
            for _ in range(kills):
                await self._until(self._is_calm)
                await asyncio.sleep(self.rng.random())
                await kill()
                if any(user.done() for user in users):
                    break
        finally:
            self._is_over = True
        await asyncio.gather(*users)

    def _is_calm(self) -> bool:
        """Whether all engines run and no stream waits for one: three kills without a token in between, the last of them
        of an engine with one request, would end the request."""
        return not any(self._unrest().values())

    def _unrest(self) -> dict[str, Any]:
        recovery = self.llm._group.recovery
        return {
            "without an output": dict(self._killed_at),
            "suspects": list(recovery._watch.suspects),
            "tried alone": [replica.trial.request_id for replica in self.llm.replicas if replica.trial is not None],
            "down": [replica.death for replica in self.llm.replicas if replica.death],
        }

    async def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition() and not self._is_over:
            assert time.monotonic() < deadline, (self._unrest(), time.monotonic())
            await asyncio.sleep(0.005)

    def note_kill(self, replica: int) -> None:
        """The engine of this replica is killed now."""
        now = time.monotonic()
        for stream in self.llm.replicas[replica].streams.values():
            if not stream.is_ended:
                self._killed_at.setdefault(stream.request_id, now)

    async def _user(self) -> None:
        while not self._is_over:
            case = self.rng.choice(self.cases)
            self._names += 1
            name = f"r{self._names}"
            is_turn = case.params.n == 1 and case.params.structured_outputs is None and self.rng.random() < 0.3
            await self._stream(case, name, name if is_turn else None)
            if is_turn:
                await self._check_session(case, name)

    async def _stream(self, case: Case, name: str, session: str | None) -> None:
        tokens: list[list[int]] = [[] for _ in case.expected]
        texts, reasons = [""] * len(tokens), [""] * len(tokens)
        kind = "plain" if case.params.structured_outputs is None else "with a grammar"
        async for output in self.llm.generate(case.prompt, case.params, name, session=session):
            if (killed_at := self._killed_at.pop(name, None)) is not None:
                self.ends["resumed"] += 1
                if tokens[0]:
                    self.pauses[kind].append(time.monotonic() - killed_at)
            for one in output.outputs:
                tokens[one.index] += one.token_ids
                texts[one.index] += one.text
                reasons[one.index] = one.finish_reason or ""
        self._killed_at.pop(name, None)
        assert list(zip(tokens, texts, reasons, strict=True)) == case.expected, (name, case.params, output.error)
        self.ends["turns" if session else "streams"] += 1

    async def _check_session(self, case: Case, name: str) -> None:
        session = self.llm.sessions.handle(name)
        with contextlib.suppress(SessionNotFoundError, EngineDeadError):  # without a disk it may have died since
            assert await session.tokens() == [*case.prompt, *case.expected[0][0]]
            await session.delete()

    def report(self, title: str) -> None:
        print(f"{title}: {dict(self.ends)}", flush=True)
        for kind, pauses in self.pauses.items():
            if pauses:
                middle, worst = sorted(pauses)[len(pauses) // 2], max(pauses)
                print(f"  {len(pauses)} pauses {kind}: median {middle:.2f} s, worst {worst:.2f} s", flush=True)


async def storm(model: Path, reference: LLM, title: str, **settings: Any) -> None:
    rng = random.Random(title)
    cases = [Case(reference, rng) for _ in range(40)]
    async with AsyncLLM(model, **SETTINGS, **settings) as llm:
        users = Storm(llm, cases, len(title))

        async def kill() -> None:
            replica = rng.choice(llm.replicas)
            ranks = [
                pid for pid in children(replica.pid) if b"executor.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            users.note_kill(replica.number)
            pid = replica.pid
            os.kill(rng.choice([pid, *ranks]), signal.SIGKILL)
            users.ends["kills"] += 1
            if users.ends["kills"] % 20 == 0:
                users.report(title)
            await users._until(lambda: bool(replica.death) or replica.pid != pid)
            if rng.random() < START_KILLS:
                await users._until(lambda: replica.starting is not None)
                if replica.starting is not None:
                    os.kill(replica.starting.pid, signal.SIGKILL)
                    users.ends["kills while starting"] += 1

        await users.run(KILLS, kill)
        users.report(title)
        assert users.ends["kills"] == KILLS and users.ends["resumed"] > 0
        health = await llm.report_health()
        assert llm.num_open_requests == 0 and health.unfinished == 0
        metrics = {metric.name: metric.value for metric in await llm.get_metrics()}
        assert metrics["quire:num_requests_running"] == metrics["quire:num_requests_waiting"] == 0


NEW_FORMS = 4
"""Streams that are open at each kill, each with a grammar that no engine has seen."""


def test_new_grammars_at_the_other_replica(tiny_model: Path, shared_tiny: LLM) -> None:
    """The longest pauses of two replicas: the other one has to compile the grammars of the streams that it takes
    over. Every gap between outputs counts that begins at the dead engine and ends at the other."""

    async def work() -> None:
        rng, pauses = random.Random(1), []
        async with AsyncLLM(tiny_model, **SETTINGS, data_parallel_size=2) as llm:

            def open_at(replica: Replica) -> set[str]:
                return {one.request_id for one in replica.streams.values()}

            async def stream(number: int, begun: asyncio.Event) -> None:
                size = 300 + number
                form = StructuredOutputsParams(regex=f"[a-z ]{{{size}}}")
                params = SamplingParams(temperature=1.0, seed=number, max_tokens=size, structured_outputs=form)
                (expected,) = await asyncio.to_thread(shared_tiny.generate, [[5]], params, use_tqdm=False)
                params.output_kind = RequestOutputKind.DELTA
                tokens: list[int] = []
                before, pid, name = 0.0, 0, f"s{number}"
                async for output in llm.generate([5], params, name):
                    now = time.monotonic()
                    at = next((one.pid for one in llm.replicas if name in open_at(one)), 0)
                    if pid and at not in (0, pid):
                        pauses.append(now - before)
                    before, pid = now, at
                    tokens += output.outputs[0].token_ids
                    begun.set()
                assert tokens == list(expected.outputs[0].token_ids)

            for turn in range(KILLS):
                events = [asyncio.Event() for _ in range(NEW_FORMS)]
                streams = [
                    asyncio.ensure_future(stream(turn * NEW_FORMS + index, event)) for index, event in enumerate(events)
                ]
                await asyncio.gather(*(event.wait() for event in events))
                os.kill(rng.choice(llm.replicas).pid, signal.SIGKILL)
                await asyncio.gather(*streams)
                while any(replica.death for replica in llm.replicas):
                    await asyncio.sleep(0.01)
        middle, worst = sorted(pauses)[len(pauses) // 2], max(pauses)
        print(f"{KILLS} kills, {len(pauses)} pauses with a new grammar: median {middle:.2f} s, worst {worst:.2f} s")

    asyncio.run(work())


def test_engines(tiny_model: Path, shared_tiny: LLM, tmp_path: Path) -> None:
    asyncio.run(storm(tiny_model, shared_tiny, "one engine", kv_disk=str(tmp_path / "kv"), swap_space=0.02))


def test_engines_and_ranks(tiny_model: Path, shared_tiny: LLM) -> None:
    asyncio.run(storm(tiny_model, shared_tiny, "one engine of two ranks", tensor_parallel_size=2))


def test_replicas(tiny_model: Path, shared_tiny: LLM) -> None:
    asyncio.run(storm(tiny_model, shared_tiny, "two replicas", data_parallel_size=2))
