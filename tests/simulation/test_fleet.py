"""Replicas under load over a virtual clock: times follow from the cost model, plans are those of the engine."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.messages.plan import StepPlan
from quire.simulation.costs import CostModel, StepWork
from quire.simulation.device import SimulatedStep
from quire.simulation.fleet import Fleet, FleetOptions
from quire.simulation.load import Conversation, LoadOptions, OpenConversation, Turn, draw_load, read_trace
from quire.simulation.measurements import LogHistogram, SimulationResult
from quire.simulation.timeline import SlowestRequests

FLAT = CostModel(
    "flat", "by hand", [(1, 0.01), (64, 0.01), (128, 0.02)], context_seconds=1e-6, pair_seconds=1e-7,
    num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64,
)  # fmt: skip
UNPACED = FleetOptions(max_step_stretch=math.inf)


def simulate(load: list[Conversation], options: FleetOptions = UNPACED, costs: CostModel = FLAT) -> SimulationResult:
    return Fleet(costs, options).run(load)


def single(prompt: int, output: int, at: float = 0.0, **more: Any) -> Conversation:
    return Conversation(at, (Turn(prompt, output),), **more)


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    shapes: list[StepWork] = []
    fleet = Fleet(FLAT, UNPACED, lambda replica, step: shapes.append(step.shape))
    result = fleet.run([single(100, 4, at=3.0)])
    # 100 prompt tokens in steps of at most 64, then three decodes; each attends to itself and all before it.
    expected = [
        StepWork(0, 64, 0, 64 * 65 // 2, prompts=1),
        StepWork(0, 36, 0, 36 * 64 + 36 * 37 // 2, prompts=1),
        *(StepWork(1, 0, 100 + i, 0) for i in (1, 2, 3)),
    ]
    assert shapes == expected
    seconds = [FLAT.seconds(shape) for shape in expected]
    assert result.percentile("ttft", 50) == pytest.approx(sum(seconds[:2]))
    assert result.percentile("e2el", 50) == pytest.approx(sum(seconds))
    assert result.percentile("tpot", 50) == pytest.approx(sum(seconds[2:]) / 3)
    assert result.duration == pytest.approx(3.0 + sum(seconds))
    assert result.busy == [pytest.approx(sum(seconds))]


def test_the_engine_takes_its_time_between_steps_that_do_not_overlap() -> None:
    costs = msgspec.structs.replace(FLAT, host_seconds=0.002, pipeline_depth=0)
    times = [Fleet(each).run([single(10, 20)]).values("e2el")[0] for each in (FLAT, costs)]
    assert times[1] - times[0] == pytest.approx(20 * 0.002), "before each of twenty steps"
    overlapped = msgspec.structs.replace(costs, pipeline_depth=1)
    assert Fleet(overlapped).run([single(10, 20)]).values("e2el")[0] == pytest.approx(times[0])


def test_what_is_computed_is_counted_whatever_the_batches() -> None:
    load = draw_load(LoadOptions(40, 20, spread=0.5, seed=1), [0.05 * i for i in range(60)])
    steps: list[SimulatedStep] = []
    result = Fleet(FLAT, FleetOptions(), lambda replica, step: steps.append(step)).run(load)
    assert result.completed == 60 and result.preemptions == 0
    assert sum(step.shape.prompt_tokens for step in steps) == sum(each.turns[0].new_tokens for each in load)
    assert sum(step.shape.decodes for step in steps) == sum(each.turns[0].output - 1 for each in load)
    assert result.output_tokens == sum(each.turns[0].output for each in load)
    assert all(later.start >= earlier.end for earlier, later in itertools.pairwise(steps))


def test_the_same_seed_gives_the_same_figures() -> None:
    def figures(seed: int) -> dict[str, Any]:
        load = draw_load(LoadOptions(60, 12, 0.3, prefix_len=32, num_prefixes=3, turns=2, seed=seed), [0.01] * 40)
        return simulate(load, FleetOptions(replicas=3)).to_json()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_steps_overlap_planning_but_not_each_other() -> None:
    """With steps in flight the device never pauses between them, and tokens come one step later to the planner only."""
    costs = CostModel(**{**{name: getattr(FLAT, name) for name in FLAT.__struct_fields__}, "pipeline_depth": 1})
    assert simulate([single(30, 50)], costs=costs).duration == pytest.approx(
        simulate([single(30, 50)]).duration, rel=0.03
    )


def test_a_shared_prefix_is_computed_once_for_each_replica_that_serves_it() -> None:
    load = [single(16, 4, at=float(i), prefix=(("system", 64),)) for i in range(12)]
    assert simulate(load).cached_tokens == 11 * 64
    assert simulate(load, FleetOptions(prefix_caching=False)).cached_tokens == 0
    spread = simulate(load, FleetOptions(replicas=4, routing_policy="least_loaded")).cached_tokens
    assert 0 < spread < simulate(load, FleetOptions(replicas=4, routing_policy="prefix")).cached_tokens


def test_a_later_turn_finds_the_blocks_of_those_before() -> None:
    turns = (Turn(64, 16), Turn(20, 10, pause=2.0), Turn(20, 10, pause=1.0))
    result = simulate([Conversation(0.0, turns)])
    # The last token of a turn is not computed; full blocks of the rest are cached: 79 and 109 tokens.
    assert result.cached_tokens == 64 + 96
    assert result.completed == 3 and result.duration > 3.0


def test_a_closed_loop_keeps_its_concurrency() -> None:
    rows: list[int] = []
    fleet = Fleet(FLAT, FleetOptions(concurrency=3), lambda replica, step: rows.append(step.shape.decodes))
    assert fleet.run([single(8, 30) for _ in range(20)]).completed == 20
    assert max(rows) == 3
    assert fleet.result.percentile("ttft", 99) < 0.05  # from sending, not from when the load had it ready


def test_requests_of_a_replica_that_dies_go_on_elsewhere() -> None:
    load = [single(20, 60, at=0.01 * i) for i in range(30)]
    options = FleetOptions(replicas=2, kills=((0, 0.4),), restart_seconds=0.5)
    result, undisturbed = simulate(load, options), simulate(load, FleetOptions(replicas=2))
    assert (result.completed, result.failed, result.deaths) == (30, 0, 1)
    assert result.retried > 0 and result.output_tokens == 30 * 60
    assert result.duration > undisturbed.duration
    alone = simulate(load, FleetOptions(kills=((0, 0.4),), restart_seconds=5.0))
    assert alone.completed == 30 and alone.duration > 5.0


def test_a_trace_of_texts_shares_what_is_the_same(tmp_path: Path) -> None:
    system, trace = "You are a careful assistant. " * 10, tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "output_length": 4, "prompt": system + 100 * str(i)} for i in range(3)]
    lines.append({"timestamp": 9, "output_length": 4, "messages": [{"role": "user", "content": system + "x" * 100}]})
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    load = read_trace(str(trace), unit=1.0)
    assert [each.at for each in load] == [0.0, 1.0, 2.0, 9.0]
    assert [each.length - 4 for each in load] == [(290 + 100) // 4] * 4
    # 290 characters have four whole blocks of 16 tokens, of four characters each; later lines find them.
    assert simulate(load).cached_tokens == 3 * 64


def test_the_slowest_requests_have_timelines() -> None:
    load = [single(40, 4, at=5.0 * i) for i in range(6)] + [single(100, 30, at=50.0), single(30, 20, at=60.0)]
    slowest = SlowestRequests(2)
    Fleet(FLAT, UNPACED, slowest=slowest).run(load)
    longest, second = slowest.timelines
    assert (longest.prompt_tokens, second.prompt_tokens, longest.arrival) == (100, 30, 50.0)
    assert [step.computed for step in longest.steps] == [64, 36, *[1] * 29]
    assert longest.steps[0].start == pytest.approx(50.0) and longest.is_whole and longest.finish_reason == "length"
    expected = FLAT.seconds(StepWork(0, 64, 0, 64 * 65 // 2))
    assert longest.steps[0].end == pytest.approx(50.0 + expected)


def test_a_tight_cache_preempts_and_everything_finishes() -> None:
    options = FleetOptions(num_blocks=20, max_step_stretch=math.inf)
    result = simulate([single(40, 100) for _ in range(8)], options)
    assert result.preemptions > 0 and result.completed == 8 and result.output_tokens == 800


@pytest.mark.parametrize("policy", ["fcfs", "tests.simulation.longest_first.LongestFirst"])
def test_plans_are_those_of_the_engine(make_llm: Callable[..., LLM], policy: str) -> None:
    """The same requests at once, through `LLM` with its own scheduler and through the simulator."""
    load = draw_load(LoadOptions(40, 9, spread=0.8, prefix_len=16, num_prefixes=2, seed=5), [0.0] * 30)
    prompts = [OpenConversation(each, number, 0).prompt() for number, each in enumerate(load)]
    real, simulated = [], []
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
    llm = make_llm(distributed_executor_backend="null", scheduling_policy=policy, pipeline_depth=0, **settings)
    llm.llm_engine.core.wrap_executor(lambda executor: Watched(executor, real))
    params = [SamplingParams(max_tokens=each.turns[0].output, ignore_eos=True) for each in load]
    llm.generate([{"prompt_token_ids": [token % 100 for token in prompt]} for prompt in prompts], params)

    options = FleetOptions(num_blocks=40, scheduling_policy=policy, max_step_stretch=math.inf)
    fleet = Fleet(FLAT, options)
    fleet.replicas[0].core.wrap_executor(lambda executor: Watched(executor, simulated))
    fleet.run(load)
    assert len(real) > 10
    assert simulated == real


class Watched:
    """An executor that writes down what each plan computes."""

    def __init__(self, executor: Any, plans: list[Any]) -> None:
        self._executor = executor
        self._plans = plans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Any:
        arrays = (plan.rows, plan.counts, plan.sample_rows, plan.block_rows, plan.block_indices, plan.blocks)
        self._plans.append((plan.step, plan.num_decodes, plan.drop, [array.tolist() for array in arrays]))
        return self._executor.submit(plan)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="holds 6400"):
        simulate([single(6000, 500)])
    with pytest.raises(ValidationError, match="from 1 to"):
        Fleet(FLAT, FleetOptions(replicas=0))
    with pytest.raises(ValidationError, match="not among the 2"):
        Fleet(FLAT, FleetOptions(replicas=2, kills=((2, 1.0),)))


def test_the_histogram_is_exact_within_its_resolution() -> None:
    histogram, values = LogHistogram(), [0.001 * (1 + i % 97) for i in range(5000)]
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99):
        exact = sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.02)
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        "assert main(['simulate', '--num-prompts', '20']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
