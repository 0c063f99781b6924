"""Rows with a common prefix yield the same tokens whether attention reads its blocks once or once a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.scheduler import prefix_groups as groups
from tests.conftest import TINY_VOCAB
from tests.worker.test_interpreted_engine import (  # noqa: F401
    interpreted,
    preemptions,
    pytestmark,
    tokens_of,
)

from quire.kernels.triton.prefix_attention import PrefixAttention  # isort: skip

BEGINNING = [(7 * i + 3) % TINY_VOCAB for i in range(34)]
PROMPTS = [BEGINNING, [*BEGINNING, 4], [*BEGINNING[:18], 9, 8]]
PARAMS = [
    SamplingParams(temperature=0.9, seed=11, n=6, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True),
]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a prefix is read for a group; groups are used however little they save."""
    monkeypatch.setattr(groups, "LEAST_TOKENS", 8)
    monkeypatch.setattr(groups, "LEAST_SAVED", 1)
    calls: list[int] = []
    attend = PrefixAttention.attend

    def counted(self: PrefixAttention, *arguments: Any) -> Any:
        calls.append(1)
        return attend(self, *arguments)

    monkeypatch.setattr(PrefixAttention, "attend", counted)
    return calls


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_depth": 1, "block_size": 8, "max_num_seqs": 8},
        {"pipeline_depth": 0, "block_size": 4, "max_num_seqs": 8, "num_gpu_blocks_override": 15},
    ],
    ids=["overlapped", "preempted"],
)
def test_tokens_equal_those_of_the_cpu_kernels_without_groups(
    llm: LLM,
    interpreted: Callable[..., LLM],  # noqa: F811
    passes: list[int],
    settings: dict[str, Any],
) -> None:
    ours = interpreted(**settings)
    outputs = ours.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert passes
    assert tokens_of(outputs) == tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert (preemptions(ours) > 0) == ("num_gpu_blocks_override" in settings)


def test_without_a_backend_that_reads_groups_none_are_kept(interpreted: Callable[..., LLM], llm: LLM) -> None:  # noqa: F811
    for engine in (llm, interpreted(prefix_group_attention=False)):
        assert isinstance(engine.llm_engine.core.scheduler.requests.groups, groups.NoPrefixGroups)
