"""The power controller in simulated time: under the budget, without swinging, gone when the load is."""

from __future__ import annotations

import statistics

import pytest

from quire.energy.account import EnergyAccount
from quire.energy.policies import Balanced, Load, Performance, Saver, make_energy_policy
from quire.energy.power import LEAST_DUTY, LONGEST_HOLD_SECONDS, PowerController
from quire.errors import ValidationError


class Machine:
    """A device that makes steps as the controller lets it, sampled every 0.1 s."""

    def __init__(self, budget: float | None, busy: float, idle: float, step: float = 0.02) -> None:
        self.controller = PowerController(budget)
        self.account = EnergyAccount()
        self.busy, self.idle, self.step_seconds = busy, idle, step
        self.now = self.joules = self.sampled_at = self.sampled = 0.0
        self.account.sample(0.0, 0.0)
        self.holds: list[float] = []
        self.powers: list[float] = []

    def _pass(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += watts * seconds

    def _sample(self) -> None:
        if (seconds := self.now - self.sampled_at) >= 0.1:
            self.account.sample(self.joules, self.now)
            self.controller.sample(seconds, self.joules - self.sampled)
            self.powers.append((self.joules - self.sampled) / seconds)
            self.sampled_at, self.sampled = self.now, self.joules

    def work(self, seconds: float, share: float = 1.0) -> float:
        """Steps for `seconds`, busy for `share` of the time if not held back; returns the mean power."""
        begin, before = self.now, self.joules
        while self.now < begin + seconds:
            self._pass(self.step_seconds, self.busy)
            self.account.step(["a"], [1], 1, self.step_seconds, [True])
            hold = self.controller.hold(self.step_seconds, self.account.step_watts, self.account.idle_watts)
            self.holds.append(hold)
            self._pass(max(hold, self.step_seconds * (1 / share - 1)), self.idle)
            self._sample()
        return (self.joules - before) / (self.now - begin)

    def rest(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            self._pass(0.1, self.idle)
            self._sample()


@pytest.mark.parametrize("idle", [5.0, 60.0, 150.0])
@pytest.mark.parametrize("busy", [210.0, 400.0, 700.0])
@pytest.mark.parametrize("has_rested", [True, False])
def test_the_average_stays_at_the_budget(busy: float, idle: float, has_rested: bool) -> None:
    machine = Machine(200.0, busy, idle)
    if has_rested:
        machine.rest(2.0)
    machine.work(20.0)  # it may not know idle power at first
    power = machine.work(60.0)
    assert 190 < power < 202
    assert machine.work(10.0) < 204  # any ten seconds
    assert 190 < machine.controller.average < 210


def test_pauses_are_steady() -> None:
    machine = Machine(200.0, 400.0, 50.0)
    machine.rest(2.0)
    machine.work(20.0)
    machine.holds.clear()
    machine.work(20.0)
    assert statistics.mean(machine.holds) == pytest.approx(0.02 * 200 / 150, rel=0.05)
    assert statistics.pstdev(machine.holds) < 0.1 * statistics.mean(machine.holds)


def test_nothing_is_held_back_below_the_budget() -> None:
    machine = Machine(200.0, 180.0, 50.0)
    machine.work(5.0)
    assert max(machine.holds) == 0


def test_pauses_end_when_the_load_falls() -> None:
    machine = Machine(200.0, 400.0, 50.0)
    machine.rest(1.0)
    machine.work(20.0)
    assert machine.holds[-1] > 0
    machine.rest(3.0)
    machine.busy = 150.0  # smaller steps now
    machine.work(10.0)
    assert machine.holds[-1] == 0
    assert machine.work(5.0) == pytest.approx(150.0)


def test_a_budget_below_idle_power_still_moves() -> None:
    machine = Machine(20.0, 400.0, 50.0)
    machine.rest(1.0)
    machine.work(30.0)
    assert max(machine.holds) == LONGEST_HOLD_SECONDS
    assert machine.controller.is_unreachable(machine.account.idle_watts)


def test_a_hot_device_rests_and_a_cool_one_does_not() -> None:
    controller = PowerController()
    assert controller.hold(0.1, 300.0, 50.0) == 0
    controller.warm(4.0)
    assert controller.hold(0.1, 300.0, 50.0) == pytest.approx(0.1)  # half of the time
    controller.warm(-5.0)
    assert controller.hold(0.1, 300.0, 50.0) == pytest.approx(0.1 * (1 / LEAST_DUTY - 1))
    controller.warm(30.0)
    assert controller.hold(0.1, 300.0, 50.0) == 0
    controller.warm(None)
    assert controller.hold(0.1, 300.0, 50.0) == 0


# Policies


def load(running: int = 0, waiting: int = 1, gap: float = 0.1, **changes: float) -> Load:
    fields = {"waited": 0.0, "step_seconds": 0.01, "request_steps": 100.0, "max_rows": 64, **changes}
    return Load(running=running, waiting=waiting, arrival_gap=gap, **fields)  # type: ignore[arg-type]


def test_performance_never_waits() -> None:
    policy = Performance()
    assert policy.gather_seconds(load()) == policy.step_interval(load(3)) == 0


@pytest.mark.parametrize("policy", [Balanced(), Saver()])
def test_a_lone_user_does_not_wait(policy: Saver) -> None:
    alone = load(gap=float("inf"))
    assert policy.gather_seconds(alone) == policy.step_interval(alone) == 0


def test_saver_waits_while_others_are_expected_and_not_in_a_full_step() -> None:
    policy = Saver()
    assert policy.gather_seconds(load()) == 0.2
    assert policy.gather_seconds(load(running=1)) == 0
    assert policy.step_interval(load(running=2)) == pytest.approx(1 / 15)
    assert policy.step_interval(load(running=16)) == 0
    assert policy.step_interval(load(running=2, gap=20.0)) == 0  # gone before the next arrives


def test_saver_needs_fewer_steps_for_the_same_tokens() -> None:
    """Requests of 60 tokens, five a second, on a device whose step takes 10 ms however many share it."""

    def steps_of(policy: Performance | Saver) -> tuple[int, float]:
        arrivals = [0.2 * i for i in range(100)]
        running: list[tuple[int, float]] = []
        now, steps, waits = 0.0, 0, []
        while arrivals or running:
            while arrivals and arrivals[0] <= now:
                running.append((60, arrivals.pop(0)))
            if not running:
                now = arrivals[0]
                continue
            interval = policy.step_interval(load(running=len(running), waiting=0, gap=0.2, request_steps=60.0))
            now += max(0.01, interval)
            steps += 1
            waits += [now - since for left, since in running if left == 1]
            running = [(left - 1, since) for left, since in running if left > 1]
        return steps, statistics.mean(waits)

    (fast, quick), (few, slow) = steps_of(Performance()), steps_of(Saver())
    assert few < fast / 3
    assert quick < slow < 60 * 0.1


def test_policies_are_a_registry() -> None:
    assert make_energy_policy("tests.energy.test_power.Never").step_interval(load()) == 0.5
    with pytest.raises(ValidationError, match="unknown energy policy 'eco'; known: balanced, performance, saver"):
        make_energy_policy("eco")


class Never(Performance):
    """A policy from a dotted path."""

    name = "never"

    def step_interval(self, load: Load) -> float:
        return 0.5
