"""The cost model: seconds of a step, its file, and its fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from quire.errors import ValidationError
from quire.simulation.costs import CostModel, StepWork, fit, profile_names, read_profile

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
