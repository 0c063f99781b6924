"""The device starts on a batch while the rest of it is still being queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from tests.conftest import TINY_VOCAB, write_tiny_model

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(20)] for i in range(12)]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def make(folder: Path, depth: int) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", max_num_batched_tokens=64, pipeline_depth=depth)


def launches_while_queueing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each step: how many requests were queued when it was launched."""
    added: list[int] = []
    seen: list[int] = []
    core = llm.llm_engine.core
    add, submit = core.add, core._executor.submit
    monkeypatch.setattr(core, "add", lambda request: (added.append(1), add(request))[1])
    monkeypatch.setattr(core._executor, "submit", lambda plan: (seen.append(len(added)), submit(plan))[1])
    return seen


def test_a_full_step_is_launched_before_all_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path)
    with make(folder, 0) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with make(folder, 1) as llm:
        seen = launches_while_queueing(llm, monkeypatch)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert seen[0] == 4  # 80 tokens: more than the 64 of a step
        assert all(count == len(PROMPTS) for count in seen[1:])
        llm.llm_engine.check_idle()


def test_without_overlap_nothing_starts_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(write_tiny_model(tmp_path), 0) as llm:
        seen = launches_while_queueing(llm, monkeypatch)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all(count == len(PROMPTS) for count in seen)


def test_a_bad_prompt_after_the_launch_aborts_the_batch(tmp_path: Path) -> None:
    with make(write_tiny_model(tmp_path), 1) as llm:
        with pytest.raises(ValidationError):
            llm.generate([*PROMPTS, [TINY_VOCAB + 5]], PARAMS, use_tqdm=False)
        llm.llm_engine.check_idle()
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].finished
