"""A request that fits an empty cache finishes, whatever sessions, tenants and tiers hold."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.kvcache.offload.io_threads import IOTask
from tests.scheduler.harness import Bench, MemoryDisk


class PatientDisk(MemoryDisk):
    """A disk that completes tasks when the test says so."""

    def __init__(self) -> None:
        super().__init__(failing=0.0)
        self.is_slow = False

    def poll(self) -> list[IOTask]:
        return [] if self.is_slow else super().poll()


def keep(bench: Bench, name: str, prompt: list[int], output: int) -> list[int]:
    """A session that has had a turn and holds its blocks; returns its tokens."""
    keeper = bench.core.sessions
    assert keeper is not None
    keeper.create(name, prompt)
    bench.put(bench.request(f"{name} first", prompt, output, session=name))
    bench.run()
    return list(keeper.tokens(name))


def keep_one(bench: Bench, name: str, prompt: int, output: int) -> list[int]:
    """As `keep`, while other requests wait for the disk."""
    keeper = bench.core.sessions
    assert keeper is not None
    keeper.create(name, [3] * prompt)
    bench.put(bench.request(f"{name} first", [3] * prompt, output, session=name))
    while bench.scheduler.unfinished > 1:
        bench.step()
    return list(keeper.tokens(name))


def save_below(bench: Bench, prompt: list[int]) -> None:
    """The prompt's blocks are in a lower tier, and none of them on the device."""
    bench.add("before", prompt, 1)
    bench.run()
    assert bench.tiers is not None
    keys = bench.keys.of(prompt)
    bench.tiers.save(list(zip(keys, bench.tables.prefix_cache.match(keys), strict=True)), to_disk=True)
    bench.run()
    bench.tables.reset_prefix()
    if bench.tiers.store is not None:
        bench.tiers.host.discard(keys)
    assert len(bench.tiers.find(keys)) == len(keys)


def test_a_session_that_holds_the_whole_cache_can_take_another_turn(tmp_path: Path) -> None:
    bench = Bench(blocks=4, block_size=4, sessions=tmp_path)
    tokens = keep(bench, "s", [5] * 12, 4)
    assert bench.tables.pool.free == 0
    bench.put(bench.request("again", tokens, 1, session="s"))
    bench.run(50)
    assert bench.scheduler.stats.cached_tokens == 15
    bench.assert_right("again")


def test_an_aborted_turn_can_be_retried_in_a_cache_of_its_size(tmp_path: Path) -> None:
    """Its last block holds the one token that is computed again."""
    bench = Bench(blocks=4, block_size=4, sessions=tmp_path)
    bench.core.sessions.create("s", [5] * 13)
    bench.put(bench.request("first", [5] * 13, 4, session="s"))
    bench.step()
    bench.core.abort("first")
    assert bench.tables.pool.free == 0
    bench.put(bench.request("again", [5] * 13, 4, session="s"))
    bench.run(50)
    bench.assert_right("again")


def test_a_fork_releases_what_it_shares_with_a_turn(tmp_path: Path) -> None:
    bench = Bench(blocks=4, block_size=4, sessions=tmp_path)
    tokens = keep(bench, "s", [5] * 12, 4)
    bench.core.sessions.fork("s", "fork")
    bench.put(bench.request("again", tokens, 1, session="s"))
    bench.run(50)
    assert bench.scheduler.stats.cached_tokens == 15, "the session lost nothing"
    bench.assert_right("again")


def test_blocks_held_for_a_turn_go_to_a_request_whose_transfer_is_done(tmp_path: Path) -> None:
    """The turn cannot join before the other, and the other needs a block that the turn holds."""
    disk = PatientDisk()
    bench = Bench(blocks=12, block_size=4, host_slots=20, disk=disk, sessions=tmp_path)
    prompt = [2 + i for i in range(25)]
    save_below(bench, prompt)
    disk.is_slow = True
    bench.add("loading", prompt, 4)
    bench.step()
    assert bench.scheduler.loading == 1 and bench.tables.pool.free == 6
    tokens = keep_one(bench, "s", 19, 6)
    assert bench.tables.pool.free == 0
    bench.put(bench.request("turn", tokens, 4, session="s"))
    disk.is_slow = False
    bench.run(200)
    bench.assert_right("loading", "turn")


def test_a_tenant_below_its_share_waits_for_transfers_of_others() -> None:
    """No request runs that could be preempted for it."""
    disk = PatientDisk()
    bench = Bench(
        blocks=8, block_size=4, host_slots=20, disk=disk, policy="fair", config=EngineConfig(scheduling_policy="fair")
    )
    prompt = [2 + i for i in range(25)]
    save_below(bench, prompt)
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


def test_blocks_that_offload_in_alternation_admit_the_next_request() -> None:
    """Host memory has room for one cached block: each would evict the other, and one would always be in transfer."""
    bench = Bench(blocks=9, block_size=4, budget=8, host_slots=1)
    for name in ("one", "two", "three"):
        bench.add(name, 33, 4)
        bench.run(100)
    bench.assert_right()


def test_a_copy_source_is_not_overwritten_in_the_same_step(tmp_path: Path) -> None:
    """A session's turn copies the block it shares with a fork; the fork releases it to a request whose blocks
    arrive."""
    bench = Bench(blocks=20, block_size=4, max_rows=4, host_slots=100, sessions=tmp_path)
    prompt = [2 + i % 30 for i in range(59)]
    save_below(bench, prompt)
    tokens = keep(bench, "s", [7] * 9, 2)
    bench.core.sessions.fork("s", "fork")
    bench.put(bench.request("turn", tokens, 8, session="s"))
    bench.add("long", prompt, 4)
    bench.run()
    assert any(plan.copies for plan in bench.plans)
    bench.assert_right("turn", "long")
