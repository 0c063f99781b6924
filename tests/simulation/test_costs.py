"""The cost model: seconds of a step, its file, and its fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from quire.errors import ValidationError
from quire.simulation.costs import (
    CostModel,
    StepPadding,
    StepWork,
    fit,
    profile_names,
    read_profile,
    write_profile,
)

MODEL = CostModel(
    "test", "by hand", [(1, 1.0), (10, 1.0), (20, 3.0)], context_seconds=0.01, pair_seconds=0.001, prompt_seconds=0.5
)


@pytest.mark.parametrize(
    "shape, seconds",
    [
        (StepWork(1, 0, 0, 0), 1.0),
        (StepWork(15, 0, 100, 0), 2.0 + 1.0),
        (StepWork(0, 20, 0, 210), 3.0 + 0.21 + 0.5),
        (StepWork(5, 25, 10, 0), 5.0 + 0.1 + 0.5),  # beyond the last point as between the last two
        (StepWork(0, 0, 0, 0), 0.0),
    ],
)
def test_seconds_of_a_step(shape: StepWork, seconds: float) -> None:
    assert MODEL.seconds(shape) == pytest.approx(seconds)


def test_a_fit_finds_the_model_that_made_the_steps() -> None:
    chance = random.Random(3)
    truth = CostModel(
        "t", "", [(1, 4e-3), (8, 4.2e-3), (64, 5e-3), (512, 0.02), (2048, 0.07)], 3e-8, 1.5e-9, prompt_seconds=2e-4
    )
    shapes = []
    for _ in range(400):
        decodes, prompt = chance.choice([(1, 0), (8, 0), (64, 0), (64, 448), (0, 512), (0, 2048), (8, 0), (32, 0)])
        context, pairs = decodes * chance.randint(1, 4000), prompt * chance.randint(1, 3000)
        shapes.append(StepWork(decodes, prompt, context, pairs))
    found = fit(truth, shapes, [truth.seconds(shape) for shape in shapes])
    assert found.error is not None and found.error < 1e-3
    assert found.context_seconds == pytest.approx(truth.context_seconds, rel=0.02)
    assert found.pair_seconds == pytest.approx(truth.pair_seconds, rel=0.02)
    line = [seconds for _, seconds in found.tokens]
    assert line == sorted(line)


PADDED = CostModel(
    "padded", "by hand", [(1, 1.0), (64, 2.0)], 0.01, 0.001, prompt_tokens=[(1, 10.0), (101, 20.0)],
    captured_tokens=[(16, 3.0), (64, 6.0)], shared_seconds=0.002,
    padding=StepPadding(decodes=[1, 8, 64], mixed_decodes=[0, 16], mixed_tokens=[16, 48], prompts=2),
)  # fmt: skip


@pytest.mark.parametrize(
    "shape, line, size, seconds",
    [
        (StepWork(5, 0, 0, 0), "tokens", 8, 1.0 + 7 / 63),
        (StepWork(65, 0, 0, 0), "tokens", 65, 2.0 + 1 / 63),  # larger than any graph
        (StepWork(0, 9, 0, 0, prompts=1), "captured_tokens", 16, 3.0),
        (StepWork(3, 17, 0, 0, prompts=2), "captured_tokens", 64, 6.0),
        (StepWork(3, 17, 0, 0, prompts=3), "prompt_tokens", 20, 11.9),  # too many prompts
        (StepWork(17, 4, 0, 0, prompts=1), "prompt_tokens", 21, 12.0),  # too many decodes
        (StepWork(0, 51, 0, 100, prompts=1), "prompt_tokens", 51, 15.0 + 0.1),
        (StepWork(0, 9, 0, 0, prompts=1, has_images=True), "prompt_tokens", 9, 10.8),
        (StepWork(8, 0, 1000, 0, shared=900), "tokens", 8, 1.0 + 7 / 63 + 1.0 + 1.8),
    ],
)
def test_captured_steps_cost_what_their_graph_does(shape: StepWork, line: str, size: int, seconds: float) -> None:
    assert PADDED.size(shape) == (line, size)
    assert PADDED.seconds(shape) == pytest.approx(seconds)


def test_a_fit_tells_kinds_of_steps_apart() -> None:
    chance = random.Random(4)
    shapes = []
    for _ in range(600):
        decodes = chance.choice([0, 1, 4, 8, 16, 30, 64])
        prompt = chance.choice([0, 8, 16, 33, 48, 60, 101]) if decodes else chance.choice([8, 16, 33, 48, 60, 101])
        context, pairs = decodes * chance.randint(1, 400), prompt * chance.randint(1, 300)
        shared = chance.randint(0, context) if chance.random() < 0.3 else 0
        shapes.append(
            StepWork(decodes, prompt, context, pairs, prompts=min(prompt, chance.randint(1, 3)), shared=shared)
        )
    blank = msgspec.structs.replace(PADDED, tokens=[(1, 0.0)], prompt_tokens=[(1, 0.0)], captured_tokens=[(1, 0.0)])
    found = fit(blank, shapes, [PADDED.seconds(shape) for shape in shapes])
    assert found.error is not None and found.error < 2e-3
    assert found.context_seconds == pytest.approx(PADDED.context_seconds, rel=0.02)
    assert found.shared_seconds == pytest.approx(PADDED.shared_seconds, rel=0.05)
    for shape in (StepWork(64, 0, 0, 0), StepWork(0, 48, 0, 0, prompts=1), StepWork(30, 101, 0, 0, prompts=1)):
        assert found.seconds(shape) == pytest.approx(PADDED.seconds(shape), rel=0.02)


def test_a_written_profile_is_read_again(tmp_path: Path) -> None:
    write_profile(str(tmp_path / "padded.json"), PADDED)
    assert read_profile(str(tmp_path / "padded.json")) == PADDED


def test_a_fit_is_never_negative_even_if_longer_contexts_were_faster() -> None:
    shapes = [StepWork(rows, 0, rows * context, 0) for rows in (1, 4, 16) for context in (10, 1000)]
    seconds = [1.0 - shape.context * 1e-5 for shape in shapes]
    found = fit(MODEL, shapes, seconds)
    assert found.context_seconds == 0 and all(value >= 0 for _, value in found.tokens)
    with pytest.raises(ValidationError, match="at least 4"):
        fit(MODEL, shapes[:2], seconds[:2])


def test_every_shipped_profile_is_valid_and_says_where_it_is_from() -> None:
    assert profile_names()
    for name in profile_names():
        model = read_profile(name)
        assert model.name == name and len(model.source) > 20


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tokens": []}, "rising"),
        ({"tokens": [[8, 1.0], [4, 1.0]]}, "rising"),
        ({"tokens": [[1, -1.0]]}, "negative"),
        ({"num_blocks": 0}, "above 0"),
        ({"prompt_tokens": [[4, 1.0], [2, 1.0]]}, "rising"),
        ({"host_out_rate": 0}, "rates"),
        ({"padding": {"decodes": [8, 4]}}, "must rise"),
        ({"speed": 3}, "speed"),
        ({"context_seconds": "fast"}, "context_seconds"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**msgspec.to_builtins(MODEL), **change}))
    with pytest.raises(ValidationError, match=said):
        read_profile(str(path))


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="h200-llama-3.1-8b"):
        read_profile("h900")
