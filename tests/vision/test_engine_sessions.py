"""Conversations about images: a second turn encodes nothing, in this process or another; forks; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.errors import SessionBusyError, ValidationError
from quire.messages.media import PromptMedia, Span
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.vision.processor import Prepared
from tests.vision.engine_harness import Case, Engine
from tests.vision.harness import words
from tests.vision.test_engine_families import PICTURES, make

__all__ = ["make"]
NAME = "talk"
WORDS = 57
"""Ids of text: answers have no others, since transformers would take placeholders for images."""


def media_of(prepared: Prepared) -> PromptMedia:
    return PromptMedia(prepared.items, prepared.spans, prepared.positions, prepared.position_delta)


def turn(engine: Engine, count: int, media: list[Any] | None = None, name: str = NAME) -> list[int]:
    """The session's next answer."""
    keeper = engine.core.sessions
    prompt = keeper.tokens(name)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, allowed_token_ids=list(range(WORDS)))
    number = f"turn{len(engine.ends)}"
    engine.core.add(NewRequest(number, prompt, params, len(prompt) + count, session=name, media=media or []))
    engine.run()
    end = engine.ends[number, 0]
    assert end.reason == "length", end
    return engine.outputs[number, 0]


def conversation(engine: Engine, *shown: tuple[Prepared, int], name: str = NAME) -> Prepared:
    """The session as one prompt, with what was shown and where."""
    items = [item for prepared, _ in shown for item in prepared.items]
    spans = [
        Span(at + span.start, span.length, number, span.offset)
        for number, (prepared, at) in enumerate(shown)
        for span in prepared.spans
    ]
    return Prepared(engine.core.sessions.tokens(name), items, spans)


def raw_prompt(case: Case, seed: int, before: int) -> list[int]:
    return [*words(before, seed), *case._around[0], case._image, *case._around[1], *words(3, seed)]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma-3"])
def test_turns_about_an_image(make: Callable[[str], Case], tmp_path: Path, name: str) -> None:
    case = make(name)
    settings: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "swap_space": 0.01}
    engine = case.sighted.engine(**settings)
    engine.swap_always()
    keeper = engine.core.sessions
    one = case.sighted.prepare(raw_prompt(case, 1, 20), PICTURES[:1])
    keeper.create(NAME, one.tokens, media=media_of(one))
    assert turn(engine, 4, one.items) == case.theirs(PICTURES[:1], one, 4, WORDS)
    assert engine.stats.encoded == 1

    keeper.append(NAME, words(5, 3))  # a second turn, of text, without pixels
    wanted = case.theirs(PICTURES[:1], conversation(engine, (one, 0)), 4, WORDS)
    assert turn(engine, 4) == wanted
    assert engine.stats.encoded == 1

    other = case.sighted.prepare(raw_prompt(case, 4, 2), PICTURES[1:2])  # a third, with another image
    keeper.fork(NAME, "fork")
    at = keeper.append(NAME, other.tokens, media=media_of(other)).num_tokens - len(other.tokens)
    wanted = case.theirs(PICTURES[:2], conversation(engine, (one, 0), (other, at)), 4, WORDS)
    assert turn(engine, 4, other.items) == wanted
    assert engine.stats.encoded == 2

    keeper.append("fork", words(4, 9))  # a fork sees what was shown before it
    wanted = case.theirs(PICTURES[:1], conversation(engine, (one, 0), name="fork"), 3, WORDS)
    assert turn(engine, 3, name="fork") == wanted
    assert engine.stats.encoded == 2

    keeper.suspend(NAME)
    while not keeper.kv.is_saved(NAME) or engine.core.has_work:
        engine.step()
    engine.close()

    woken = case.sighted.engine(**settings)  # another engine, which has no pixels
    woken.swap_always()
    woken.core.sessions.append(NAME, words(6, 11))
    wanted = case.theirs(PICTURES[:2], conversation(woken, (one, 0), (other, at)), 4, WORDS)
    assert turn(woken, 4) == wanted
    assert woken.stats.encoded == 0
    woken.close()


def test_a_turn_whose_kv_is_lost_needs_the_pixels(make: Callable[[str], Case], tmp_path: Path) -> None:
    case = make("qwen2.5-vl")
    settings: dict[str, Any] = {"kv_disk": str(tmp_path / "kv")}
    one = case.sighted.prepare(raw_prompt(case, 1, 20), PICTURES[:1])
    engine = case.sighted.engine(**settings)
    engine.core.sessions.create(NAME, one.tokens, media=media_of(one))
    engine.close()
    engine = case.sighted.engine(**settings)
    with pytest.raises(AssertionError, match="neither are its pixels: send it again"):
        turn(engine, 4)
    assert turn(engine, 4, one.items) == case.theirs(PICTURES[:1], one, 4, WORDS)
    engine.close()


def test_images_are_whole_and_have_an_identity(make: Callable[[str], Case], tmp_path: Path) -> None:
    case = make("qwen2.5-vl")
    engine = case.sighted.engine(kv_disk=str(tmp_path / "kv"))
    keeper = engine.core.sessions
    one, two = (case.sighted.prepare(raw_prompt(case, 1, 20), PICTURES[i : i + 1]) for i in (0, 0))
    keeper.create(NAME, one.tokens, media=media_of(one))
    (span,) = one.spans
    with pytest.raises(ValidationError, match=f"tokens {span.start} to {span.stop} are an image"):
        keeper.cut(NAME, span.start + 1)
    with pytest.raises(ValidationError, match="it cannot end at"):
        keeper.fork(NAME, "other", span.stop - 1)
    with pytest.raises(ValidationError, match="cannot be exported"):
        keeper.export(NAME)
    answer = turn(engine, 3, one.items)
    changed = case.sighted.prepare(raw_prompt(case, 1, 20), [PICTURES[0].rotate(180)])
    assert changed.tokens == two.tokens
    with pytest.raises(SessionBusyError, match="other images"):
        params = SamplingParams(temperature=0, max_tokens=2)
        prompt = keeper.tokens(NAME)
        engine.core.add(
            NewRequest("x", prompt, params, len(prompt) + 2, session=NAME, media=changed.items, spans=changed.spans)
        )
    keeper.rewrite(NAME, changed.tokens, media=media_of(changed))  # the same tokens, another image
    found = turn(engine, 3, changed.items)
    assert found == case.theirs([PICTURES[0].rotate(180)], changed, 3, WORDS) != answer
    assert keeper.cut(NAME, span.start).num_tokens == span.start
    assert not keeper.store.get(NAME).spans
    engine.close()
