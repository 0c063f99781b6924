"""What calibration measures, and whether the cost model knows what the device does with a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from quire import LLM
from quire.cli.main import main
from quire.messages.plan import PrefixGroup, StepPlan
from quire.simulation.calibration import StepTimer, model_experts, spread, step_padding
from quire.simulation.costs import CAPTURED_LINE, PROMPT_LINE, CostModel, StepWork
from quire.simulation.device import StepWorkTracker
from quire.worker.cuda_graphs import capture_sizes
from quire.worker.mixed_steps import shape_of
from tests.executor.mixtures import write_mixture

NONE = np.empty(0, np.int32)


def plan(step: int, decodes: int, chunks: list[int], **more: Any) -> StepPlan:
    """So many decodes, and prompts of these many tokens."""
    rows = np.arange(decodes + len(chunks), dtype=np.int32)
    counts = np.array([1] * decodes + chunks, np.int32)
    tokens = np.zeros(sum(chunks), np.int32)
    return StepPlan(step, rows, counts, decodes, tokens, rows, rows, NONE, NONE, NONE, 100, **more)


@pytest.mark.parametrize("max_rows, max_tokens", [(256, 8192), (20, 100)])
def test_steps_are_padded_as_on_a_gpu(max_rows: int, max_tokens: int) -> None:
    """The rules of `CapturedMixedPath` and `CapturedDecodePath`, asked for many plans."""
    costs = CostModel(
        "", "", [(1, 1.0)], 0.0, 0.0, prompt_tokens=[(1, 1.0)], captured_tokens=[(1, 1.0)],
        padding=step_padding(max_rows, max_tokens),
    )  # fmt: skip
    chance, captured = random.Random(1), 0
    for _ in range(500):
        decodes = chance.choice([0, 1, 7, 16, 17, 100, 256, 300])
        chunks = [chance.choice([1, 5, 32, 33, 200, 600]) for _ in range(chance.choice([1, 1, 2, 8, 9]))]
        shape = shape_of(plan(0, decodes, chunks), 4096, False, max_rows, max_tokens)
        work = StepWork(decodes, sum(chunks), 0, 0, prompts=len(chunks))
        expected = (PROMPT_LINE, work.tokens) if shape is None else (CAPTURED_LINE, shape.num_tokens)
        assert costs.size(work) == expected
        captured += shape is not None
    assert captured > 20
    sizes = capture_sizes(max_rows)
    for rows in range(1, max_rows + 1):
        assert costs.size(StepWork(rows, 0, 0, 0))[1] == next(size for size in sizes if size >= rows)


def test_prefix_groups_save_reading() -> None:
    tracker = StepWorkTracker(8)
    groups = [PrefixGroup([0, 1, 2], 64), PrefixGroup([4, 5], 32)]
    assert tracker.of(plan(0, 6, [], groups=groups)).shared == 2 * 64 + 32
    assert tracker.of(plan(1, 5, [])).shared == 2 * 64, "row 5 is not in the step; groups are unchanged"
    assert tracker.of(plan(2, 6, [], groups=[])).shared == 0


class Slow:
    """An executor whose steps take as long as they say, one after the other."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def submit(self, plan: StepPlan) -> float:
        self.free = max(self.now, self.free) + plan.num_tokens
        return self.free

    def collect(self, handle: float) -> None:
        self.now = max(self.now, handle)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_timer_tells_each_step_its_own_time(in_flight: int) -> None:
    """…and, where nothing is in flight, what the engine takes between steps: 2 here."""
    slow = Slow()
    timer = StepTimer(slow, 64, lambda: slow.now)  # type: ignore[arg-type]
    handles = []
    for step, size in enumerate((5, 50, 7, 9)):
        handles.append(timer.submit(plan(step, size, [])))
        if len(handles) > in_flight:
            timer.collect(handles.pop(0))
        slow.now += 2.0
    for handle in handles:
        timer.collect(handle)
    slow.now += 1000.0
    timer.rest()  # idle: not a step's time
    timer.collect(timer.submit(plan(4, 3, [])))
    assert [(shape.decodes, seconds) for shape, seconds in timer.steps] == [(n, float(n)) for n in (5, 50, 7, 9, 3)]
    assert timer.pauses == [2.0] * (0 if in_flight else 3)


@pytest.mark.parametrize("flags", [[], ["--threads", "2"], ["--threads", "1", "--device", "cuda"]])
def test_cpu_seconds_are_those_of_one_thread(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, flags: list[str]
) -> None:
    assert main(["calibrate", "--cpu-time", "-o", str(tmp_path / "x.json"), *flags]) == 2
    assert "--threads 1" in capsys.readouterr().err


@pytest.mark.parametrize("name, per_token", [("mixtral", 2), ("qwen2-moe", 2), (None, None)])
def test_experts_take_the_bytes_of_the_checkpoints_tensors(
    tmp_path: Path, make_llm: Callable[..., LLM], tiny_model: Path, name: str | None, per_token: int | None
) -> None:
    folder = tiny_model if name is None else write_mixture(tmp_path, name)
    found = model_experts(make_llm(folder))
    if name is None:
        assert found is None
        return
    with safe_open(folder / "model.safetensors", framework="np") as file:
        tensors = {key: file.get_slice(key).get_shape() for key in file.keys() if ".experts." in key}  # noqa: SIM118
    assert found == (4 * sum(math.prod(shape) for shape in tensors.values()), 2, per_token)


def test_values_are_spread_before_any_cut() -> None:
    assert spread([1, 2, 3, 4, 5]) == [1, 5, 3, 2, 4]
    for count in range(12):
        assert sorted(spread(range(count))) == list(range(count))
        assert spread(range(count))[:2] == list(dict.fromkeys([0, count - 1]))[:count]
