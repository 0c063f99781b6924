"""Adapters with the GPU's kernels and captured paths, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from quire.platforms.cpu import CpuPlatform
from tests.adapters.beside_peft import check
from tests.adapters.zoo import INVOCATION, Zoo
from tests.conftest import assert_idle
from tests.kernels.triton_target import ON_GPU
from tests.worker.eager_graphs import run_graphs_eagerly

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels are compiled")]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize(
    ("kinds", "settings", "names"),
    [
        (
            {"decode", "mixed"},
            {"pipeline_depth": 1, "max_num_batched_tokens": 32},
            ["all", None, "activated", "embeddings"],
        ),
        (
            {"decode", "verify"},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
            ["wide", "dora"],
        ),
        (set(), {"enforce_eager": True}, ["all", None, "dora head", "patterns"]),
    ],
    ids=["graphs", "drafts", "eager"],
)
def test_captured_steps(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kinds: set[str], settings: dict[str, Any], names: list[str | None]
) -> None:
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    used = run_graphs_eagerly(monkeypatch, kinds) if kinds else set()
    base = zoo.base("llama")
    with base.llm(max_num_seqs=8, max_loras=3, **settings) as llm:
        check(base, llm, names, [[5, 17, *INVOCATION, 3, 40]], 3, logprobs=None)
        check(
            base, llm, names[::-1], [[5, 5, 17, 5, 5, 17, 5, *INVOCATION]], 8 if "verify" in kinds else 3, logprobs=None
        )
        assert_idle(llm)
    if kinds:
        assert {name for _, name in used} >= {f"{kind} step" for kind in kinds}
