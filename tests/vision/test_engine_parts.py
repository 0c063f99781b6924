"""Images beside streams: their encoding is spread over steps like a prompt, and changes no token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from quire.messages.media import ENCODE_PARTS
from quire.scheduler.pacing import Pacer
from quire.worker.encoded_items import EncodeJob
from tests.vision.engine_harness import Case, Engine
from tests.vision.harness import picture
from tests.vision.test_engine_families import FAMILIES, PICTURES

ALLOWED = 9
"""Prompt tokens of a step with streams."""
NAMES = ["qwen2.5-vl", "gemma-3"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in made:
            family, *more = FAMILIES[name]
            made[name] = Case(family, tmp_path_factory.mktemp(name), *more)
        return made[name]

    return of


class Watched:
    """An engine whose steps with streams have few prompt tokens, and what its plans said."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(Pacer, "allowance", lambda *arguments, **more: ALLOWED)
        self.engine: Engine = case.sighted.engine(max_step_stretch=1.7, max_num_seqs=6, **settings)
        self.encoded: list[int] = []
        self.parts: list[int] = []
        encoding = self.engine.scheduler.requests.encoding
        write = encoding.write

        def noted(plan: Any) -> None:
            write(plan)
            self.encoded.append(plan.encoded)
            self.parts.append(encoding.spent + len(plan.tokens) if encoding.splits else 0)

        monkeypatch.setattr(encoding, "write", noted)

    @property
    def partial(self) -> list[int]:
        """Plans that left an image half encoded."""
        return [encoded for encoded in self.encoded if 0 < encoded < ENCODE_PARTS]

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(400):
            if condition():
                return
            self.engine.step()
        raise AssertionError("it never came")


def streams(watched: Watched, case: Case, count: int = 40) -> list[tuple[str, Any, Any]]:
    """Two requests that run for long, about one small image."""
    small = [picture(16, 16, 9)]
    prepared = case.prompt(small, 5)
    names = [watched.engine.add(prepared, count) for _ in range(2)]
    watched.until(lambda: all(watched.engine.outputs.get((name, 0)) for name in names))
    watched.engine.step()  # prompts that come from here on wait for them
    watched.encoded.clear()
    watched.parts.clear()
    return [(name, small, prepared) for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(
    make: Callable[[str], Case], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(name)
    steps: list[int] = []
    advance = EncodeJob.advance
    monkeypatch.setattr(
        EncodeJob, "advance", lambda self, until: steps.append(until) or advance(self, until)
    )  # fmt: skip
    watched = Watched(case, monkeypatch)
    running = streams(watched, case)
    prompts = [(PICTURES[:1], case.prompt(PICTURES[:1], 1)), (PICTURES[:2], case.prompt(PICTURES[:2], 2, before=19))]
    names = [watched.engine.add(prepared, 6) for _, prepared in prompts]
    watched.engine.run()
    assert len(watched.partial) > 4 and any(0 < until < ENCODE_PARTS for until in steps)
    most = max(item.rows for _, prepared in prompts for item in prepared.items)
    limit = ALLOWED if name != "gemma-3" else most + ALLOWED  # its images are computed in one step
    assert max(watched.parts) <= limit
    for request, (images, prepared) in zip(names, prompts, strict=True):
        assert watched.engine.outputs[request, 0] == case.theirs(images, prepared)
    for request, images, prepared in running:
        assert watched.engine.outputs[request, 0][:6] == case.theirs(images, prepared)
    assert watched.engine.stats.encoded == 1 + len({item.digest for _, each in prompts for item in each.items})
    watched.engine.close()


def test_what_is_left_half_encoded(make: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is aborted, preempted, or left behind by the streams; another one comes for the same image."""
    case = make("qwen2.5-vl")
    watched = Watched(case, monkeypatch)
    engine = watched.engine
    for seed, what in enumerate(("abort", "preempt", "another", "streams end"), 70):
        running = streams(watched, case, 200)
        images = [picture(64, 64, seed)]
        changed = case.prompt(images, 3, before=30)
        name = engine.add(changed, 6)
        watched.until(lambda: watched.partial)
        if what == "abort":
            engine.core.abort(name)
        elif what == "preempt":
            engine.preempt(name)
        elif what == "another":
            other = engine.add(changed, 6)
        elif what == "streams end":
            for request, _, _ in running:
                engine.core.abort(request)
        done = [name, other] if what == "another" else [] if what == "abort" else [name]
        watched.until(lambda: all((each, 0) in engine.ends for each in done))  # noqa: B023
        for each in done:
            assert engine.outputs[each, 0] == case.theirs(images, changed)
        for request, _, _ in running:
            engine.core.abort(request)
        engine.run()
        engine.scheduler.check_idle()
    engine.close()


def test_an_encoder_that_fails_half_way(make: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("qwen2.5-vl")
    watched = Watched(case, monkeypatch)
    engine = watched.engine
    running = streams(watched, case, 60)
    advance, calls = EncodeJob.advance, itertools.count()

    def fails(self: EncodeJob, until: int) -> Any:
        if next(calls) == 2:
            raise ValueError("no good")
        return advance(self, until)

    monkeypatch.setattr(EncodeJob, "advance", fails)
    images = [picture(64, 64, 33)]
    prepared = case.prompt(images, 3)
    bad = engine.add(prepared, 6)
    watched.until(lambda: (bad, 0) in engine.ends)
    assert "no good" in str(engine.ends[bad, 0])
    assert engine.answer(prepared, 6) == case.theirs(images, prepared)  # beside the streams, or after them
    for request, own, given in running:
        assert engine.outputs[request, 0][:6] == case.theirs(own, given)
    engine.close()
