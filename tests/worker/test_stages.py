"""Two pipeline stages in one process, with the GPU's batch and its padded steps: the tokens of the whole model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.distributed.pipeline import Pipeline
from quire.executor import local as workers
from quire.kernels.cpu.build import library
from quire.messages.plan import StepMasks, StepPlan
from quire.platforms.cpu import CpuPlatform
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker
from tests.conftest import TINY_VOCAB, assert_idle
from tests.worker.eager_graphs import run_graphs_eagerly

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(14 + 9 * i)] for i in range(4)]
WANTED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_k=5, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1),
]


class Stages:
    """A worker made of two stages."""

    def __init__(self, *settings: Any, **more: Any) -> None:
        self._stages = [Worker(*settings, Ranks(pp_rank=stage, pp_size=2), **more) for stage in range(2)]
        self.needs, self.reads_groups, self.phases = (
            self._stages[0].needs, self._stages[0].reads_groups, self._stages[0].phases
        )  # fmt: skip
        self.mover, self.drafts, self.limits = None, self._stages[1].drafts, self._stages[0].limits

    def make_cache(self, num_blocks: int) -> None:
        for stage in self._stages:
            stage.make_cache(num_blocks)

    def launch(self, plan: StepPlan) -> PendingStep:
        assert not len(self._stages[0].launch(plan).result().tokens), "the first stage draws nothing"
        return self._stages[1].launch(plan)

    def supply(self, step: PendingStep, masks: StepMasks) -> None:
        self._stages[1].supply(step, masks)

    def expert_counts(self) -> Mapping[int, list[int]]:
        return {}

    def shutdown(self) -> None:
        if library() is not None and not self._stages[0]._ops.whole_steps:
            assert all(stage._runner.paths[0]._passes for stage in self._stages), "decodes are replayed, in each stage"
        for stage in self._stages:
            stage.shutdown()


@pytest.fixture
def in_stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Hidden states pass between the stages through a queue."""
    sent: deque[torch.Tensor] = deque()

    def begin(self: Pipeline, tokens: int) -> None:
        if self.received is not None:
            assert len(sent[0]) == tokens
            self.received[:tokens] = sent.popleft()

    monkeypatch.setattr(Pipeline, "begin", begin)
    monkeypatch.setattr(Pipeline, "send", lambda self, hidden: sent.append(hidden.clone()))
    monkeypatch.setattr(workers, "Worker", Stages)
    monkeypatch.setattr(EngineConfig, "executor_name", "uni")
    return {"pipeline_parallel_size": 2}


def run(model: Path, **settings: Any) -> list[list[list[int]]]:
    usual = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 20, "block_size": 8}
    with LLM(str(model), **usual, **settings) as llm:
        outputs = llm.generate(PROMPTS, WANTED, use_tqdm=False)
        assert_idle(llm)
        return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[list[int]]]:
    return run(tiny_model)


@pytest.mark.parametrize("budget", [24, 512])
def test_with_the_cpus_tape(
    tiny_model: Path, expected: list[list[list[int]]], in_stages: dict[str, Any], budget: int
) -> None:
    assert run(tiny_model, max_num_batched_tokens=budget, **in_stages) == expected


@pytest.mark.slow
def test_with_the_gpus_padded_steps(
    tiny_model: Path,
    expected: list[list[list[int]]],
    in_stages: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    used = run_graphs_eagerly(monkeypatch, {"decode", "mixed"})
    assert run(tiny_model, max_num_batched_tokens=32, **in_stages) == expected
    assert {(False, "decode forward"), (False, "mixed forward")} <= used
    assert {(True, "decode step"), (True, "mixed step")} <= used
    assert (False, "decode step") not in used and (False, "mixed step") not in used
