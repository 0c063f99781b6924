"""Drafts, host memory and ranks over a virtual clock: what the real scheduler makes of them, against arithmetic."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from quire.cli.main import main
from quire.errors import ValidationError
from quire.messages.plan import Moves, StepPlan
from quire.simulation.costs import CostModel, StepWork, read_profile
from quire.simulation.device import DraftModel, HostLink, SimulatedDevice, VirtualClock
from quire.simulation.fleet import Fleet, FleetOptions
from quire.simulation.load import Conversation, Turn
from quire.simulation.measurements import SimulationResult
from quire.simulation.ranks import RankConnection, over_ranks

FLAT = CostModel(
    "flat", "by hand", [(1, 0.01), (64, 0.01), (128, 0.02)], context_seconds=0.0, pair_seconds=0.0, num_blocks=400,
    max_num_seqs=8, max_num_batched_tokens=64, layers=4, hidden_size=256, weight_bytes=64_000, kv_bytes_per_token=100,
)  # fmt: skip


def simulate(load: list[Conversation], costs: CostModel = FLAT, **options: Any) -> SimulationResult:
    return Fleet(costs, FleetOptions(**{"max_step_stretch": math.inf, **options})).run(load)


def requests(count: int, prompt: int, output: int, gap: float = 0.0) -> list[Conversation]:
    return [Conversation(gap * i, (Turn(prompt, output),)) for i in range(count)]


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_yield_what_their_rates_say(depth: int) -> None:
    costs = CostModel(**{**{name: getattr(FLAT, name) for name in FLAT.__struct_fields__}, "pipeline_depth": depth})
    plain = simulate(requests(4, 16, 1000), costs)
    result = simulate(
        requests(4, 16, 1000), costs, drafts=DraftModel((0.8, 0.5), seconds=0.001, seed=3), tunes_drafts=False
    )
    assert result.output_tokens == plain.output_tokens == 4000 and result.completed == 4
    # A draw yields 1 + 0.8 + 0.8 * 0.5 tokens; a step takes 10 ms, and 1 ms for each of the two drafts.
    assert result.duration / plain.duration == pytest.approx(0.012 / 0.01 / 2.2, rel=0.05)
    assert result.accepted_drafts / result.drafts == pytest.approx(1.2 / 2, rel=0.05)


def test_tuning_leaves_out_drafts_that_do_not_pay() -> None:
    """Drafts that are never right, on a device on which a step of twice the tokens takes twice as long."""
    costs = CostModel("steep", "by hand", [(1, 0.001), (64, 0.064)], 0.0, 0.0, num_blocks=400, max_num_seqs=8)
    load = requests(8, 16, 1500)
    plain, wrong = simulate(load, costs), DraftModel((0.0, 0.0, 0.0), seconds=0.0005)
    assert simulate(load, costs, drafts=wrong).duration < 1.03 * plain.duration
    assert simulate(load, costs, drafts=wrong, tunes_drafts=False).duration > 2 * plain.duration


def test_host_memory_saves_what_the_device_evicts() -> None:
    load = [Conversation(0.5 * i, (Turn(80, 20), Turn(20, 10, pause=30.0))) for i in range(12)]
    link = HostLink(block_bytes=1 << 20, out_rate=1e9, back_rate=1e9)
    without = simulate(load, num_blocks=20)
    result = simulate(load, num_blocks=20, host_blocks=200, link=link)
    assert without.cached_tokens == 0, "the device has room for two conversations"
    assert result.completed == without.completed == 24
    # Six full blocks of each first turn; some are evicted before there was time to save them.
    assert 0.75 * 12 * 96 < result.cached_tokens <= 12 * 96
    assert result.loaded_blocks >= 12 * 4 and result.saved_blocks >= result.loaded_blocks
    slow = simulate(load, num_blocks=20, host_blocks=200, link=HostLink(1 << 20, 1e9, back_rate=2e6))
    assert slow.loaded_blocks == 0, "half a second a block: the scheduler knows that computing it again is faster"


def plan(step: int, rows: int, moves: Moves | None = None) -> StepPlan:
    """`rows` decodes, and these moves."""
    index, none = np.arange(rows, dtype=np.int32), np.empty(0, np.int32)
    return StepPlan(step, index, np.ones(rows, np.int32), rows, none, index, index, none, none, none, 1, moves=moves)


def test_copies_take_their_time_and_only_steps_that_await_them_wait() -> None:
    clock = VirtualClock()
    device = SimulatedDevice(FLAT, 8, clock, link=HostLink(block_bytes=100, out_rate=1e4, back_rate=1e3))
    first = device.submit(plan(0, 2, Moves(out=[(1, 0), (2, 1)])))  # 20 ms, from the step's start on
    assert (first.start, first.end) == (0.0, pytest.approx(0.01))
    assert device.collect(first).moves_done == []
    late = device.submit(plan(1, 2, Moves(back=[(0, 3)], awaited=True)))  # 100 ms behind the others
    assert (late.start, late.end) == (pytest.approx(0.12), pytest.approx(0.13))
    done = device.collect(late).moves_done
    assert [each.step for each in done] == [0, 1]
    assert (done[0].out_seconds, done[1].back_seconds) == (pytest.approx(0.02), pytest.approx(0.1))
    waiting = device.submit(plan(2, 0, Moves(out=[(3, 2)])))  # computes nothing: it is there for the copy
    assert [each.step for each in device.collect(waiting).moves_done] == [2]
    assert clock.now == pytest.approx(0.13 + 0.01)
    assert device.busy == pytest.approx(0.02)


def test_tensor_parallel_ranks_divide_work_and_add_collectives() -> None:
    link = RankConnection(latency=1e-4, rate=1e9)
    two = over_ranks(FLAT, tensor=2, stages=1, link=link)
    reduced = 2 * 4 * (1e-4 + 2 * 0.5 * 32 * 256 * 2 / 1e9)
    assert two.seconds(StepWork(32, 0, 0, 0)) == pytest.approx(0.01 / 2 + reduced, rel=0.01)
    # Two devices of 400 blocks, 640,000 bytes, and 64,000 of weights, which they have once instead of twice.
    assert two.num_blocks == (2 * (640_000 + 64_000) - 64_000) // 1600
    assert "modelled" in two.name and "modelled" in two.source and two.error is None
    assert over_ranks(FLAT, 1, 1) is FLAT


def test_pipeline_stages_take_steps_one_behind_the_other() -> None:
    """Enough requests keep both stages busy: twice the throughput. One request alone gains nothing."""
    two = over_ranks(FLAT, tensor=1, stages=2, link=RankConnection(latency=1e-5))
    alone = simulate(requests(1, 16, 100)).duration
    assert simulate(requests(1, 16, 100), two).duration == pytest.approx(alone, rel=0.02)
    many = requests(8, 16, 400)
    assert simulate(many, two).duration == pytest.approx(simulate(many, max_num_seqs=4).duration / 2, rel=0.05)


def test_impossible_ranks_and_tiers_are_refused() -> None:
    with pytest.raises(ValidationError, match="4 layers cannot fill 5 pipeline stages"):
        over_ranks(FLAT, 1, 5)
    blank = CostModel("blank", "by hand", [(1, 0.01)], 0.0, 0.0)
    with pytest.raises(ValidationError, match="blank does not say `layers`"):
        over_ranks(blank, 2, 1)
    with pytest.raises(ValidationError, match="needs a link"):
        Fleet(FLAT, FleetOptions(host_blocks=5))


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--acceptance", "0.8,1.2"], "probabilities"),
        (["--acceptance", ",".join(["0.5"] * 8)], "1 to 7"),
        (["--acceptance", "0.5", "--draft-seconds", "-1"], "at least 0"),
        (["--tensor-parallel-size", "2", "--rank-gbps", "0"], "above 0"),
        (["--plot", "x.svg", "--sweep", "max_num_seqs=1,2"], "one run"),
    ],
)
def test_impossible_flags_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--num-prompts", "2", *flags]) != 0
    assert said in capsys.readouterr().err


def test_every_output_says_what_is_modelled(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    plot = tmp_path / "run.svg"
    flags = ["--tensor-parallel-size", "4", "--acceptance", "0.7,0.6", "--turns", "2", "--num-prompts", "20"]
    flags += ["--output-len", "16", "--host-blocks", "1000", "--num-blocks", "400", "--request-rate", "20"]
    assert main(["simulate", *flags, "--plot", str(plot), "--output-json", str(tmp_path / "run.json")]) == 0
    printed = capsys.readouterr().out
    assert "h200-llama-3.1-8b-tp4 (modelled)" in printed and "accepted, at the rates given" in printed
    assert "host memory" in printed and "4 tensor-parallel ranks" in (tmp_path / "run.json").read_text()
    drawn = ElementTree.parse(plot).getroot()
    texts = "".join(drawn.itertext())
    assert "simulated" in texts and "modelled" in texts and "40 requests" in texts
    assert len(drawn.findall(".//{*}polyline")) == 5


def test_the_shipped_profile_can_be_split() -> None:
    costs = read_profile("h200-llama-3.1-8b")
    eight = over_ranks(costs, 8, 1)
    decode = StepWork(64, 0, 64 * 1000, 0)
    assert costs.seconds(decode) / 8 < eight.seconds(decode) < costs.seconds(decode) / 2
