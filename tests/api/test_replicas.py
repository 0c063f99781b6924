"""Several engines behind one `AsyncLLM`: the same tokens, prefix hits, sessions at one replica, unnoticed deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from quire.api.replica import Replica
from quire.errors import (
    ConfigError,
    EngineDeadError,
    ReplicaDownError,
    SessionExistsError,
    SessionNotFoundError,
    ValidationError,
)
from quire.server.lifecycle.supervisor import ReplicaSupervisor

T = TypeVar("T")


class NullLLM(AsyncLLM):
    """Its engines compute nothing."""

    engine_module = "benchmarks.null_engine"


SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "max_num_seqs": 8,
    "max_num_batched_tokens": 32, "data_parallel_size": 2,
}  # fmt: skip


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 20, **more})


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(bounded())


async def final(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **more: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params or greedy(), **more)][-1]


async def hits(llm: AsyncLLM) -> list[float]:
    """Tokens that each replica found in its cache."""
    metrics = await asyncio.gather(*(replica.get_metrics() for replica in llm.replicas))
    return [next(one.value for one in each if one.name == "quire:prefix_cache_hits") for each in metrics]


async def assert_idle(llm: AsyncLLM) -> None:
    """No request is open here, in any engine, or in the router."""
    assert llm.num_open_requests == 0 and llm.router is not None
    for replica in llm.replicas:
        assert not replica.streams
        metrics = {metric.name: metric.value for metric in await replica.get_metrics()}
        for name in ("num_requests_running", "num_requests_waiting"):
            assert metrics[f"quire:{name}"] == 0
    for load in llm.router.stats():
        assert (load.open_requests, load.rows, load.queued_tokens, load.kv_tokens) == (0, 0, 0, 0)


def children() -> set[str]:
    """Child processes of this one."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, **SETTINGS)
    yield llm
    llm.shutdown()


@pytest.fixture
def pair(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Two engines with empty caches and no recent work; checked to be idle after the test."""
    run(shared.reset_prefix_cache())
    assert shared.router is not None
    for known in shared.router._replicas.values():
        known.load._work = 0.0
    yield shared
    run(assert_idle(shared))


class TestTokens:
    def test_tokens_are_those_of_one_engine(self, pair: AsyncLLM, llm: LLM) -> None:
        shared_begin = "the world one two three four five "
        prompts = [*(shared_begin + str(i) for i in range(8)), *("x the " * i for i in range(1, 25, 3)), "abc"]
        for asked in (greedy(), greedy(n=3, temperature=1.0, seed=5)):
            expected = llm.generate(prompts, asked, use_tqdm=False)

            async def work(asked: SamplingParams = asked) -> list[RequestOutput]:
                return await asyncio.gather(*(final(pair, prompt, asked) for prompt in prompts))

            for ours, theirs in zip(run(work()), expected, strict=True):
                assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]

    def test_both_engines_work(self, pair: AsyncLLM) -> None:
        async def work() -> list[int]:
            before = [(await replica.report_health()).steps for replica in pair.replicas]
            await asyncio.gather(*(final(pair, f"{i} abc") for i in range(16)))
            after = [(await replica.report_health()).steps for replica in pair.replicas]
            return [b - a for a, b in zip(before, after, strict=True)]

        assert all(run(work()))


class TestPrefixes:
    def test_a_common_prefix_goes_to_the_same_engine_and_is_cached(self, pair: AsyncLLM) -> None:
        begins = [[5 + i] * 192 for i in range(4)]

        async def work() -> tuple[list[int | None], list[list[float]]]:
            found, counts = [], [await hits(pair)]
            for _ in range(3):
                for begin in begins:
                    output = await final(pair, [*begin, 9, 8, 7], greedy(max_tokens=4))
                    found.append(output.num_cached_tokens)
            counts.append(await hits(pair))
            return found, counts

        found, (before, after) = run(work())
        assert found == [0] * 4 + [192] * 8  # a hit every time
        gained = [b - a for a, b in zip(before, after, strict=True)]
        assert sum(gained) == 8 * 192 and all(gained)  # and the prefixes are spread

    def test_tenants_do_not_share_prefixes(self, pair: AsyncLLM) -> None:
        async def work() -> list[int | None]:
            tenants = ["a", "b", "a", "b"]
            return [(await final(pair, [7] * 200, tenant=tenant)).num_cached_tokens for tenant in tenants]

        assert run(work()) == [0, 0, 192, 192]

    def test_a_cache_reset_resets_the_router(self, pair: AsyncLLM) -> None:
        async def work() -> None:
            await final(pair, [7] * 200)
            assert pair.router is not None and sum(load.known_blocks for load in pair.router.stats()) > 0
            assert await pair.reset_prefix_cache()
            assert sum(load.known_blocks for load in pair.router.stats()) == 0
            assert (await final(pair, [7] * 200)).num_cached_tokens == 0

        run(work())

    def test_the_router_knows_generated_blocks(self, pair: AsyncLLM) -> None:
        async def work() -> int | None:
            first = await final(pair, [11] * 100, greedy(max_tokens=120))
            await asyncio.gather(*(final(pair, f"{i} abc") for i in range(6)))  # other requests, at both engines
            whole = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            return (await final(pair, whole)).num_cached_tokens

        assert run(work()) == 208


def home(llm: AsyncLLM, name: str) -> int:
    found = llm._group.affinity.known(name)
    assert found is not None
    return found.number


class TestSessions:
    def test_sessions_stay_at_one_replica_and_give_the_tokens_of_one_engine(self, pair: AsyncLLM, llm: LLM) -> None:
        texts = [f"{i} hello the world one two three" for i in range(6)]
        tokenizer = llm.get_tokenizer()
        expected = []
        for text in texts:
            tokens = tokenizer.encode(text)
            for more in ("", " and more"):
                tokens = tokens + tokenizer.encode(more, add_special_tokens=False)
                tokens += llm.generate([tokens], greedy(), use_tqdm=False)[0].outputs[0].token_ids
            expected.append(tokens)

        async def messages(i: int) -> list[int]:
            session = await pair.sessions.create(f"talk-{i}", texts[i])
            await session.generate(greedy())
            await session.append(" and more")
            before = home(pair, f"talk-{i}")
            await session.generate(greedy())
            assert home(pair, f"talk-{i}") == before
            return await session.tokens()

        async def work() -> None:
            assert await asyncio.gather(*(messages(i) for i in range(6))) == expected
            assert {home(pair, f"talk-{i}") for i in range(6)} == {0, 1}
            fork = await (await pair.sessions.get("talk-3")).fork("branch")
            assert home(pair, "branch") == home(pair, "talk-3") and await fork.tokens() == expected[3]
            data = await (await pair.sessions.get("talk-0")).exported()
            copy = await pair.sessions.import_(data, "copy")
            assert await copy.tokens() == expected[0]
            names = [info.name async for info in pair.sessions]
            assert sorted(names[:6]) == [f"talk-{i}" for i in range(6)] and names[6:] == ["branch", "copy"]
            assert await pair.sessions.count() == 8
            for info in await pair.sessions.list():
                await pair.sessions.delete(info.name)
            assert await pair.sessions.count() == 0

        run(work())

    def test_a_name_is_unique_over_all_replicas(self, pair: AsyncLLM) -> None:
        async def work() -> None:
            made = await asyncio.gather(
                *(pair.sessions.create("one", "x " * i) for i in range(1, 9)), return_exceptions=True
            )
            assert sum(isinstance(one, SessionExistsError) for one in made) == 7
            other = 1 - home(pair, "one")
            for i in range(100):  # until one is at the other replica: they are spread
                two = await pair.sessions.create("two", [5 + i] * 200)
                if home(pair, "two") == other:
                    break
                await two.delete()
            pair._group.affinity._known.clear()  # as after a restart: nothing is known
            with pytest.raises(SessionExistsError, match="a session 'one' exists already"):
                await pair.sessions.create("one")
            with pytest.raises(SessionExistsError, match="a session 'one' exists already"):
                await (await pair.sessions.get("two")).fork("one")
            with pytest.raises(SessionExistsError):
                await pair.sessions.import_(await (await pair.sessions.get("two")).exported(), "one")
            with pytest.raises(SessionNotFoundError, match="three"):
                await pair.sessions.get("three")
            assert await pair.sessions.count() == 2
            for name in ("one", "two"):
                await pair.sessions.delete(name)

        run(work())

    def test_a_session_created_again_while_it_is_deleted_is_found(self, pair: AsyncLLM) -> None:
        async def work() -> None:
            for i in range(100):  # until it is not at the first replica, which gets calls for unknown sessions
                await pair.sessions.create("again", [5 + i] * 200)
                if home(pair, "again") == 1:
                    break
                await pair.sessions.delete("again")
            _, output = await asyncio.gather(pair.sessions.delete("again"), final(pair, [7] * 40, session="again"))
            assert output.finished and await pair.sessions.count() == 1
            await pair.sessions.delete("again")

        run(work())

    def test_pages_list_sessions_oldest_first(self, pair: AsyncLLM) -> None:
        async def work() -> None:
            names = [f"s{i}" for i in range(17)]
            for i, name in enumerate(names):
                await pair.sessions.create(name, [5 + i] * 200, tenant="t")
            mine = pair.sessions.of("t")
            assert len({home(pair, one.key) for one in [mine.handle(name) for name in names]}) == 2
            for size in (1, 4, 17, 100):
                seen: list[str] = []
                while True:
                    page = await mine.page(seen[-1] if seen else None, size)
                    seen += [info.name for info in page.sessions]
                    assert len(page.sessions) == size or page.after is None
                    if page.after is None:
                        break
                assert seen == names
            with pytest.raises(SessionNotFoundError):
                await mine.page("nobody")
            for name in names:
                await mine.delete(name)

        run(work())

    def test_a_chat_by_session_id_goes_to_the_sessions_replica(self, pair: AsyncLLM) -> None:
        async def work() -> None:
            first = await final(pair, [7] * 40, session="chat")
            whole = [*first.prompt_token_ids, *first.outputs[0].token_ids, 9, 9]
            await asyncio.gather(*(final(pair, f"{i} abc") for i in range(6)))
            again = await final(pair, whole, session="chat")
            assert again.num_cached_tokens == len(whole) - 3  # the last token has no KV
            await pair.sessions.delete("chat")

        run(work())


class TestDeath:
    def test_requests_go_on_elsewhere_and_the_engine_comes_back(self, tiny_model: Path, llm: LLM) -> None:
        prompts = [f"{i} the world" for i in range(60)]
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, greedy(max_tokens=60), use_tqdm=False)]

        async def read(pair: AsyncLLM, prompt: str, first: asyncio.Event | None = None) -> list[int]:
            kind = RequestOutputKind.DELTA if first else RequestOutputKind.FINAL_ONLY
            tokens: list[int] = []
            async for output in pair.generate(prompt, greedy(max_tokens=60, output_kind=kind)):
                tokens += output.outputs[0].token_ids
                if first:
                    first.set()
            return tokens

        async def work() -> None:
            async with AsyncLLM(tiny_model, **SETTINGS) as pair:
                supervisor = ReplicaSupervisor(pair)
                supervisor.start()
                events = [asyncio.Event() for _ in prompts[:8]]  # these are streamed
                streams = [
                    asyncio.ensure_future(read(pair, prompt, event))
                    for prompt, event in zip(prompts, events, strict=False)
                ]
                await asyncio.gather(*(event.wait() for event in events))
                silent = [asyncio.ensure_future(read(pair, prompt)) for prompt in prompts[8:]]
                await asyncio.sleep(0.02)
                victim = max(pair.replicas, key=lambda replica: replica.num_open_requests)
                pid = victim.pid
                os.kill(pid, signal.SIGKILL)
                assert await asyncio.gather(*streams, *silent) == expected  # unnoticed by their readers
                while supervisor.restarts == 0:
                    assert supervisor.status.startswith("1 of 2 replicas serve; ") and supervisor.is_serving
                    await asyncio.sleep(0.02)
                assert (await supervisor.health()).ok and supervisor.status == "serving" and victim.pid != pid
                assert await read(pair, prompts[0]) == expected[0]
                await assert_idle(pair)
                await supervisor.stop()

        run(work())

    def test_without_restarts_requests_fail_with_their_engine_and_the_others_serve(self, tiny_model: Path) -> None:
        async def work() -> None:
            settings = {**SETTINGS, "data_parallel_size": 4, "max_engine_restarts": 0}
            async with NullLLM(tiny_model, **settings) as four:
                stream = four.generate("abc", greedy(max_tokens=200))
                await anext(stream)
                (at,) = (replica for replica in four.replicas if replica.streams)
                os.kill(at.pid, signal.SIGKILL)
                with pytest.raises(ReplicaDownError, match=f"replica {at.number} of 4 is down: .*killed by SIGKILL"):
                    async for _ in stream:
                        pass
                assert len(four._group.alive) == 3 and not four.errored
                assert (await final(four, "abc")).finished
                four.kill_engine("enough")
                with pytest.raises(EngineDeadError, match="replica 0 of 4 is down: .*replica 3 of 4 is down: enough"):
                    await final(four, "abc")

        run(work())

    def test_sessions_of_a_dead_engine_wait_for_it(self, tiny_model: Path, tmp_path: Path, llm: LLM) -> None:
        settings = {**SETTINGS, "kv_disk": str(tmp_path / "kv"), "swap_space": 0.02}
        expected = llm.generate("hello the world", greedy(), use_tqdm=False)[0]
        whole = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]

        async def begin() -> dict[str, int]:
            async with AsyncLLM(tiny_model, **settings) as pair:
                for i in range(4):
                    session = await pair.sessions.create(f"s{i}", "hello the world")
                    await session.generate(greedy())
                homes = {f"s{i}": home(pair, f"s{i}") for i in range(4)}
                assert set(homes.values()) == {0, 1}
                victim = pair.replicas[0]
                victim.kill_engine("for a test")
                gone, there = (next(name for name, at in homes.items() if at == number) for number in (0, 1))
                with pytest.raises(ReplicaDownError, match=f"session '{gone}' is at a replica that is down"):
                    await (await pair.sessions.get(gone)).generate(greedy())
                with pytest.raises(ReplicaDownError, match="may be at one that is down"):
                    await pair.sessions.create("new")
                with pytest.raises(ReplicaDownError, match="some sessions are at a replica that is down"):
                    await pair.sessions.list()
                made_up = await pair.sessions.create("made-up", "hello the world", is_new=True)
                assert home(pair, "made-up") == 1
                await made_up.generate(greedy())
                assert await made_up.tokens() == whole
                await made_up.delete()
                assert await (await pair.sessions.get(there)).tokens() == whole
                await pair.restart(only_if_dead=True)
                assert await (await pair.sessions.get(gone)).tokens() == whole
                return homes

        async def go_on(homes: dict[str, int]) -> None:
            async with AsyncLLM(tiny_model, **settings) as pair:
                assert [info.name async for info in pair.sessions] == sorted(homes)
                for name in homes:
                    with pytest.raises(SessionExistsError):
                        await pair.sessions.create(name)
                    assert await (await pair.sessions.get(name)).tokens() == whole
                assert {name: home(pair, name) for name in homes} == homes

        run(go_on(run(begin())))


class TestStarting:
    def test_an_engine_that_cannot_start_ends_all_with_one_error(self, tiny_model: Path, tmp_path: Path) -> None:
        (tmp_path / "replica-1").write_text("in the way")
        before = children()
        with pytest.raises(Exception, match="replica-1"):
            AsyncLLM(tiny_model, **SETTINGS, kv_disk=str(tmp_path), swap_space=0.02)
        assert children() <= before

    @pytest.mark.parametrize("size", [0, -1, True, "2", 1.5])
    def test_invalid_sizes(self, tiny_model: Path, size: Any) -> None:
        with pytest.raises(ConfigError, match="data_parallel_size must be an integer of at least 1"):
            AsyncLLM(tiny_model, data_parallel_size=size)

    def test_a_memory_map_is_of_one_of_them(self, pair: AsyncLLM) -> None:
        assert run(pair.memory_map(1)) is not None
        with pytest.raises(ValidationError, match="there is no replica 2: there are 2, numbered from 0"):
            run(pair.memory_map(2))


class TestOffline:
    def test_an_llm_over_two_engines(self, tiny_model: Path, llm: LLM) -> None:
        prompts = [f"{i} the world" for i in range(30)]
        expected = llm.generate(prompts, greedy(), use_tqdm=False)
        with LLM(tiny_model, **SETTINGS) as both:
            for ours, theirs in zip(both.generate(prompts, greedy(), use_tqdm=False), expected, strict=True):
                assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids and ours.prompt == theirs.prompt
            steps = [run_in(both, replica.report_health()).steps for replica in engines(both)]
            assert all(steps)
            streamed = list(both.stream("abc", greedy()))
            assert streamed[-1].outputs == llm.generate("abc", greedy(), use_tqdm=False)[0].outputs
            stream = both.stream("abc", greedy(max_tokens=200))
            next(stream)
            stream.close()  # leaving early aborts
            assert len(both.embed(["abc", "def"], use_tqdm=False)) == 2
            with pytest.raises(ValidationError, match="outside the vocabulary"):
                both.generate([[5], [4000]], greedy(), use_tqdm=False)
            with pytest.raises(ConfigError, match="use AsyncLLM or the server"):
                _ = both.sessions
            both.llm_engine.check_idle()
            os.kill(engines(both)[0].pid, signal.SIGKILL)
            for ours, theirs in zip(both.generate(prompts, greedy(), use_tqdm=False), expected, strict=True):
                assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def engines(llm: LLM) -> list[Replica]:
    found: list[Replica] = llm.llm_engine._llm.replicas  # type: ignore[attr-defined]
    return found


def run_in(llm: LLM, work: Coroutine[Any, Any, T]) -> T:
    result: T = llm.llm_engine._wait(work)  # type: ignore[attr-defined]
    return result
