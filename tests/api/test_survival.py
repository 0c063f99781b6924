"""Requests outlive their engine: killed in the middle of a stream, the next engine goes on with the same tokens."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.api.async_sessions import AsyncSession
from quire.api.engine import LLMEngine
from quire.api.replica import Replica
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.engine_info import EngineInfo
from quire.engine.setup import make_engine
from quire.errors import ConfigError, EngineDeadError, RankLostError
from quire.messages.beams import BeamSearchParams
from quire.messages.outputs import CompletionOutput
from quire.messages.plan import StepPlan
from tests.executor.test_multiprocess import ranks_of

T = TypeVar("T")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu"}
LENGTH = 60
CUT = 20
"""Tokens after which engines die."""
PROMPT = "the world one two three"


class DyingLLM(AsyncLLM):
    engine_module = "tests.api.dying_engine"


class NullLLM(AsyncLLM):
    """Its engines compute nothing, and start in a moment."""

    engine_module = "benchmarks.null_engine"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "300")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def slow_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first null engines are so slow that no request ends before they are replaced; later ones are fast."""
    monkeypatch.setenv("NULL_ENGINE_PACE", "20")
    adopt = Replica.adopt

    def adopt_and_hurry(replica: Replica) -> None:
        adopt(replica)
        os.environ["NULL_ENGINE_PACE"] = "1000"

    monkeypatch.setattr(Replica, "adopt", adopt_and_hurry)


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`die(requests, tokens, …)`: when engines that are started from now on die, see `dying_engine`."""
    file = tmp_path / "dying"
    file.write_text("")
    monkeypatch.setenv("DYING_ENGINE", str(file))

    def set_deaths(*deaths: tuple[int, int]) -> None:
        file.write_text("".join(f"{requests} {tokens}\n" for requests, tokens in deaths))

    return set_deaths


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(bounded())


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **fields})


async def read(llm: AsyncLLM, asked: SamplingParams, prompt: Any = PROMPT, **more: Any) -> RequestOutput:
    """The request's deltas, put together; the last output has the rest."""
    asked = asked.clone()
    asked.output_kind = RequestOutputKind.DELTA
    parts: list[CompletionOutput] = []
    async for output in llm.generate(prompt, asked, **more):
        for new in output.outputs:
            if new.index == len(parts):
                parts.append(new)
                continue
            old = parts[new.index]
            new.text, new.token_ids = old.text + new.text, [*old.token_ids, *new.token_ids]
            new.logprobs = None if new.logprobs is None else [*(old.logprobs or ()), *new.logprobs]
            parts[new.index] = new
    output.outputs = parts
    return output


def plain(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must be equal, of each sequence."""
    return [(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def stop_string(llm: LLM) -> str:
    """Text that the greedy answer first has after CUT tokens, and that begins before them."""
    tokenizer = llm.get_tokenizer()
    tokens = llm.generate(PROMPT, params(), use_tqdm=False)[0].outputs[0].token_ids
    text = tokenizer.decode(tokens)
    begin = len(tokenizer.decode(tokens[: CUT - 3]))
    string = text[begin : len(tokenizer.decode(tokens[: CUT + 4]))]
    assert text.find(string) == begin
    return string


def kinds(llm: LLM) -> dict[str, SamplingParams]:
    form = StructuredOutputsParams(regex="[a-z ]{80}")
    return {
        "greedy": params(),
        "seeded": params(temperature=1.0, seed=5),
        "penalties": params(temperature=1.0, seed=6, presence_penalty=1.0, min_tokens=40, ignore_eos=False),
        "three": params(temperature=1.0, seed=7, n=3),
        "grammar": params(temperature=1.0, seed=8, max_tokens=100, structured_outputs=form),
        "stop string": params(stop=[stop_string(llm)], max_tokens=100),
        "logprobs": params(temperature=1.0, seed=9, logprobs=3, prompt_logprobs=2),
    }


async def assert_idle(llm: AsyncLLM) -> None:
    recovery = llm._group.recovery
    assert llm.num_open_requests == 0 and not recovery._waiting and not recovery._watch._records
    for replica in llm.replicas:
        assert not replica.streams and replica.trial is None
    health = await llm.report_health()
    assert health.unfinished == 0


class TestOneEngine:
    def test_every_kind_of_request_goes_on_with_the_same_tokens(
        self, tiny_model: Path, tmp_path: Path, die: Callable[..., None], llm: LLM
    ) -> None:
        asked = kinds(llm)
        expected = {name: llm.generate(PROMPT, one, use_tqdm=False)[0] for name, one in asked.items()}
        seed = random.Random(0).getrandbits(63)  # of the first request without one
        unseeded = params(temperature=1.0)
        expected["unseeded"] = llm.generate(PROMPT, params(temperature=1.0, seed=seed), use_tqdm=False)[0]
        search = BeamSearchParams(beam_width=3, max_tokens=20)
        beams = [one.tokens for one in llm.beam_search([PROMPT], search)[0].sequences]
        turn = llm.generate(PROMPT, params(), use_tqdm=False)[0]
        whole = [*turn.prompt_token_ids, *turn.outputs[0].token_ids]

        async def work() -> None:
            die((len(asked) + 3, CUT))
            async with DyingLLM(tiny_model, **SETTINGS, kv_disk=str(tmp_path / "kv"), swap_space=0.02) as own:
                session = await own.sessions.create("s", PROMPT, ttl=1000, meta={"a": "b"})
                created = (await session.info()).created
                first = asyncio.ensure_future(read(own, unseeded))
                others = asyncio.gather(*(read(own, one) for one in asked.values()))
                found, answer, got, *rest = await asyncio.gather(
                    own.beam_search(PROMPT, search), session.generate(params()), first, others
                )
                outputs = dict(zip(asked, rest[0], strict=True)) | {"unseeded": got}
                for name, output in outputs.items():
                    assert plain(output) == plain(expected[name]), name
                    assert output.finished and output.num_cached_tokens is not None
                    assert output.metrics is not None
                    assert output.metrics.num_generation_tokens == sum(len(o.token_ids) for o in output.outputs)
                assert_same_logprobs(outputs["logprobs"], expected["logprobs"])
                assert [one.tokens for one in found.sequences] == beams
                assert answer.outputs[0].token_ids == turn.outputs[0].token_ids
                info = await session.info()
                assert await session.tokens() == whole and info.created == created and info.meta == {"a": "b"}
                assert own.num_resumed == len(asked) + 3
                await assert_idle(own)

        run(work())


def assert_same_logprobs(ours: RequestOutput, theirs: RequestOutput) -> None:
    """Nearly the same: they may be computed in other batches."""
    pairs = zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True)
    for a, b in pairs:
        assert {token: one.logprob for token, one in a.items()} == pytest.approx(
            {token: one.logprob for token, one in b.items()}, abs=1e-3
        )
    assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-2)


class TestReplicas:
    def test_requests_and_turns_without_a_disk_go_on_at_the_other_replica(
        self, tiny_model: Path, die: Callable[..., None], llm: LLM
    ) -> None:
        prompts = [f"{i} the world" for i in range(8)]
        seeded = params(temperature=1.0, seed=4, n=2)
        expected = [plain(one) for one in llm.generate(prompts, seeded, use_tqdm=False)]
        turns = llm.generate(prompts, params(), use_tqdm=False)
        whole = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in turns]

        async def talk(own: AsyncLLM, session: AsyncSession) -> list[int]:
            await session.generate(params())
            return await session.tokens()

        async def work() -> None:
            die((0, CUT))  # one of the two
            async with DyingLLM(tiny_model, **SETTINGS, data_parallel_size=2) as own:
                pids = [replica.pid for replica in own.replicas]
                sessions = [await own.sessions.create(f"s{i}", prompt) for i, prompt in enumerate(prompts)]
                assert {own._group.affinity.known(one.key) for one in sessions} == set(own.replicas)
                outputs, talks = await asyncio.gather(
                    asyncio.gather(*(read(own, seeded, prompt) for prompt in prompts)),
                    asyncio.gather(*(talk(own, session) for session in sessions)),
                )
                assert [plain(one) for one in outputs] == expected and talks == whole
                assert own.num_resumed > 0
                while own.router is not None and len(own.router.alive) < 2:
                    await asyncio.sleep(0.01)
                assert sum(replica.pid in pids for replica in own.replicas) == 1
                assert plain(await read(own, seeded, prompts[0])) == expected[0]
                await assert_idle(own)

        run(work())


class TestRanks:
    def test_an_llm_goes_on_when_a_rank_is_killed(self, make_llm: Callable[..., LLM], llm: LLM) -> None:
        both = make_llm(tensor_parallel_size=2)
        asked = [params(), params(temperature=1.0, seed=5, n=3)]
        expected = [plain(llm.generate(PROMPT, one, use_tqdm=False)[0]) for one in asked]
        session, again = (one.sessions.create("s", PROMPT) for one in (both, llm))
        again.generate(params())
        engine, outputs = both.llm_engine, dict[str, RequestOutput]()
        for i, one in enumerate(asked):
            engine.add_request(str(i), PROMPT, one)
        pids = ranks_of(both)
        while engine.has_unfinished_requests():
            new = {one.request_id: one for one in engine.step()}
            outputs |= new
            if "0" in new and len(new["0"].outputs[0].token_ids) == CUT:
                os.kill(pids[1], signal.SIGKILL)
        assert [plain(outputs[str(i)]) for i in range(len(asked))] == expected
        assert not set(pids) & set(ranks_of(both))
        session.generate(params())  # without a folder for sessions, they are carried over
        assert session.tokens == again.tokens
        for one in (both, llm):
            one.sessions.delete("s")


class LosesRanks:
    """Makes engines in this process that are lost, as if by a rank, in a step where a request `guilty` begins."""

    def __init__(self, guilty: Callable[[str], bool]) -> None:
        self._guilty = guilty
        self.engines = 0

    def make(self, *arguments: Any, **options: Any) -> tuple[EngineCore, EngineInfo]:
        self.engines += 1
        core, info = make_engine(*arguments, **options)
        submit = core._executor.submit

        def submit_or_die(plan: StepPlan) -> Any:
            if any(self._guilty(row.request) for row in plan.add):
                raise RankLostError("rank 1 of 2 was killed by SIGKILL")
            return submit(plan)

        core._executor.submit = submit_or_die  # type: ignore[method-assign]
        return core, info


class TestLostRanksOfAnLLM:
    def test_a_request_that_loses_ranks_is_found_and_the_others_go_on(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
    ) -> None:
        ranks = LosesRanks(lambda request: request == "bad")
        monkeypatch.setattr("quire.api.engine.make_engine", ranks.make)
        asked = [params(), params(temperature=1.0, seed=5, n=3), params(max_tokens=4)]
        expected = [plain(llm.generate(PROMPT, one, use_tqdm=False)[0]) for one in asked]
        engine = LLMEngine(EngineConfig(model=str(tiny_model), **SETTINGS))
        for i, one in enumerate(asked):
            engine.add_request(str(i), PROMPT, one)
        engine.step()
        engine.add_request("bad", "abc", params())
        engine.add_request("gone", PROMPT, params())
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            outputs |= {one.request_id: one for one in engine.step()}
            if ranks.engines == 3 and "late" not in engine._outputs and "late" not in outputs:
                engine.abort_request("gone")
                engine.add_request("late", PROMPT, asked[0])
        assert [plain(outputs[str(i)]) for i in range(3)] == expected and plain(outputs["late"]) == expected[0]
        bad = outputs["bad"]
        assert bad.finished and bad.outputs[0].finish_reason == "error" and bad.error is not None
        assert re.match("the engine died [34] times while this request ran.*rank 1 of 2 was killed", bad.error)
        assert ranks.engines in (4, 5) and "gone" not in engine._outputs
        engine.check_idle()
        engine.shutdown()

    def test_ranks_that_are_lost_again_and_again_are_given_up(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks = LosesRanks(lambda request: True)
        monkeypatch.setattr("quire.api.engine.make_engine", ranks.make)
        engine = LLMEngine(EngineConfig(model=str(tiny_model), **SETTINGS, max_engine_restarts=1))
        engine.add_request("a", PROMPT, params())
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
            while True:
                engine.step()
        assert ranks.engines == 2
        engine.shutdown()


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_number_of_restarts_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_engine_restarts must be an integer of at least 0"):
        EngineConfig(max_engine_restarts=value)


def wait_for(condition: Callable[[], bool]) -> Coroutine[Any, Any, None]:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    return wait()


class TestCulprits:
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_a_request_that_kills_engines_is_found_and_the_others_go_on(self, tiny_model: Path, replicas: int) -> None:
        async def work() -> None:
            policy = "tests.api.failing_policy.FailingPolicy"  # the loop fails when a request of priority 13 is next
            async with NullLLM(tiny_model, **SETTINGS, scheduling_policy=policy, data_parallel_size=replicas) as own:
                good = [asyncio.ensure_future(read(own, params(max_tokens=150))) for _ in range(4)]
                await wait_for(lambda: own.token_times.tokens > 20)
                bad = await read(own, params(max_tokens=150), priority=13)
                assert bad.finished and bad.outputs[0].finish_reason == "error"
                assert bad.error is not None and re.match("the engine died [34] times while this request", bad.error)
                assert "ZeroDivisionError: a mistake" in bad.error
                for output in await asyncio.gather(*good):
                    assert len(output.outputs[0].token_ids) == 150 and output.outputs[0].finish_reason == "length"
                await wait_for(lambda: not any(replica.death for replica in own.replicas))
                await assert_idle(own)

        run(work())


@pytest.mark.usefixtures("slow_first")
class TestWaiting:
    def test_requests_wait_for_an_engine_that_is_being_restarted(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS) as own:
                (replica,) = own.replicas
                stream = own.generate(PROMPT, params(max_tokens=200), "a")
                await anext(stream)
                async with replica._restarting:  # no other engine is started meanwhile
                    os.kill(replica.pid, signal.SIGKILL)
                    await wait_for(lambda: bool(replica.death))
                    late = asyncio.ensure_future(read(own, params()))
                    await wait_for(lambda: own.num_open_requests == 2)
                    await own.abort("a")
                    assert [one async for one in stream][-1].outputs[0].finish_reason == "abort"  # at once
                    waiting = asyncio.ensure_future(anext(own.generate(PROMPT, params())))
                    await wait_for(lambda: own.num_open_requests == 2)
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
                    await wait_for(lambda: own.num_open_requests == 1)
                    assert replica.death and not late.done()
                assert len((await late).outputs[0].token_ids) == LENGTH
                await assert_idle(own)

        run(work())

    def test_an_engine_that_cannot_be_restarted_fails_its_requests(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = Replica.start

        def fail(replica: Replica) -> None:
            raise OSError("no more processes")

        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS, max_engine_restarts=1) as own:
                stream = own.generate(PROMPT, params(max_tokens=200))
                await anext(stream)
                monkeypatch.setattr(Replica, "start", fail)
                os.kill(own.replicas[0].pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    async for _ in stream:
                        pass
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await read(own, params())
                assert own.num_open_requests == 0 and not own.is_hopeful
                monkeypatch.setattr(Replica, "start", start)
                await own.restart()
                assert len((await read(own, params())).outputs[0].token_ids) == LENGTH

        run(work())

    def test_an_engine_that_never_yields_a_token_is_given_up(self, tiny_model: Path) -> None:
        """Idle engines that die: restarts of them come to an end."""

        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS, max_engine_restarts=1) as own:
                await read(own, params(max_tokens=3))
                for failures in (1, 2):
                    await wait_for(lambda: not own.errored)
                    os.kill(own.replicas[0].pid, signal.SIGKILL)
                    await wait_for(lambda failures=failures: own.replicas[0].failures == failures)
                with pytest.raises(EngineDeadError):
                    await read(own, params())

        run(work())


class TestReload:
    @pytest.mark.usefixtures("slow_first")
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_a_reload_replaces_all_engines_and_loses_nothing(self, tiny_model: Path, replicas: int) -> None:
        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS, data_parallel_size=replicas) as own:
                pids = [replica.pid for replica in own.replicas]
                long = [asyncio.ensure_future(read(own, params(max_tokens=200))) for _ in range(4)]
                await wait_for(lambda: own.token_times.tokens > 20)
                reload = asyncio.ensure_future(own.reload())
                await wait_for(lambda: own.is_reloading)
                late = asyncio.ensure_future(read(own, params()))
                await reload
                assert not set(pids) & {replica.pid for replica in own.replicas}
                assert own.num_resumed > 0 and not own.is_reloading
                assert len((await late).outputs[0].token_ids) == LENGTH
                for output in await asyncio.gather(*long):
                    assert len(output.outputs[0].token_ids) == 200
                assert all(replica.failures == 0 for replica in own.replicas)
                await assert_idle(own)

        run(work())

    def test_with_time_requests_finish_where_they_are_and_new_ones_wait(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with NullLLM(tiny_model, **SETTINGS) as own:  # with 300 tokens a second
                (replica,) = own.replicas
                before = replica.pid
                stream = asyncio.ensure_future(read(own, params()))
                await wait_for(lambda: own.token_times.tokens > 5)
                reload = asyncio.ensure_future(own.reload(60))
                await wait_for(lambda: own.is_reloading)
                late = asyncio.ensure_future(read(own, params()))
                assert len((await stream).outputs[0].token_ids) == LENGTH
                assert own.num_resumed == 0
                assert len((await late).outputs[0].token_ids) == LENGTH
                await reload
                assert replica.pid != before
                await assert_idle(own)

        run(work())
