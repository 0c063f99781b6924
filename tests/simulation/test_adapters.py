"""LoRA adapters over a virtual clock: slots, loads that take time, caches apart; against arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from quire.cli.main import main
from quire.errors import ValidationError
from quire.simulation.costs import CostModel
from quire.simulation.fleet import Fleet, FleetOptions
from quire.simulation.load import Conversation, LoadOptions, Turn, draw_load
from quire.simulation.measurements import SimulationResult

FLAT = CostModel(
    "flat", "by hand", [(1, 0.01), (64, 0.01)], 0.0, 0.0, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64
)


def simulate(load: list[Conversation], **options: Any) -> SimulationResult:
    return Fleet(FLAT, FleetOptions(**{"max_step_stretch": math.inf, **options})).run(load)


def request(adapter: str, at: float = 0.0, output: int = 10, **fields: Any) -> Conversation:
    return Conversation(at, (Turn(20, output),), adapter=adapter, **fields)


def test_a_first_request_waits_for_its_adapter_and_a_later_one_does_not() -> None:
    load = [request("a"), request("a", at=5.0), request("", at=10.0)]
    result = simulate(load, adapter_seconds=0.5)
    assert result.adapter_loads == 1
    # Ten steps of 10 ms each; only the first request has the load before them.
    assert result.values("ttft") == [pytest.approx(0.51), pytest.approx(0.01), pytest.approx(0.01)]
    assert result.duration == pytest.approx(10.1)


def test_a_load_runs_beside_the_steps_of_other_requests() -> None:
    result = simulate([request("", output=100), request("a")], adapter_seconds=0.5)
    assert sorted(result.values("e2el")) == [pytest.approx(0.6), pytest.approx(1.0)]


def test_requests_wait_for_a_slot_that_others_hold() -> None:
    load = [request("a"), request("b")]
    beside = simulate(load, adapter_slots=2, adapter_seconds=0.5)
    assert beside.values("ttft") == [pytest.approx(0.51), pytest.approx(1.01)], "one thread loads both"
    behind = simulate(load, adapter_slots=1, adapter_seconds=0.5)
    assert behind.values("ttft") == [pytest.approx(0.51), pytest.approx(0.6 + 0.5 + 0.01)]
    assert (behind.adapter_loads, behind.adapter_evictions) == (2, 1)


def test_requests_of_different_adapters_share_no_blocks() -> None:
    prefix = (("system", 64),)
    same = simulate([request("a", at=float(i), prefix=prefix) for i in range(4)])
    other = simulate([request(name, at=float(i), prefix=prefix) for i, name in enumerate(("a", "b", "", "a"))])
    assert (same.cached_tokens, other.cached_tokens) == (3 * 64, 64)


def test_the_router_keeps_an_adapters_requests_together() -> None:
    load = [request(f"adapter {i % 4}", at=0.3 * i) for i in range(40)]
    assert simulate(load, replicas=4, adapter_slots=1).adapter_loads == 4


def test_a_request_keeps_its_adapter_when_its_replica_dies() -> None:
    load = [request("a", output=100), request("b", output=100)]
    result = simulate(load, kills=((0, 0.7),), restart_seconds=1.0, adapter_seconds=0.1)
    assert (result.completed, result.retried, result.output_tokens) == (2, 2, 200)
    assert result.adapter_loads == 2, "the engine that came back loaded both again"


def test_drawn_adapters_have_their_skew_and_change_nothing_else() -> None:
    times = [0.1 * i for i in range(4000)]
    names = Counter(each.adapter for each in draw_load(LoadOptions(adapters=4, adapter_skew=1.0), times))
    shares = [names[f"adapter {k}"] / len(times) for k in range(4)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)
    even = Counter(each.adapter for each in draw_load(LoadOptions(adapters=4, adapter_skew=0.0), times))
    assert all(count == pytest.approx(1000, rel=0.15) for count in even.values())
    assert {each.adapter for each in draw_load(LoadOptions(), times[:10])} == {""}


def test_the_same_seed_gives_the_same_figures() -> None:
    load = draw_load(LoadOptions(40, 9, spread=0.8, adapters=20, seed=5), [0.02 * i for i in range(60)])
    options = {"replicas": 2, "adapter_slots": 3}
    assert simulate(load, **options).to_json() == simulate(load, **options).to_json()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--adapter-skew", "-1"], "from 0 to 100"),
        (["--adapter-seconds", "nan"], "seconds to load one"),
        (["--adapters", "3", "--trace", "any"], "leave out --adapters"),
    ],
)
def test_bad_settings_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["simulate", "--num-prompts", "2", *flags]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ValidationError, match="at least one adapter slot"):
        simulate([], adapter_slots=0)
