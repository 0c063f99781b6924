"""Steps with prompts, padded to a captured shape, yield the same as unpadded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.messages.plan import StepPlan
from quire.platforms.cpu import CpuPlatform
from quire.worker.mixed_steps import DECODES, PROMPTS, TOKENS, pad_plan, shape_of
from tests.conftest import TINY_VOCAB, assert_idle
from tests.kernels.triton_target import ON_GPU
from tests.worker.eager_graphs import run_graphs_eagerly

PAD = 99


def plan_of(decodes: int, prompts: list[int], draws: list[int], context: int = 100) -> StepPlan:
    """Rows 0, 1, …; `draws`: which of the prompts draw a token."""
    none = np.empty(0, np.int32)
    rows = np.arange(decodes + len(prompts), dtype=np.int32)
    samples = np.array([*range(decodes), *(decodes + i for i in draws)], np.int32)
    return StepPlan(
        step=0, rows=rows, counts=np.array([1] * decodes + prompts, np.int32), num_decodes=decodes,
        tokens=np.arange(1, sum(prompts) + 1, dtype=np.int32), samples=samples, sample_rows=rows[samples],
        block_rows=none, block_indices=none, blocks=none, max_context=context,
    )  # fmt: skip


@pytest.mark.parametrize("decodes", [0, 1, 8, 9, 250])
@pytest.mark.parametrize("prompts, draws", [([5], [0]), ([5, 1, 30], [1]), ([64], []), ([1] * PROMPTS, [0, 3, 7])])
def test_padding_keeps_the_real_rows_in_place(decodes: int, prompts: list[int], draws: list[int]) -> None:
    plan = plan_of(decodes, prompts, draws)
    shape = shape_of(plan, long_context=1000, grouped=False, max_rows=512, max_tokens=512)
    assert shape is not None and shape.decodes in DECODES and shape.tokens in TOKENS
    more = pad_plan(plan, shape, PAD)
    assert len(more.rows) == len(more.counts) == shape.rows and more.num_decodes == shape.decodes >= decodes
    assert len(more.tokens) == shape.tokens == more.counts[more.num_decodes :].sum()
    assert len(more.samples) == len(more.sample_rows) == shape.draws
    real = len(plan.samples)
    assert (more.sample_rows[:real] == plan.sample_rows).all() and (more.sample_rows[real:] == PAD).all()
    assert (more.rows[more.samples[:real]] == plan.rows[plan.samples]).all()
    # Each prompt has its own tokens, and no other row has them.
    ends = np.cumsum(more.counts[more.num_decodes :])
    given = {int(row): more.tokens[end - count : end].tolist() for row, end, count in zip(
        more.rows[more.num_decodes :], ends, more.counts[more.num_decodes :], strict=True) if row != PAD}  # fmt: skip
    starts = np.cumsum([0, *prompts])
    assert given == {decodes + i: plan.tokens[starts[i] : starts[i + 1]].tolist() for i in range(len(prompts))}
    assert (more.rows[decodes : more.num_decodes] == PAD).all() and (more.counts[: more.num_decodes] == 1).all()


def test_steps_that_fit_no_shape_are_not_padded() -> None:
    assert shape_of(plan_of(4, [TOKENS[-1] + 1], []), 1000, False, 512, 512) is None
    assert shape_of(plan_of(4, [1] * (PROMPTS + 1), []), 1000, False, 512, 512) is None
    assert shape_of(plan_of(4, [9], []), 1000, False, 8, 512) is None
    assert shape_of(plan_of(4, [9], []), 1000, False, 512, 31) is None
    assert shape_of(plan_of(DECODES[-1] + 1, [9], []), 1000, False, 1024, 512) is None


@pytest.mark.skipif(ON_GPU, reason="on a GPU steps are really captured: tests/gpu runs them there")
@pytest.mark.parametrize("depth", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_engines_yield_the_same(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """With the GPU's kernels in the interpreter, every step on the path that would be captured."""
    from quire.worker import mixed_steps

    monkeypatch.setattr(mixed_steps, "DECODES", (0, 2, 8))
    monkeypatch.setattr(mixed_steps, "TOKENS", (8, 16, 24))
    prompts = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(14 + 9 * i)] for i in range(4)]
    wanted = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=4, top_k=5, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1),
    ]
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 20, "block_size": 8,
    }  # fmt: skip

    def run(**more: Any) -> list[list[int]]:
        with LLM(str(tiny_model), **settings, **more) as llm:
            outputs = llm.generate(prompts, wanted, use_tqdm=False)
            assert_idle(llm)
            return [list(output.outputs[0].token_ids) for output in outputs]

    expected = run()
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    used = run_graphs_eagerly(monkeypatch, {"mixed"})
    assert run(enforce_eager=False, pipeline_depth=depth, max_num_batched_tokens=24) == expected
    assert {(True, "mixed step"), (True, "mixed forward")} <= used, "no step went through a padded plan"
