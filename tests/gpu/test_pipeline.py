"""Two stages that share the GPU: the tokens of transformers, with captured graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(8)]
LENGTH = 40


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 64, "max_num_seqs": 32},
        {"enforce_eager": True},
        {"enforce_eager": True, "tensor_parallel_size": 2},
        {"num_gpu_blocks_override": 24, "block_size": 8},
    ],
    ids=["captured", "prompts beside decodes", "eager", "two ranks each", "preempted"],
)
def test_stages_on_one_gpu(
    engine: Callable[..., LLM],
    ties: NearTies,
    reference: Any,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    expected = greedy(reference, PROMPTS, LENGTH)
    llm = engine(pipeline_parallel_size=2, **settings)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    for i, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False)):
        ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"prompt {i}")
    ties.report("stages")
