"""Memory that holds no token's values may hold anything: tokens with drafts are the same over blocks full of NaN.

Blocks go from layers of one kind to those of another, and from one request to the next, as they are. Before each step
every free block, the null block and every fresh tensor is filled with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.kvcache.block_pool import NULL_BLOCK
from tests.engine.test_cache_kinds import KINDS, PROMPTS
from tests.speculative.scripted import SCRIPTED, Scripted, Tally
from tests.speculative.test_pairs import PairsCase, check, generate

NAN_BYTE, NO_TOKEN = 0xFF, 2**30
"""A float of any format whose bytes are all 0xFF is NaN; a token id that no table has."""


FAST = ("window", "hybrid")


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairsCase:
    return PairsCase(request.param, tmp_path_factory.mktemp("unwritten"))


@pytest.fixture
def nan_in_fresh_tensors() -> Iterator[None]:
    """`torch.empty` and its like are filled."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def poison(llm: LLM) -> None:
    """Fill what is free with NaN before each step of the engine."""
    core = llm.llm_engine.core
    kv, pool = core._executor._worker._runner.batch.kv, core.scheduler.tables.pool  # type: ignore[attr-defined]
    pages, submit = kv.data.flatten(1).view(torch.uint8), core._executor.submit

    def submit_poisoned(plan: Any) -> Any:
        blocks = torch.tensor([NULL_BLOCK, *pool._empty])
        pages[blocks] = NAN_BYTE
        if kv.has_tokens:
            kv.tokens[blocks] = NO_TOKEN
        return submit(plan)

    core._executor.submit = submit_poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"enforce_eager": True}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "int8_per_token_head"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_it(case: PairsCase, more: dict[str, Any], nan_in_fresh_tensors: None) -> None:
    if case.name == "latent" and "kv_cache_dtype" in more:
        pytest.skip("refused by name")
    expected = case.without_drafts(**more)
    Scripted.learn(expected)
    with case.open(speculative_config=SCRIPTED, max_num_batched_tokens=24, **more) as llm:
        poison(llm)
        tally = Tally(llm)
        for _ in range(2):
            check(generate(llm), expected)
        assert tally.verified > tally.accepted > 40


def test_rows_that_have_ended(case: PairsCase, nan_in_fresh_tensors: None) -> None:
    """A row that drew a stop id is still in the step that was planned meanwhile, on the null block: its values may be
    NaN, and are beside those of rows that go on."""

    def run(llm: LLM, stops: list[int]) -> list[RequestOutput]:
        prompts = [{"prompt_token_ids": PROMPTS[i % len(PROMPTS)][: 20 + i]} for i in range(8)]
        params = [
            SamplingParams(
                temperature=0.9,
                seed=i,
                max_tokens=24,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=stops[i : i + 1],
            )
            for i in range(8)
        ]
        return llm.generate(prompts, params, use_tqdm=False)

    with case.open() as llm:
        free = run(llm, [])
        stops = [output.outputs[0].token_ids[6 + 2 * i] for i, output in enumerate(free)]
        expected = run(llm, stops)
    Scripted.learn(free)
    with case.open(speculative_config=SCRIPTED, pipeline_depth=1) as llm:
        poison(llm)
        tally = Tally(llm)
        check(run(llm, stops), expected)
        assert tally.verified > tally.accepted > 20
