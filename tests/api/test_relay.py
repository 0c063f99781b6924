"""Requests of other front processes: a step's outputs by owner, and what happens to them when engines die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.api.relay import split_by_owner
from quire.engine import ipc
from quire.messages.outputs import Finished, Key, Started, StepOutputs
from quire.messages.plan import PromptLogprobs, TokenLogprobs
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from tests.api.test_replicas import NullLLM, run


class TestSplit:
    """By a brute-force model: every fact of a step, on its own, goes to the owner of its request."""

    @staticmethod
    def facts(outputs: StepOutputs, requests: set[str]) -> list[Any]:
        """Everything the step says about these requests, in order."""
        found: list[Any] = []
        at = 0
        for i, key in enumerate(outputs.keys):
            count = 1 if outputs.counts is None else outputs.counts[i]
            drafts = None if outputs.drafts is None else outputs.drafts[i]
            logprobs = [outputs.logprobs.get(j) for j in range(at, at + count)]
            found.append((key, outputs.tokens[at : at + count], drafts, logprobs))
            at += count
        assert at == len(outputs.tokens)
        found += [*outputs.prompt_logprobs, *outputs.vectors, *outputs.preempted]
        found += [((request, 0), hypotheses) for request, hypotheses in outputs.beams]
        found += [(item.key, item) for item in (*outputs.started, *outputs.finished)]
        return [fact for fact in found if (fact[0] if isinstance(fact[0], str) else fact[0][0]) in requests]

    def test_each_owner_gets_its_own_and_nothing_is_lost(self) -> None:
        draw = random.Random(5)
        for _ in range(200):
            outputs = self.made(draw)
            owners = {f"r{i}": draw.choice("abc") for i in range(8)}
            parts = split_by_owner(outputs, owners.__getitem__)
            for owner in "abc":
                mine = {request for request, whose in owners.items() if whose == owner}
                part = parts.pop(owner, StepOutputs())
                assert self.facts(part, set(owners)) == self.facts(outputs, mine)
                assert part.counts is None or outputs.counts is not None
            assert not parts

    @staticmethod
    def made(draw: random.Random) -> StepOutputs:
        def key() -> Key:
            return f"r{draw.randrange(8)}", draw.randrange(3)

        keys = [key() for _ in range(draw.randrange(12))]
        counts = [draw.randrange(4) for _ in keys] if draw.random() < 0.5 else None
        total = len(keys) if counts is None else sum(counts)
        entry = TokenLogprobs([1, 2], [-0.5, -1.0], 1)
        return StepOutputs(
            keys=keys,
            tokens=[draw.randrange(1000) for _ in range(total)],
            counts=counts,
            drafts=[draw.randrange(3) for _ in keys] if draw.random() < 0.5 else None,
            logprobs={j: entry for j in range(total) if draw.random() < 0.4},
            prompt_logprobs=[(key(), PromptLogprobs(0, [entry])) for _ in range(draw.randrange(3))],
            vectors=[(key(), bytes([draw.randrange(256)])) for _ in range(draw.randrange(3))],
            beams=[(key()[0], []) for _ in range(draw.randrange(3))],
            started=[Started(key(), draw.random(), draw.randrange(9)) for _ in range(draw.randrange(3))],
            preempted=[key() for _ in range(draw.randrange(3))],
            finished=[Finished(key(), "stop") for _ in range(draw.randrange(3))],
        )


class Peer:
    """A front process in name only: keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[ipc.Up] = []

    def send(self, message: ipc.Up) -> None:
        self.messages.append(message)

    def tokens(self, key: str) -> int:
        steps = [message.outputs for message in self.messages if isinstance(message, ipc.Outputs)]
        return sum(1 for step in steps for request, _ in step.keys if request == key)

    def ends(self, key: str) -> list[str]:
        found: list[str] = []
        for message in self.messages:
            if isinstance(message, ipc.Outputs):
                found += [end.reason for end in message.outputs.finished if end.key[0] == key]
            elif isinstance(message, ipc.RequestRefused) and message.id == key:
                found.append(message.error)
        return found


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def add(llm: NullLLM, peer: Peer, key: str, tokens: int, n: int = 1) -> None:
    params = SamplingParams(temperature=1.0, n=n, max_tokens=tokens, ignore_eos=True)
    request = NewRequest(key, [5, 6, 7], params, 3 + tokens)
    llm.relay.add(request, ipc.encode(ipc.Add(request)), peer)


async def unfinished(llm: NullLLM) -> int:
    return (await llm.report_health()).unfinished


def test_relayed_requests_at_two_replicas(tiny_model: Path, monkeypatch: Any) -> None:
    async def work() -> None:
        async with NullLLM(tiny_model, data_parallel_size=2) as llm:
            assert llm.router is not None
            peer, other = Peer(), Peer()
            for i in range(4):
                add(llm, peer, f"short-{i}", 5, n=2)
            own = [output async for output in llm.generate([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))]
            await until(lambda: not len(llm.relay))
            assert [peer.tokens(f"short-{i}") for i in range(4)] == [10] * 4
            assert [peer.ends(f"short-{i}") for i in range(4)] == [["length", "length"]] * 4
            assert len(own[-1].outputs[0].token_ids) == 4
            assert all(load.open_requests == 0 for load in llm.router.stats())  # they were counted, and have ended
            # A front that exits: its requests are aborted, those of others go on.
            add(llm, peer, "left", 200)
            add(llm, other, "stays", 4)
            assert llm.relay.drop_peer(peer) == 1 and llm.num_open_requests == 1
            await until(lambda: other.ends("stays"))
            assert (other.ends("stays"), other.tokens("stays"), peer.ends("left")) == (["length"], 4, [])
            while await unfinished(llm):
                await asyncio.sleep(0.005)
            assert all(load.open_requests == 0 for load in llm.router.stats())
            # An engine that dies: its requests go on elsewhere, from the tokens that the front has.
            add(llm, peer, "begun", 8, n=2)
            (home,) = [replica for replica in llm.replicas if replica.streams]
            await until(lambda: peer.tokens("begun"))
            os.kill(home.pid, signal.SIGKILL)
            await until(lambda: len(peer.ends("begun")) == 2)
            assert (peer.ends("begun"), peer.tokens("begun")) == (["length"] * 2, 16)
            # A stop string that the front has found ends the sequence here too.
            add(llm, peer, "stopped", 200)
            add(llm, peer, "aborted", 200)
            await until(lambda: peer.tokens("stopped"))
            llm.relay.finish(ipc.Finish(("stopped", 0), 1, "END"))
            assert len(llm.relay) == 1  # at once: if the engine died now, the request would not go on
            llm.relay.abort("aborted")
            await until(lambda: not len(llm.relay))
            assert (peer.ends("aborted"), await unfinished(llm)) == (["abort"], 0)
            # Without an engine, and none to come, the front is told.
            add(llm, peer, "lost", 200)
            llm.kill_engine("killed by a test")
            assert peer.ends("lost") == ["ReplicaDownError"] and not len(llm.relay)
            add(llm, peer, "late", 5)
            assert peer.ends("late") == ["EngineDeadError"] and llm.num_open_requests == 0

    monkeypatch.setenv("NULL_ENGINE_PACE", "4")  # so slow that no test is: the longest request takes a minute
    run(work())
