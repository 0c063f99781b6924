"""Who fits an empty cache finishes, whatever sessions, tenants and tiers hold meanwhile."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.memory.disk.transfers import Ticket
from tests.scheduler.harness import Bench, MemoryDisk


class PatientDisk(MemoryDisk):
    """A disk that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(failing=0.0)
        self.is_slow = False

    def poll(self) -> list[Ticket]:
        return [] if self.is_slow else super().poll()


def keep(bench: Bench, name: str, prompt: list[int], output: int) -> list[int]:
    """A session that has had a turn, and holds its blocks; its tokens."""
    keeper = bench.scheduler.sessions
    assert keeper is not None
    keeper.create(name, prompt)
    bench.put(bench.request(f"{name} first", prompt, output, session=name))
    bench.run()
    return list(keeper.tokens(name))


def put_by(bench: Bench, prompt: list[int]) -> None:
    """The prompt's blocks lie in a tier below, and nothing of it on the device."""
    bench.add("before", prompt, 1)
    bench.run()
    assert bench.tiers is not None
    keys = bench.keys.of(prompt)
    bench.tiers.save(list(zip(keys, bench.tables.index.match(keys), strict=True)), to_disk=True)
    bench.run()
    bench.tables.reset_prefix()
    if bench.tiers.disk is not None:
        bench.tiers.host.discard(keys)
    assert len(bench.tiers.find(keys)) == len(keys)


def test_a_tenant_below_its_share_waits_for_those_whose_blocks_are_coming() -> None:
    """Nobody runs whom it could ask to make way."""
    disk = PatientDisk()
    bench = Bench(
        blocks=8, block_size=4, host_slots=20, disk=disk, policy="fair", config=EngineConfig(scheduling_policy="fair")
    )
    prompt = [2 + i for i in range(25)]
    put_by(bench, prompt)
    disk.is_slow = True
    bench.add("loading", prompt, 4, tenant="a")
    bench.step()
    assert bench.scheduler.loading == 1
    bench.add("other", 10, 4, tenant="b")
    bench.add("next", 10, 4, tenant="a")
    bench.step()
    disk.is_slow = False
    bench.run(200)
    bench.assert_right("loading", "other", "next")


def test_blocks_that_are_saved_in_turn_let_the_next_request_in() -> None:
    """Host memory has room for one cached block: each would go for the other, and one be on its way always."""
    bench = Bench(blocks=9, block_size=4, budget=8, host_slots=1)
    for name in ("one", "two", "three"):
        bench.add(name, 33, 4)
        bench.run(100)
    bench.assert_right()


def test_a_block_that_is_copied_from_is_not_filled_in_the_same_step(tmp_path: Path) -> None:
    """A session's turn copies the block it shares with a fork; the fork gives it back for one whose blocks come."""
    bench = Bench(blocks=20, block_size=4, max_rows=4, host_slots=100, sessions=tmp_path)
    prompt = [2 + i % 30 for i in range(59)]
    put_by(bench, prompt)
    tokens = keep(bench, "s", [7] * 9, 2)
    assert bench.scheduler.sessions is not None
    bench.scheduler.sessions.fork("s", "fork")
    bench.put(bench.request("turn", tokens, 8, session="s"))
    bench.add("long", prompt, 4)
    bench.run()
    assert any(plan.copies for plan in bench.plans)
    bench.assert_right("turn", "long")
