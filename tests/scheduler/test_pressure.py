"""Two watermarks: past the first admissions slow and idle sessions leave, past the second rows are put by."""

from __future__ import annotations

from pathlib import Path

from quire.scheduler.pressure import level
from tests.scheduler.harness import Bench


def test_levels() -> None:
    assert [level(free, 100) for free in (100, 15, 14, 3, 2, 0)] == [0, 0, 1, 1, 2, 2]


def test_past_the_first_one_request_a_step_is_admitted() -> None:
    bench = Bench(blocks=100, block_size=4, max_rows=16, budget=400)
    bench.add("large", 4 * 88, 8)
    bench.step()
    for i in range(4):
        bench.add(f"r{i}", 3, 6)
    bench.step()
    assert bench.scheduler.pressure.device == 1 and len(bench.running()) == 2
    bench.step()
    assert len(bench.running()) == 3
    assert bench.scheduler.pressure.slowed >= 2
    assert "pressure 1 device" in bench.scheduler.stats.describe_step()
    bench.run()
    bench.assert_right()


def test_calm_admits_all_at_once() -> None:
    bench = Bench(blocks=100, block_size=4, max_rows=16, budget=400)
    for i in range(5):
        bench.add(f"r{i}", 3, 6)
    bench.step()
    assert len(bench.running()) == 5 and bench.scheduler.pressure.slowed == 0
    bench.run()


def test_idle_sessions_leave_past_the_first(tmp_path: Path) -> None:
    bench = Bench(blocks=60, block_size=4, max_rows=4, budget=400, host_slots=100, sessions=tmp_path)
    keeper = bench.scheduler.sessions
    assert keeper is not None
    for i in range(4):
        prompt = [2 + i] * 40
        keeper.create(f"s{i}", prompt)
        bench.put(bench.request(f"t{i}", prompt, 2, session=f"s{i}"))
        bench.run()
    assert [keeper.get(f"s{i}").phase for i in range(4)] == ["idle"] * 4
    bench.add("stranger", 4 * 14, 12)
    bench.run()
    phases = [keeper.get(f"s{i}").phase for i in range(4)]
    assert "asleep" in phases and phases == sorted(phases), "those idle longest leave first"
    assert bench.scheduler.pressure.slept or keeper.kv.dropped
    bench.assert_right("stranger")


def test_past_the_second_a_row_is_put_by_before_it_must_go() -> None:
    bench = Bench(blocks=24, block_size=4, max_rows=4, budget=100, host_slots=100)
    for i in range(3):
        bench.add(f"r{i}", 20, 30)
    bench.run()
    bench.assert_right()
    stats = bench.scheduler.stats
    assert stats.swaps > stats.preemptions - stats.swaps, "most rows are put by in time"
    assert bench.tiers is not None and bench.tiers.loaded
