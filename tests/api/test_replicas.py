"""Several engines behind one `AsyncLLM`: the same tokens, prefixes that are found, sessions at home, deaths unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.errors import (
    ConfigError,
    ValidationError,
)

T = TypeVar("T")
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
    figures = await asyncio.gather(*(replica.get_metrics() for replica in llm.replicas))
    return [next(one.value for one in each if one.name == "quire:prefix_cache_hits") for each in figures]


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing is open anywhere, neither here nor in any engine, and the router knows it."""
    assert llm.num_open_requests == 0 and llm.router is not None
    for replica in llm.replicas:
        assert not replica.boxes
        figures = {metric.name: metric.value for metric in await replica.get_metrics()}
        for name in ("num_requests_running", "num_requests_waiting"):
            assert figures[f"quire:{name}"] == 0
    for load in llm.router.figures():
        assert (load.open_requests, load.rows, load.queued_tokens, load.kv_tokens) == (0, 0, 0, 0)


def children() -> set[str]:
    """Processes that this one has started."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, **SETTINGS)
    yield llm
    llm.shutdown()


@pytest.fixture
def pair(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Two engines, with empty caches; checked to be idle after the test."""
    run(shared.reset_prefix_cache())
    yield shared
    run(assert_idle(shared))


class TestTokens:
    def test_they_are_those_of_one_engine(self, pair: AsyncLLM, llm: LLM) -> None:
        shared_begin = "the world one two three four five "
        prompts = [*(shared_begin + str(i) for i in range(8)), *("x the " * i for i in range(1, 25, 3)), "abc"]
        for asked in (greedy(), greedy(n=3, temperature=1.0, seed=5)):
            wanted = llm.generate(prompts, asked, use_tqdm=False)

            async def work(asked: SamplingParams = asked) -> list[RequestOutput]:
                return await asyncio.gather(*(final(pair, prompt, asked) for prompt in prompts))

            for ours, theirs in zip(run(work()), wanted, strict=True):
                assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]

    def test_both_engines_work(self, pair: AsyncLLM) -> None:
        async def work() -> list[int]:
            before = [(await replica.report_health()).steps for replica in pair.replicas]
            await asyncio.gather(*(final(pair, f"{i} abc") for i in range(16)))
            after = [(await replica.report_health()).steps for replica in pair.replicas]
            return [b - a for a, b in zip(before, after, strict=True)]

        assert all(run(work()))


class TestPrefixes:
    def test_what_begins_alike_goes_to_the_same_engine_and_is_found(self, pair: AsyncLLM) -> None:
        begins = [[5 + i] * 64 for i in range(4)]

        async def work() -> tuple[list[int | None], list[list[float]]]:
            found, counts = [], [await hits(pair)]
            for _ in range(3):
                for begin in begins:
                    output = await final(pair, [*begin, 9, 8, 7], greedy(max_tokens=4))
                    found.append(output.num_cached_tokens)
            counts.append(await hits(pair))
            return found, counts

        found, (before, after) = run(work())
        assert found == [0] * 4 + [64] * 8  # the router knew, every time
        gained = [b - a for a, b in zip(before, after, strict=True)]
        assert sum(gained) == 8 * 64 and all(gained)  # and the beginnings are shared out

    def test_tenants_have_prefixes_of_their_own(self, pair: AsyncLLM) -> None:
        async def work() -> list[int | None]:
            tenants = ["a", "b", "a", "b"]
            return [(await final(pair, [7] * 50, tenant=tenant)).num_cached_tokens for tenant in tenants]

        assert run(work()) == [0, 0, 48, 48]

    def test_answers_are_known_to_the_router_too(self, pair: AsyncLLM) -> None:
        async def work() -> int | None:
            first = await final(pair, [11] * 20, greedy(max_tokens=40))
            await asyncio.gather(*(final(pair, f"{i} abc") for i in range(6)))  # others, everywhere
            whole = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            return (await final(pair, whole)).num_cached_tokens

        assert run(work()) == 48


class TestStarting:
    def test_one_that_cannot_start_ends_all_and_is_told_once(self, tiny_model: Path, tmp_path: Path) -> None:
        (tmp_path / "replica-1").write_text("in the way")
        before = children()
        with pytest.raises(Exception, match="replica-1"):
            AsyncLLM(tiny_model, **SETTINGS, kv_disk=str(tmp_path), swap_space=0.02)
        assert children() <= before

    @pytest.mark.parametrize("size", [0, -1, True, "2", 1.5])
    def test_sizes_that_are_none(self, tiny_model: Path, size: Any) -> None:
        with pytest.raises(ConfigError, match="data_parallel_size must be an integer of at least 1"):
            AsyncLLM(tiny_model, data_parallel_size=size)

    def test_a_memory_map_is_of_one_of_them(self, pair: AsyncLLM) -> None:
        assert run(pair.memory_map(1)) is not None
        with pytest.raises(ValidationError, match="there is no replica 2: there are 2, counted from 0"):
            run(pair.memory_map(2))
