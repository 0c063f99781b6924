"""How many drafts are chosen, for devices whose step times and drafts of known quality are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire.messages.plan import MAX_WIDTH
from quire.scheduler.draft_times import StepTimes
from quire.scheduler.draft_tuning import PLACES, Acceptance, Tuner
from tests.scheduler.harness import rng_of

Seconds = Callable[[int, int, int], float]
"""Of a step: rows, drafts, proposals."""


def memory_bound(rows: int, drafts: int, proposals: int) -> float:
    """A large GPU with few rows: a draft a row costs 3%."""
    return 4.0 * (1 + 0.03 * drafts / rows + 0.01 * proposals)


def compute_bound(rows: int, drafts: int, proposals: int) -> float:
    """As many rows as fill the device: time goes with tokens."""
    return 1.0 + (rows + drafts) / 16 + 0.2 * proposals


class Simulation:
    """Rows that decode; the i-th draft of a row is right with a probability of its own."""

    def __init__(
        self, rates: Sequence[float], seconds: Seconds, most: int = PLACES, proposes: bool = True, noise: float = 0.05
    ) -> None:
        self.rates, self.seconds, self.most, self.proposes, self.noise = rates, seconds, most, proposes, noise
        self.tuner = Tuner(len(rates), most)
        self.rng = rng_of("tuning", len(rates), most)
        self.time = self.plain_time = 0.0
        self.drafts = self.proposed = 0
        self.chosen: list[list[int]] = []

    def run(self, steps: int) -> Simulation:
        rows = np.arange(len(self.rates))
        for _ in range(steps):
            available = np.full(len(rows), self.proposed if self.proposes else self.most)
            drafts, proposals = self.tuner.choose(rows, available, self.proposes)
            assert (drafts <= available).all() and proposals <= self.most
            accepted = np.array([self._accept(rate, count) for rate, count in zip(self.rates, drafts, strict=True)])
            seconds = self.seconds(len(rows), int(drafts.sum()), proposals)
            self.time += seconds
            self.plain_time += self.seconds(len(rows), 0, 0) * (len(rows) + int(accepted.sum())) / len(rows)
            self.drafts += int(drafts.sum())
            self.chosen.append(drafts.tolist())
            seen = seconds * (1 + self.noise * self.rng.random()) * (50 if self.rng.random() < 0.01 else 1)
            self.tuner.note_step(len(rows), int(drafts.sum()), proposals, seen)
            self.tuner.note_draws(rows, drafts, accepted)
            self.proposed = proposals
        return self

    def _accept(self, rate: float, count: int) -> int:
        accepted = 0
        while accepted < count and self.rng.random() < rate:
            accepted += 1
        return accepted

    def restart(self, *rows: int) -> None:
        for row in rows:
            self.tuner.start(row)

    @property
    def speedup(self) -> float:
        """Against steps without drafts."""
        return self.plain_time / self.time


@pytest.mark.parametrize("proposes", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_drafts_that_are_never_right_cost_almost_nothing(rows: int, seconds: Seconds, proposes: bool) -> None:
    one = Simulation([0.0] * rows, seconds, proposes=proposes).run(1200)
    assert one.speedup > 0.98
    assert one.drafts > 0, "it was tried"
    later = one.drafts
    one.run(400)
    assert one.drafts - later <= 0.02 * 400 * rows


@pytest.mark.parametrize("rows", [1, 16])
def test_cheap_drafts_that_are_mostly_right_are_verified_as_far_as_allowed(rows: int) -> None:
    one = Simulation([0.9] * rows, memory_bound).run(300)
    assert np.mean(one.chosen[100:]) > 0.9 * PLACES
    most = sum(0.9**i for i in range(MAX_WIDTH)) / (memory_bound(1, PLACES, PLACES) / memory_bound(1, 0, 0))
    assert one.speedup > 0.9 * most


def test_drafts_that_cost_as_much_as_they_save_are_not_verified() -> None:
    """At 200 rows a draft costs as much as a row, and is right half of the time."""
    one = Simulation([0.5] * 200, compute_bound).run(600)
    assert np.mean(one.chosen[100:]) < 0.1
    assert one.speedup > 0.98


def test_the_same_drafts_are_verified_for_few_rows_and_not_for_many() -> None:
    few, many = Simulation([0.6] * 2, compute_bound).run(300), Simulation([0.6] * 400, compute_bound).run(300)
    assert np.mean(few.chosen[100:]) > 0.9 > 0.1 > np.mean(many.chosen[100:])
    assert few.speedup > 1.1 and many.speedup > 0.98


def test_each_row_has_the_number_that_pays_for_it() -> None:
    one = Simulation([0.95] * 8 + [0.05] * 8, lambda rows, drafts, proposals: 1 + 0.3 * drafts / rows).run(400)
    later = np.array(one.chosen[100:])
    assert later[:, :8].mean() > 3 and later[:, 8:].mean() < 0.2


def test_a_row_whose_drafts_become_right_gets_them() -> None:
    one = Simulation([0.0] * 4, memory_bound).run(600)
    one.rates = [0.9] * 4
    one.run(1500)
    assert np.mean(one.chosen[-100:]) > 3


def test_a_row_whose_drafts_become_wrong_gets_none() -> None:
    one = Simulation([0.9] * 4, memory_bound).run(300)
    one.rates = [0.0] * 4
    one.run(60)
    assert np.mean(one.chosen[-10:]) < 1


def test_new_rows_start_from_what_others_have_shown() -> None:
    one = Simulation([0.0] * 4, memory_bound).run(400)
    one.restart(0, 1, 2, 3)
    before = one.drafts
    one.run(40)
    assert one.drafts - before <= 16


def test_no_more_than_the_allowed_number_is_chosen() -> None:
    one = Simulation([1.0] * 3, memory_bound, most=2).run(100)
    assert max(max(step) for step in one.chosen) == 2


def test_a_slow_first_step_of_a_shape_is_not_held_against_it() -> None:
    seen: set[tuple[int, int, int]] = set()

    def captured(rows: int, drafts: int, proposals: int) -> float:
        is_new = (rows, drafts, proposals) not in seen
        seen.add((rows, drafts, proposals))
        return memory_bound(rows, drafts, proposals) * (100 if is_new else 1)

    one = Simulation([0.9], captured).run(300)
    assert np.mean(one.chosen[150:]) > 4


def test_acceptance_is_that_of_the_row_once_it_has_shown_it() -> None:
    acceptance, rows = Acceptance(3), np.arange(3)
    for _ in range(60):
        acceptance.note(rows, np.array([4, 4, 0]), np.array([4, 1, 0]))
    good, poor, new = acceptance.gains(rows)
    assert good[:4].min() > 0.6 and poor[0] > 0.8 and poor[1:].max() < 0.15
    assert poor[1] < new[1] < good[1], "all rows together"
    assert (np.diff(acceptance.gains(rows), axis=1) <= 0).all()


def test_times_of_steps_not_measured_follow_from_prices() -> None:
    times = StepTimes()
    for drafts, proposals in [(0, 0), (8, 2), (16, 0), (24, 4)] * 4:
        times.note(8, drafts, proposals, 2 * (1 + 0.1 * drafts / 8 + 0.05 * proposals))
    found = times.expected(8, np.array([0, 4, 32, 8]), np.array([0, 0, 0, 2]))
    assert found == pytest.approx([2, 2.1, 2.8, 2.4], rel=0.1)
    assert times.expected(9, np.array([0]), np.array([0])) == pytest.approx([2]), "about as many rows"


def test_longer_contexts_do_not_make_other_steps_look_faster() -> None:
    """Steps become longer by the same for every number of drafts, and those that are not run now are not measured."""
    times, context = StepTimes(), 256 * 100
    for step in range(400):
        context += 256
        drafts = 256 if step < 20 else 0
        seconds = 9.0 + 5.0 * drafts / 256 + 3e-5 * (context - 256 * 100)
        times.note(256, drafts, 0, seconds, context)
    plain, one = times.expected(256, np.array([0, 256]), np.array([0, 0]))
    assert one - plain == pytest.approx(5.0, abs=0.5)


@pytest.mark.parametrize("seed", ["a", "b", "d"])
def test_times_stay_positive_where_contexts_change_by_much(seed: str) -> None:
    """Rows that come and go take time too, which looks like a price of their contexts: shorter ones would be taken to
    make steps faster than nothing."""
    times, rng, level = StepTimes(), rng_of(seed), 1000
    for _ in range(1500):
        if rng.random() < 0.02:
            level = rng.choice([10, 100, 1000, 2000, 8000, 30000])
        rows = rng.randrange(60, 68)
        took = 1e-3 * rows * rng.uniform(0.97, 1.03)
        times.note(rows, 0, 0, took, rows * level)
        assert times.prices(rows)[0] > 0
    for _ in range(20):
        times.note(64, 0, 0, 64e-3, 64 * level)
    assert times.prices(64)[0] == pytest.approx(64e-3, rel=0.05)


def test_a_number_of_rows_not_measured_begins_with_prices_of_a_similar_one() -> None:
    times = StepTimes()
    for _ in range(4):
        for drafts, proposals in ((0, 0), (256, 1), (512, 2)):
            times.note(256, drafts, proposals, compute_bound(256, drafts, proposals))
    for rows in (181, 151):
        assert not times.needs_plain(rows)
        for _ in range(4):
            times.note(rows, rows, 1, compute_bound(rows, rows, 1))
        found = times.expected(rows, np.array([0, 2 * rows]), np.array([0, 2]))
        assert found == pytest.approx([compute_bound(rows, 0, 0), compute_bound(rows, 2 * rows, 2)], rel=0.1)
    assert times.needs_plain(4), "too few rows to be similar"
    for _ in range(80):
        times.note(151, 151, 1, compute_bound(151, 151, 1))
    assert times.needs_plain(151), "after a while it is measured"


def test_drafts_are_verified_while_rows_leave_one_by_one() -> None:
    tuner, rng, made = Tuner(200, 3), rng_of("leaving"), 0
    drafts_of: list[float] = []
    for step in range(300):
        rows = np.arange(200 if step < 80 else 200 - (step - 80) // 2)
        drafts, proposals = tuner.choose(rows, np.full(len(rows), made), True)
        made = proposals
        accepted = np.where(rng.random() < 0.95, drafts, 0)
        seconds = memory_bound(len(rows), int(drafts.sum()), proposals)
        tuner.note_step(len(rows), int(drafts.sum()), proposals, seconds)
        tuner.note_draws(rows, drafts, accepted)
        drafts_of.append(float(drafts.mean()))
    assert np.mean(drafts_of[80:]) > 2.5


def test_a_proposer_that_always_runs_does_not_keep_drafts_from_being_verified() -> None:
    """It keeps its cache up to date: no step is without its proposals."""
    tuner, rows, chosen = Tuner(4, 3), np.arange(4), []
    for _ in range(700):
        drafts, proposals = tuner.choose(rows, np.full(4, 3), True)
        tuner.note_step(4, int(drafts.sum()), max(1, proposals), memory_bound(4, int(drafts.sum()), max(1, proposals)))
        tuner.note_draws(rows, drafts, drafts)
        chosen.append(float(drafts.mean()))
    assert np.mean(chosen[100:]) > 2.8


def test_rows_alike_get_the_same_number_of_drafts() -> None:
    """What luck gave some rows is not taken for a difference, and a difference is not taken for luck."""

    def seconds(rows: int, drafts: int, proposals: int) -> float:
        return 1.0 + 0.6 * drafts / rows + 0.02 * proposals

    alike = np.array(Simulation([0.8] * 200, seconds, most=3).run(400).chosen[200:])
    assert (alike == 1).mean() > 0.9
    mixed = np.array(Simulation([0.8] * 100 + [0.1] * 100, seconds, most=3).run(400).chosen[200:])
    assert mixed[:, :100].mean() > 0.8 and mixed[:, 100:].mean() < 0.1


def test_the_device_makes_no_more_drafts_than_pay_for_all_rows() -> None:
    """A second draft of a few rows does not pay if the proposer must make it for all."""

    def seconds(rows: int, drafts: int, proposals: int) -> float:
        return 1.0 + 0.2 * drafts / rows + 0.3 * proposals

    one = Simulation([0.97] * 4 + [0.7] * 60, seconds, most=3).run(400)
    assert np.array(one.chosen[200:]).max(1).mean() < 1.2 and one.speedup > 1.05
