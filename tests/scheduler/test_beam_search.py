"""Beam search: the choices, and beams as rows that share blocks, through preemptions and failures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from quire.kvcache.block_tables import BlockTables
from quire.messages.beams import Beam, BeamSearchParams
from quire.messages.caches import FULL, CacheGroup
from quire.messages.plan import StepPlan, TokenLogprobs
from quire.messages.request import NewRequest, Request, RequestState
from quire.messages.sampling import SamplingParams
from quire.scheduler.beam_search import BeamChoice, BeamSearch
from tests.scheduler.harness import mixed, rng_of
from tests.scheduler.sequences import EOS, VOCABULARY, Sequences

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = [3, 7, 1, 5, 9, 2, 8]


def prompt(name: str, length: int) -> list[int]:
    return [1 + mixed("prompt", name, i) % (VOCABULARY - 1) for i in range(length)]


@DEPTHS
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_the_beams_equal_a_search_over_lists(width: int, depth: int) -> None:
    bench = Sequences(depth=depth)
    for i, (early, penalty) in enumerate(itertools.product([False, True, "never"], [1.0, 0.0, -1.0, 2.5])):
        bench.search(f"s{i}", prompt(f"{width}", 5 + i), width, 14, early_stopping=early, length_penalty=penalty)
        bench.run()
    bench.assert_right()
    assert len({end.reason for found in bench.found.values() for end in found}) == 2, "some end, some are cut"


def test_only_the_best_continuations_are_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the first beam, and within it to the likeliest token."""
    width, rng = 8, rng_of("continuations", 0)
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    source = NewRequest("s", [1, 2], SamplingParams(max_tokens=9), limit=11, beams=params)
    beams = [Request(source, index, 0) for index in range(width)]
    search = BeamSearch(source, params, beams)
    search.beams = beams
    expected = []
    for parent, request in enumerate(beams):
        values = sorted((-rng.randrange(4) / 2 for _ in range(2 * width)), reverse=True)
        request.beam = Beam(-parent / 2, candidates=TokenLogprobs([0, *range(2 * width)], [0.0, *values], 1))
        expected += [(parent, token, value - parent / 2) for token, value in enumerate(values)]
    expected.sort(key=lambda choice: -choice[2])
    made = []

    def make(*fields: Any) -> BeamChoice:
        made.append(fields)
        return BeamChoice(*fields)

    monkeypatch.setattr("quire.scheduler.beam_search.BeamChoice", make)
    assert [(one.parent, one.token, one.total) for one in search.choose()] == expected[:width]
    assert len(made) <= 3 * width, "those that are chosen from, and the next of each beam"


def test_stop_tokens_end_a_sequence_beside_eos_unless_that_is_ignored() -> None:
    bench = Sequences()
    bench.search("both", PROMPT, 4, 20, stop_token_ids=[5])
    bench.search("own", PROMPT, 4, 20, stop_token_ids=[5], ignore_eos=True)
    bench.search("none", PROMPT, 4, 20, ignore_eos=True)
    bench.run()
    bench.assert_right()
    assert {one.stop_reason for one in bench.found["own"] if one.reason == "stop"} == {5}
    assert any(EOS in one.tokens for one in bench.found["own"])
    assert {one.reason for one in bench.found["none"]} == {"length"}


@DEPTHS
def test_a_prompt_is_computed_and_stored_once(depth: int) -> None:
    bench = Sequences(blocks=400, block_size=4, rows=16, budget=128, depth=depth, prefix_caching=False)
    bench.search("search", prompt("long", 50), 8, 6, ignore_eos=True)
    bench.run()
    assert bench.device.computed == 50 + 8 * 5, "the prompt once; of each beam all tokens but the last"
    # 12 full blocks of the prompt once; each beam's tail is in the rest: tokens 48 to 54 take two blocks.
    assert bench.most_used <= 12 + 8 * 2
    bench.assert_right()


@DEPTHS
def test_beams_hold_only_their_own_tails(depth: int) -> None:
    bench = Sequences(blocks=400, rows=16, budget=128, depth=depth)
    bench.search("search", prompt("p", 41), 6, 30, ignore_eos=True)
    pool = bench.tables.pool
    while bench.core.has_work:
        bench.step()
        beams = bench.scheduler.requests.searches["search"].beams if bench.scheduler.unfinished else []
        held = {block for beam in beams for block in beam.blocks}
        assert pool.used == len(held), "dropped beams gave theirs back at once"
        owners = [sum(block in beam.blocks for beam in beams) for block in held]
        assert [pool.refs[block] for block in held] == owners
        tails = sum(-(-beam.known // 4) - 10 for beam in beams)
        assert pool.used <= 10 + tails, "ten full blocks of the prompt are there once"
    bench.assert_right()


@DEPTHS
def test_a_row_waits_for_the_choice_while_others_decode(depth: int) -> None:
    bench = Sequences(rows=8, depth=depth, blocks=200)
    bench.search("search", PROMPT, 3, 10, ignore_eos=True)
    bench.add("other", [4, 4, 4], 20)
    bench.run()
    bench.assert_right()
    together = [plan for plan in bench.device.plans if plan.num_decodes > len(plan.forced) > 0]
    assert together, "one step computes for both"
    alone = [plan for plan in bench.device.plans[:8] if plan.num_decodes and not plan.forced]
    assert bool(alone) == (depth > 0), "launched ahead, a step goes without the beams"


@DEPTHS
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_beams(rows: int, depth: int) -> None:
    bench = Sequences(rows=rows, depth=depth)
    bench.search("a", PROMPT, 5, 9)
    bench.search("b", prompt("b", 6), 4, 9, length_penalty=0.3)
    bench.add("c", prompt("c", 6), 9)
    bench.run()
    bench.assert_right()


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_a_cache_barely_larger_than_one_beam(depth: int, caching: bool) -> None:
    bench = Sequences(blocks=7, block_size=4, depth=depth, prefix_caching=caching)
    bench.search("a", prompt("a", 9), 6, 18, ignore_eos=True)
    bench.search("b", prompt("b", 9), 4, 18, ignore_eos=True)
    bench.add("c", prompt("c", 9), 18)
    bench.run()
    bench.assert_right()
    assert bench.scheduler.stats.preemptions > 0


@DEPTHS
def test_an_aborted_search_frees_everything_at_once(depth: int) -> None:
    for steps in range(1, 12):
        bench = Sequences(depth=depth)
        bench.search("a", PROMPT, 4, 20, ignore_eos=True)
        for _ in range(steps):
            bench.step()
        bench.core.abort("a")
        assert bench.tables.pool.used == 0 and bench.scheduler.rows.used == 0
        bench.run()
        assert bench.ended["a"].reason == "abort" and "a" not in bench.found
        assert bench.scheduler.stats.finished == 1


@DEPTHS
@pytest.mark.parametrize("kind", ["submit", "collect"])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_a_failed_step_changes_nothing(at: int, kind: str, depth: int) -> None:
    bench = Sequences(depth=depth, fails=lambda plan: kind if plan.step == at else "")
    bench.search("a", PROMPT, 4, 12)
    bench.search("b", prompt("b", 9), 3, 12)
    bench.add("c", prompt("c", 9), 12)
    bench.run()
    bench.assert_right()


def test_a_search_that_always_fails_ends_as_a_whole_and_alone() -> None:
    poisoned = prompt("bad", 11)

    def fails(plan: StepPlan) -> str:
        return "collect" if any(new.prompt_len == 11 for new in plan.add) else ""

    bench = Sequences(fails=fails)
    bench.search("bad", poisoned, 3, 8)
    bench.search("good", prompt("good", 9), 3, 8)
    bench.run()
    assert bench.ended["bad"].reason == "error"
    bench.assert_right(but={"bad"})


class Storm:
    """Searches and plain requests, aborts, failures and shortages."""

    def __init__(self, seed: int, groups: Sequence[CacheGroup] = (FULL,)) -> None:
        self.rng = rng = rng_of("beams", seed)
        self.failure_rate = rng.choice([0, 0, 0.01, 0.05])
        size = rng.choice([1, 2, 4, 7])
        tables = BlockTables(9, size, groups=groups)
        self.bench = Sequences(
            blocks=tables.pages_for(40) + tables.state_pages + rng.choice([0, 3, 10, 60]),
            block_size=size,
            rows=rng.choice([1, 2, 4, 9]),
            budget=rng.choice([1, 5, 64]),
            depth=rng.choice([0, 1, 2]),
            policy=rng.choice(["fcfs", "priority"]),
            prefix_caching=rng.random() < 0.8,
            fails=lambda plan: rng.choice(["submit", "collect"]) if rng.random() < self.failure_rate else "",
            groups=groups,
        )
        self.lost: set[str] = set()

    def run(self, requests: int) -> None:
        rng, bench = self.rng, self.bench
        for i in range(requests):
            start = prompt(str(rng.randrange(3)), 25)[: rng.randint(1, 25)]
            if rng.random() < 0.3:
                bench.add(f"r{i}", start, rng.randint(1, 14))
            else:
                penalty, early = rng.choice([-1.0, 0.0, 1.0, 2.0]), rng.choice([False, True, "never"])
                bench.search(
                    f"r{i}", start, rng.randint(1, 6), rng.randint(1, 14), length_penalty=penalty, early_stopping=early
                )
            for _ in range(rng.choice([0, 1, 4, 12])):
                if bench.core.has_work:
                    bench.step()
                    self._check()
            if rng.random() < 0.1:
                bench.core.abort(f"r{rng.randint(0, i)}")
        bench.run(20_000)
        self.lost |= {id for id, end in bench.ended.items() if end.reason in ("abort", "error")}
        assert self.failure_rate or not any(end.reason == "error" for end in bench.ended.values())
        assert self.failure_rate or len(self.lost) < requests / 2
        bench.assert_right(but=self.lost)

    def _check(self) -> None:
        pool = self.bench.tables.pool
        held: dict[int, int] = {}
        for request in self.bench.scheduler.rows.running():
            assert request.state is RequestState.RUNNING
            for block in self.bench.tables.every_page(request):
                held[block] = held.get(block, 0) + 1
        for block in self.bench.scheduler.requests.states.page_refs():
            held[block] = held.get(block, 0) + 1
        assert held == {block: count for block, count in enumerate(pool.refs) if count}


@pytest.mark.parametrize("seed", range(30))
def test_storm(seed: int) -> None:
    Storm(seed).run(12)


GROUPS = {
    "window": (FULL, CacheGroup("window", (), window=3)),
    "state": (FULL, CacheGroup("state", (), pages=2)),
    "all": (
        FULL,
        CacheGroup("window", (), window=6),
        CacheGroup("state", (), pages=1),
        CacheGroup("state", (), pages=2),
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("seed", range(100, 108))
def test_storm_over_several_cache_groups(seed: int, kind: str) -> None:
    Storm(seed, GROUPS[kind]).run(12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_long_storm(seed: int) -> None:
    Storm(seed).run(60)
