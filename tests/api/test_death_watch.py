"""Which requests are retried together, alone, or not at all after engines died."""

from __future__ import annotations

from quire.api.death_watch import MOST_DEATHS, PROGRESS_TOKENS, DeathWatch


def died(watch: DeathWatch, **tokens: int) -> dict[str, str]:
    return watch.engine_died(tokens, "killed")


def test_after_the_first_death_none_is_a_suspect_and_after_the_second_all_are() -> None:
    watch = DeathWatch()
    assert not died(watch, a=3, b=0) and not watch.suspects
    watch.sent("a", 3)
    watch.sent("b", 0)
    assert not died(watch, a=3, b=1) and list(watch.suspects) == ["a", "b"]


def test_the_one_that_is_alone_at_the_next_death_has_killed_it_and_the_others_are_free() -> None:
    watch = DeathWatch()
    for _ in range(2):
        died(watch, a=0, b=0, c=0)
    watch.begin_trial("a")
    watch.sent("a", 0)
    assert not watch.passes("a", PROGRESS_TOKENS - 1) and watch.passes("a", PROGRESS_TOKENS)
    watch.begin_trial("b")
    guilty = died(watch, b=0)
    assert list(guilty) == ["b"] and "died 3 times" in guilty["b"] and guilty["b"].endswith("killed")
    assert not watch.suspects
    assert not died(watch, c=0) and list(watch.suspects) == ["c"]  # it could be another one, and is tried again


def test_a_suspect_that_was_not_alone_is_tried_again_first() -> None:
    watch = DeathWatch()
    for _ in range(2):
        died(watch, a=0, b=0, c=0)
    watch.begin_trial("a")
    watch.sent("a", 0)
    assert watch.passes("a", 20)
    watch.begin_trial("b")
    assert not died(watch, a=25, b=0)  # it may have been either of them
    assert list(watch.suspects) == ["b", "c"]
    assert watch.needs_empty("b") and not watch.needs_empty("c")


def test_progress_clears_a_request() -> None:
    watch = DeathWatch()
    tokens = 0
    for _ in range(MOST_DEATHS):
        watch.sent("a", tokens)
        tokens += PROGRESS_TOKENS
        assert not died(watch, a=tokens) and not watch.suspects
    guilty = died(watch, a=tokens + PROGRESS_TOKENS)
    assert f"died {MOST_DEATHS + 1} times" in guilty["a"]


def test_ended_requests_are_forgotten() -> None:
    watch = DeathWatch()
    for _ in range(2):
        died(watch, a=0, b=0, c=0)
    watch.forget("a")
    assert list(watch.suspects) == ["b", "c"]
    watch.keep(["c"])
    assert list(watch.suspects) == ["c"] and not died(watch, a=0) and list(watch.suspects) == ["c"]
