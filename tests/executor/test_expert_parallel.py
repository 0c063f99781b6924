"""Expert parallelism over ranks, and over engines in lockstep: the same tokens as in one process."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from quire import LLM, AsyncLLM
from quire.config import EngineConfig
from quire.distributed.collectives import collectives_started
from quire.distributed.experts import Copy, ExpertRanks, copy_rows
from quire.engine import ipc
from quire.errors import ConfigError, EngineDeadError, ValidationError
from quire.messages.sampling import SamplingParams
from tests.engine.test_tiers_engine import run_storm
from tests.executor.lockstep_engines import LockstepEngines
from tests.executor.mixtures import write_mixture
from tests.executor.test_multiprocess import BEGIN, FAILS, TIGHT, metric, rank_children, tokens
from tests.models.harness import random_reference
from tests.models.zoo import ZOO

SETTINGS = {**TIGHT, "skip_tokenizer_init": True}
FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe"]
PROMPTS = [[(7 * i + 3 * j) % 97 for j in range(20 + 5 * i)] for i in range(4)]
CROWD = [[3 + i, *BEGIN, 5 + i] for i in range(6)]


def write(name: str, folder: Path, skewed: bool = False) -> Path:
    """A random checkpoint; skewed: the router prefers the first experts, which are on the first rank."""
    reference = random_reference(ZOO[name])
    if skewed:
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("mlp.gate.weight"):
                parameter.data *= torch.tensor([8.0, 8.0, *[1.0] * (len(parameter) - 2)])[:, None]
    reference.save_pretrained(folder)
    return folder


def mixed_load(llm: LLM) -> list[Any]:
    """Chunks, cached prefixes, several sequences, more rows than blocks."""
    return [
        tokens(llm, PROMPTS),
        tokens(llm, [[*BEGIN, 60 + i] for i in range(3)] * 2),
        tokens(llm, [BEGIN], n=3, temperature=0.9, seed=5),
        tokens(llm, CROWD, max_tokens=30),
    ]


@pytest.fixture
def make_pair() -> Iterator[Callable[..., LockstepEngines]]:
    made: list[LockstepEngines] = []

    def make(folder: Path, size: int = 2, **settings: Any) -> LockstepEngines:
        made.append(LockstepEngines(folder, size, **{**SETTINGS, **settings}))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


# Over the ranks of one engine


def over_ranks(name: str, folder: Path, make_llm: Callable[..., LLM], ranks: int, spare: int, **more: Any) -> None:
    write(name, folder, skewed=True)
    alone = mixed_load(make_llm(folder, **SETTINGS))
    settings = {"tensor_parallel_size": ranks, "enable_expert_parallel": True, "num_redundant_experts": spare}
    llm = make_llm(folder, **SETTINGS, **settings, **more)
    assert mixed_load(llm) == alone
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "prefix_cache_hits") > 0
    before = metric(llm, "expert_rank_load_max_over_mean")
    outcome = llm.rebalance_experts()
    assert outcome.moved > 0 and 1 <= outcome.after < outcome.before
    llm.reset_prefix_cache()
    assert mixed_load(llm) == alone
    assert metric(llm, "expert_rank_load_max_over_mean") < before


def test_five_experts_over_two_ranks_match_one_process(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    over_ranks("mixtral", tmp_path / "model", make_llm, ranks=2, spare=1)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_over_ranks(name: str, ranks: int, spare: int, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    over_ranks(name, tmp_path / "model", make_llm, ranks, spare)


@pytest.mark.slow
def test_over_the_ranks_of_each_stage(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    over_ranks("qwen2-moe", tmp_path / "model", make_llm, ranks=2, spare=1, pipeline_parallel_size=2)


@pytest.mark.slow
def test_experts_are_rebalanced_at_the_interval(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    folder = write("qwen3-moe", tmp_path / "model", skewed=True)
    alone = mixed_load(make_llm(folder, **SETTINGS))
    over_two = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "num_redundant_experts": 2}
    llm = make_llm(folder, **SETTINGS, **over_two, expert_rebalance_interval=20)
    moved = []
    balance = llm.llm_engine.core._executor.balance
    commit, balance.commit = (
        balance.commit,
        lambda placements, counts: (moved.append(placements), commit(placements, counts)),
    )
    assert mixed_load(llm) == alone
    assert len(moved) > 3 and any(moved)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["none", "host"])
def test_sessions_and_tiers_over_ranks(tiers: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    folder = write_mixture(tmp_path / "model", "mixtral")
    make = functools.partial(make_llm, folder, tensor_parallel_size=2, enable_expert_parallel=True)
    seen = run_storm(make, make_llm(folder), tmp_path, tiers, seed=11, operations=60)
    assert seen["found"] > 0.3 * seen["tokens"], "most computed tokens are cache hits"


def test_a_rank_without_moved_experts_counts_the_collective_too() -> None:
    """Ranks that have started the same number of collectives can go on after a step that failed on all of them."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        before = collectives_started()
        copy_rows(torch.zeros(2, 3), [Copy((1, 0), (2, 0))], ExpertRanks(0, 3))
        assert collectives_started() == before + 1
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_a_rank_lost_before_a_rebalance_is_reported_and_ends_the_engine(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "mixtral")

    async def live() -> None:
        llm = AsyncLLM(folder, **TIGHT, tensor_parallel_size=2, enable_expert_parallel=True)
        try:
            await llm.rebalance_experts()
            os.kill(rank_children()[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                await llm.rebalance_experts()
            assert "was killed by SIGKILL" in await asyncio.wait_for(llm.wait_until_dead(), 5)
        finally:
            llm.shutdown()

    asyncio.run(live())


# Over engines in lockstep


async def step_together(pair: LockstepEngines, alone: dict[str, Any]) -> None:
    size = len(pair.engines)
    everywhere = await pair.generate(dict.fromkeys(range(size), PROMPTS))
    assert all(everywhere[engine] == alone["prompts"] for engine in range(size))
    assert (await pair.generate({1: PROMPTS}))[1] == alone["prompts"], "only one has anything to do"
    unlike = await pair.generate({0: CROWD, 1: CROWD[:1]}, max_tokens=30)
    assert unlike == {0: alone["crowd"], 1: alone["crowd"][:1]}
    samples = await pair.generate({0: [BEGIN], 1: [BEGIN]}, n=3, temperature=0.9, seed=5)
    assert samples == {0: alone["samples"], 1: alone["samples"]}


async def late_wakeups(pair: LockstepEngines, order: list[int]) -> list[int]:
    """A request for which the engines are woken one after the other, long after it was sent."""
    pair.add(
        1, name := f"late-{order}", PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), False
    )
    for engine in order:
        await asyncio.sleep(0.1)
        pair.engines[engine].send(ipc.Wake(pair.number))
    await pair.until(lambda: (name, 0) in pair.ended)
    return pair.tokens[name, 0]


def answers(llm: LLM) -> dict[str, Any]:
    """The results of one process for the requests of `step_together`."""

    def flat(found: list[list[list[int]]]) -> list[list[int]]:
        return [sample for samples in found for sample in samples]

    return {
        "prompts": flat(tokens(llm, PROMPTS)),
        "crowd": flat(tokens(llm, CROWD, max_tokens=30)),
        "samples": flat(tokens(llm, [BEGIN], n=3, temperature=0.9, seed=5)),
    }


def over_engines(
    name: str,
    folder: Path,
    make_llm: Callable[..., LLM],
    make_pair: Callable[..., LockstepEngines],
    size: int,
    spare: int,
) -> LockstepEngines:
    write(name, folder, skewed=True)
    alone = answers(make_llm(folder, **SETTINGS))
    pair = make_pair(folder, size, num_redundant_experts=spare)

    async def live() -> None:
        await step_together(pair, alone)
        outcomes = await pair.rebalance()
        assert len({(each.before, each.after, each.moved) for each in outcomes}) == 1, "all do the same"
        assert outcomes[0].moved > 0 and 1 <= outcomes[0].after < outcomes[0].before
        for index in range(size):
            assert (await pair.ask(index, ipc.ResetPrefixCache(7))).is_empty
        assert (await pair.generate({0: PROMPTS, 1: PROMPTS[:1]})) == {0: alone["prompts"], 1: alone["prompts"][:1]}
        for order in ([*range(size)], [*reversed(range(size))]):
            assert await late_wakeups(pair, order) == alone["prompts"][0]

    asyncio.run(live())
    return pair


def test_engines_in_lockstep_match_one_and_end_together(
    tmp_path: Path, make_llm: Callable[..., LLM], make_pair: Callable[..., LockstepEngines]
) -> None:
    pair = over_engines("mixtral", tmp_path / "model", make_llm, make_pair, size=2, spare=1)
    asleep = [cpu_seconds(engine.pid) for engine in pair.engines]
    time.sleep(0.5)
    assert sum(cpu_seconds(engine.pid) for engine in pair.engines) - sum(asleep) < 0.2, "without work they sleep"

    async def lose_one() -> None:
        pair.attach()
        for engine in range(2):
            pair.add(engine, f"long-{engine}", BEGIN, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        await pair.until(lambda: len(pair.tokens["long-0", 0]) > 3)
        os.kill(pair.engines[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        while len(pair.deaths) < 2:
            assert time.monotonic() - killed < 20
            await asyncio.sleep(0.01)

    asyncio.run(lose_one())
    assert "another" in pair.deaths[0][0] and "has exited" in pair.deaths[0][0]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.parametrize("size, spare", [(2, 0), (2, 2), (3, 0), (3, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_over_engines(
    name: str,
    size: int,
    spare: int,
    tmp_path: Path,
    make_llm: Callable[..., LLM],
    make_pair: Callable[..., LockstepEngines],
) -> None:
    over_engines(name, tmp_path / "model", make_llm, make_pair, size, spare)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_many_short_requests_all_finish(
    depth: int, tmp_path: Path, make_llm: Callable[..., LLM], make_pair: Callable[..., LockstepEngines]
) -> None:
    """Engines go to sleep and wake up all the time."""
    folder, rng = write("mixtral", tmp_path / "model"), random.Random(depth)
    prompts = [[3 + i, *BEGIN[: i % 7 + 1]] for i in range(12)]
    alone = {n: tokens(make_llm(folder, **SETTINGS), prompts, max_tokens=n) for n in (1, 3)}
    pair = make_pair(folder, 3, pipeline_depth=depth)

    async def one() -> None:
        await asyncio.sleep(rng.random() * 6)
        which, length = rng.randrange(len(prompts)), rng.choice((1, 3))
        found = await pair.generate({rng.randrange(3): [prompts[which]]}, max_tokens=length)
        assert list(found.values()) == [alone[length][which]]

    async def storm() -> None:
        await asyncio.gather(*(one() for _ in range(300)))

    asyncio.run(storm())


@pytest.mark.slow
def test_a_step_that_fails_in_one_engine_is_repeated(
    tmp_path: Path, make_llm: Callable[..., LLM], make_pair: Callable[..., LockstepEngines]
) -> None:
    folder = write("mixtral", tmp_path / "model")
    alone = [samples[0] for samples in tokens(make_llm(folder, **SETTINGS), PROMPTS)]
    pair = make_pair(folder, logits_processors=[FAILS])

    async def live() -> None:
        found = await pair.generate({0: PROMPTS, 1: PROMPTS}, extra_args={"fails": 1})
        assert found == {0: alone, 1: alone}

    asyncio.run(live())


# What is refused


@pytest.mark.slow
def test_an_engine_may_take_longer_to_load_than_a_step_may(
    tmp_path: Path, make_pair: Callable[..., LockstepEngines]
) -> None:
    folder = write("mixtral", tmp_path / "model")
    pair = make_pair(folder, logits_processors=["tests.executor.processors.LoadsLate"], step_timeout=2)

    async def live() -> None:
        found = await pair.generate({0: [BEGIN]}, max_tokens=3)
        assert len(found[0][0]) == 3
        os.kill(pair.engines[1].pid, signal.SIGSTOP)
        begin = time.monotonic()
        pair.add(0, "long", BEGIN, SamplingParams(temperature=0, max_tokens=50))
        while not pair.deaths:
            assert time.monotonic() - begin < 20, "an engine that stands still is noticed after step_timeout"
            await asyncio.sleep(0.05)

    asyncio.run(live())
    assert "another engine of the 2 that share the experts has exited or does not respond" in pair.deaths[0][0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_redundant_experts": 2}, r"num_redundant_experts \(2\) needs enable_expert_parallel"),
        ({"num_redundant_experts": -1}, "num_redundant_experts must be an integer of at least 0"),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2, "tensor_parallel_size": 2},
            "supports only engines of one rank",
        ),
        ({"batch_invariant": True, "tensor_parallel_size": 4}, "at most 2 tensor-parallel ranks, .* is 4"),
        (
            {"batch_invariant": True, "enable_expert_parallel": True, "num_redundant_experts": 1},
            "a fixed placement of experts, but num_redundant_experts is 1",
        ),
    ],
)
def test_contradicting_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig("m", **settings)
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_is_refused_before_any_process_starts(tmp_path: Path, tiny_model: Path) -> None:
    over_two = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has none"):
        LLM(str(tiny_model), **TIGHT, **over_two)
    mixture = write("mixtral-window", tmp_path / "model")
    with pytest.raises(ConfigError, match="3 experts cannot be spread over 4 ranks"):
        LLM(str(mixture), **SETTINGS, tensor_parallel_size=4, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="num_redundant_experts is at most 3 here"):
        LLM(str(mixture), **SETTINGS, **over_two, num_redundant_experts=4)


def test_experts_of_one_process_cannot_be_rebalanced(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValidationError, match="set enable_expert_parallel, with several ranks"):
        make_llm().rebalance_experts()
