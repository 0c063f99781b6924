"""Ranks and engines that share the GPU yield the tokens of one, and sums over ranks are captured in graphs. NCCL needs
a device for each rank: graphs with its collectives are captured over a group of one, and ranks that share a device use
gloo, which cannot be captured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.distributed.collectives import collectives_started
from tests.conftest import TINY_VOCAB
from tests.executor.lockstep_engines import LockstepEngines
from tests.executor.lone_group import group_of_one
from tests.gpu.mixtures import FAMILIES, write_mixture
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import ON_A_GPU, USUAL

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(6)]
LENGTH = 32
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
PREEMPTED: dict[str, Any] = {"num_gpu_blocks_override": 24, "block_size": 8, "max_num_batched_tokens": 32}
MODELS = ["llama", *FAMILIES]


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path, reference: Any
) -> tuple[Path, Any, list[list[int]]]:
    """A tiny model's folder, the same in transformers, and its tokens."""
    if request.param != "llama":
        folder = tmp_path_factory.mktemp(request.param)
        reference = write_mixture(folder, request.param)
    return folder, reference, greedy(reference, PROMPTS, LENGTH)


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")


@pytest.fixture
def nccl() -> Iterator[None]:
    with group_of_one("nccl"):
        yield


def compare(llm: LLM, model: tuple[Path, Any, list[list[int]]], what: str) -> None:
    """Every prompt's tokens twice, the second time with a cached prefix."""
    _, reference, expected = model
    ties = NearTies(reference)
    for _ in range(2):
        for i, output in enumerate(llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
            ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"prompt {i}")
    ties.report(what, most=2)


@pytest.mark.usefixtures("nccl")
def test_graphs_with_collectives(engine: Callable[..., LLM], model: tuple[Path, Any, list[list[int]]]) -> None:
    before = collectives_started()
    llm = engine(model[0])
    assert collectives_started() > before, "the graphs of the start have collectives"
    compare(llm, model, "a group of one")
    alone = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    before = collectives_started()
    assert llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone
    # The prompt's step may be another graph's first; its thirty decodes start no collective: they are in graphs.
    layers = llm.llm_engine.info.model.num_layers
    assert collectives_started() - before < 3 * (2 * layers + 2)


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("settings", [{}, PREEMPTED], ids=["usual", "preempted"])
def test_two_ranks(
    engine: Callable[..., LLM], model: tuple[Path, Any, list[list[int]]], settings: dict[str, Any]
) -> None:
    compare(engine(model[0], tensor_parallel_size=2, **settings), model, "two ranks")


@pytest.mark.usefixtures("shared_gpu")
def test_several_sequences_over_two_ranks_equal_those_of_one(engine: Callable[..., LLM]) -> None:
    params = SamplingParams(n=5, temperature=0.9, seed=3, max_tokens=16, ignore_eos=True)
    generated = [
        [list(sample.token_ids) for sample in engine(**ranks).generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs]
        for ranks in ({}, {"tensor_parallel_size": 2})
    ]
    assert generated[0] == generated[1]


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_experts_over_two_ranks(engine: Callable[..., LLM], model: tuple[Path, Any, list[list[int]]]) -> None:
    llm = engine(model[0], tensor_parallel_size=2, enable_expert_parallel=True, num_redundant_experts=2)
    compare(llm, model, "experts")
    llm.rebalance_experts()
    llm.reset_prefix_cache()
    compare(llm, model, "experts elsewhere")


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_engines_in_lockstep(model: tuple[Path, Any, list[list[int]]]) -> None:
    folder, reference, expected = model
    pair = LockstepEngines(folder, 2, **USUAL)
    try:
        generated = asyncio.run(pair.generate({0: PROMPTS[:4], 1: PROMPTS[4:]}, max_tokens=LENGTH))
    finally:
        pair.close()
    ties = NearTies(reference)
    for i, ours in enumerate([*generated[0], *generated[1]]):
        ties.compare(PROMPTS[i], ours, expected[i], f"prompt {i}")
    ties.report("lockstep", most=2)


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_two_engines(model: tuple[Path, Any, list[list[int]]]) -> None:
    folder, reference, expected = model

    async def generated() -> list[list[int]]:
        llm = await asyncio.to_thread(AsyncLLM, str(folder), data_parallel_size=2, **USUAL)
        try:
            return await asyncio.gather(*(_generate(llm, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)))
        finally:
            llm.shutdown()

    ties = NearTies(reference)
    for i, ours in enumerate(asyncio.run(generated())):
        ties.compare(PROMPTS[i], ours, expected[i], f"prompt {i}")
    ties.report("two engines")


async def _generate(llm: AsyncLLM, name: str, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate({"prompt_token_ids": prompt}, GREEDY, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("disk", [False, True], ids=["own host memory", "shared host memory"])
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_sessions_over_two_ranks(
    engine: Callable[..., LLM], model: tuple[Path, Any, list[list[int]]], disk: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a disk, the ranks' host memory is one file that the engine reads; each rank registers its part of it."""
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.loading_pays", lambda *_: True)
    _, reference, expected = model
    below = {"kv_disk": str(tmp_path)} if disk else {}
    llm = engine(tensor_parallel_size=2, block_size=8, num_gpu_blocks_override=60, swap_space=0.05, **below)
    half = LENGTH // 2
    short = SamplingParams(temperature=0, max_tokens=half, ignore_eos=True)
    ties = NearTies(reference)
    first = []
    for i, prompt in enumerate(PROMPTS):
        session = llm.sessions.create(f"s{i}", prompt)
        first.append(list(session.generate(short).outputs[0].token_ids))
        session.suspend()
    llm.reset_prefix_cache()
    for i, prompt in enumerate(PROMPTS):
        rest = list(llm.sessions.resume(f"s{i}").generate(short).outputs[0].token_ids)
        ties.compare(prompt, first[i] + rest, expected[i], f"session {i}")
    ties.report("sessions over ranks")
    tiers = llm.llm_engine.core.scheduler.tiers
    assert tiers is not None and tiers.loaded > 0
