"""Engines with a fake meter: what requests are charged, how steps are held back, and what is said about it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.api.relay import split_by_owner
from quire.cli.main import main
from quire.config import EngineConfig
from quire.energy import machine
from quire.energy.policies import Saver
from quire.engine.device_split import replica_config
from quire.engine.energy import EngineEnergy, NoEnergy
from quire.errors import ConfigError
from quire.messages.outputs import StepEnergy, StepOutputs
from tests.energy.fake_meter import BUSY_WATTS, IDLE_WATTS, FakeMeter

METER = "tests.energy.fake_meter.FakeMeter"
MakeLLM = Callable[..., LLM]


def tokens(count: int, **settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.5, seed=7, **settings)  # type: ignore[arg-type]


def energy_of(llm: LLM) -> EngineEnergy:
    energy = llm.llm_engine.core._energy
    assert isinstance(energy, EngineEnergy)
    return energy


def values(llm: LLM) -> dict[str, float]:
    found = {}
    for metric in llm.get_metrics():
        found[metric.name.removeprefix("quire:")] = metric.value
        found |= {f"{metric.name.removeprefix('quire:')}.{'.'.join(label)}": value for label, value in metric.series}
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_and_idle_time_add_up_to_the_meter(make_llm: MakeLLM, depth: int) -> None:
    llm = make_llm(report_energy=True, energy_meter=METER, pipeline_depth=depth)
    outputs = []
    for round in range(3):
        params = [tokens(5 + 7 * i, n=1 + (i == 2)) for i in range(5)]
        outputs += llm.generate(["the world " * (1 + 9 * round + i) for i in range(5)], params)
    told = sum(output.metrics.joules for output in outputs if output.metrics)
    found = values(llm)
    meter = FakeMeter.made[-1]
    assert all(output.metrics and output.metrics.joules > 0 for output in outputs)
    assert {output.metrics.energy_source for output in outputs if output.metrics} == {"fake"}
    assert found["energy_joules"] == pytest.approx(meter.used, rel=1e-6)
    assert told + found["energy_joules.idle"] == pytest.approx(meter.used, rel=0.03)
    assert min(found[f"energy_joules.{kind}"] for kind in ("prompt", "decode", "idle")) > 0
    assert (found["energy_estimated.fake"], found["energy_held_seconds"]) == (0, 0)


def test_requests_for_vectors_are_charged_too(make_llm: MakeLLM) -> None:
    llm = make_llm(report_energy=True, energy_meter=METER)
    (vector,) = llm.encode(["the world"], pooling_task="embed")
    assert vector.metrics is not None
    assert vector.metrics.joules > 0


def test_an_engine_without_these_settings_meters_nothing(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "SUPPLIES", tmp_path)  # no battery
    llm = make_llm()
    assert isinstance(llm.llm_engine.core._energy, NoEnergy)
    (output,) = llm.generate(["a"], tokens(2))
    assert output.metrics is not None
    assert (output.metrics.joules, output.metrics.energy_source) == (0.0, None)
    assert not any("energy" in metric.name or "power" in metric.name for metric in llm.get_metrics())


def test_where_nothing_can_be_read_it_is_said_to_be_an_estimate(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.energy.meters.POWERCAP", tmp_path)
    with caplog.at_level(logging.INFO):
        llm = make_llm(report_energy=True)
    assert "energy is estimated (6 W for each busy core)" in caplog.text
    (output,) = llm.generate(["a"], tokens(8))
    assert output.metrics is not None
    assert (output.metrics.energy_source, output.metrics.energy_is_estimate) == ("estimate", True)
    assert values(llm)["energy_estimated.estimate"] == 1


def test_a_meter_that_fails_is_replaced_by_the_estimate(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(report_energy=True, energy_meter=METER)
    llm.generate(["a"], tokens(8))
    before = values(llm)["energy_joules"]
    FakeMeter.made[-1].is_broken = True
    (output,) = llm.generate(["b"], tokens(8))
    assert "energy is estimated from now on" in caplog.text
    assert output.metrics is not None
    assert output.metrics.energy_is_estimate
    assert values(llm)["energy_joules"] > before > 0


def test_a_budget_is_held_by_pauses_and_tokens_stay_the_same(make_llm: MakeLLM) -> None:
    plain = [output.outputs[0].token_ids for output in make_llm().generate(["the world", "a"], tokens(60))]
    budget = 0.5 * (IDLE_WATTS + BUSY_WATTS)
    llm = make_llm(power_budget=budget, energy_meter=METER)
    energy = energy_of(llm)
    for _ in range(3):
        found = [output.outputs[0].token_ids for output in llm.generate(["the world", "a"], tokens(60))]
        assert found == plain
    seen = values(llm)
    assert seen["power_budget_watts"] == budget
    # How well it is held depends on how even steps are, which other programs decide here: test_power.py has it in
    # simulated time.
    assert seen["energy_held_seconds.budget"] > 0
    assert energy.controller.budget == budget
    assert all(output.metrics is not None and not output.metrics.joules for output in llm.generate(["a"], tokens(2)))


def test_saver_starts_requests_together_and_lets_no_stream_stand(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saver, "most_gather", 1.0)  # however slow this machine is
    llm = make_llm(energy_policy="saver", energy_meter=METER)
    engine = llm.llm_engine
    engine.add_request("first", "the", tokens(4))
    engine.add_request("second", "world", tokens(4))  # expected soon after: the gap is short
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert sorted(ended) == ["first", "second"]
    found = values(llm)
    assert found["energy_policy.saver"] == 1
    assert 0 < found["energy_held_seconds.policy"] < 5


def test_a_laptop_changes_its_policy_with_its_supply(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "SUPPLIES", tmp_path)
    battery = tmp_path / "BAT0"
    battery.mkdir()
    (battery / "type").write_text("Battery")
    (battery / "status").write_text("Discharging")
    with caplog.at_level(logging.INFO):
        llm = make_llm(energy_meter=METER)
        assert "policy saver" in caplog.text
        (battery / "status").write_text("Charging")
        energy = energy_of(llm)
        energy._looked_at -= 10
        energy.sample()
    assert "energy policy performance: on mains" in caplog.text
    assert values(llm)["energy_policy.performance"] == 1


# Settings


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"power_budget": 0}, "power_budget must be a number of watts above 0, got 0"),
        ({"watts_per_core": -1.0}, "watts_per_core must be a number of watts above 0"),
        ({"allow_gpu_power_control": True}, "needs power_budget or energy_policy"),
        ({"energy_meter": "rapl", "data_parallel_size": 2}, "counts the whole machine, but data_parallel_size is 2"),
        (
            {"power_budget": 100.0, "enable_expert_parallel": True, "data_parallel_size": 2},
            "replicas that share experts step together",
        ),
        ({"report_energy": True, "distributed_executor_backend": "ray"}, "on the engine's machine, .*'ray'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(**settings)


def test_replicas_share_the_budget_and_do_not_count_each_other() -> None:
    config = replica_config(EngineConfig(data_parallel_size=4, power_budget=400.0), 1)
    assert (config.power_budget, config.energy_meter) == (100.0, "own")


def test_another_front_gets_the_energy_of_its_own_requests() -> None:
    outputs = StepOutputs(
        keys=[("a", 0), ("b", 0)], tokens=[1, 2], energy=StepEnergy(["a", "b", "a2"], [1.0, 2.0, 4.0], "rapl", False)
    )
    parts = split_by_owner(outputs, lambda request: request[0])
    assert {owner: sum(part.energy.joules) for owner, part in parts.items() if part.energy} == {"a": 5.0, "b": 2.0}
    assert parts["a"].energy == StepEnergy(["a", "a2"], [1.0, 4.0], "rapl", False)


def test_metering_alone_never_holds_a_step_back(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.energy.machine.ProcessorTemperature.headroom", lambda self: 1.0)
    llm = make_llm(report_energy=True, energy_meter=METER)
    llm.generate(["the world"], tokens(20))
    found = values(llm)
    assert (found["temperature_headroom_celsius"], found["energy_held_seconds"]) == (1.0, 0.0)


def test_a_hot_processor_rests_between_steps(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.energy.machine.ProcessorTemperature.headroom", lambda self: 4.0)
    llm = make_llm(energy_policy="performance", energy_meter=METER)
    llm.generate(["the world"], tokens(40))
    found = values(llm)
    assert found["energy_held_seconds.temperature"] > 0.5 * energy_of(llm).busy  # half of the time
    assert found["energy_held_seconds.policy"] == found["energy_held_seconds.budget"] == 0


def test_a_message_ends_the_wait_between_steps(make_llm: MakeLLM) -> None:
    energy = energy_of(make_llm(energy_policy="saver", energy_meter=METER))
    reader, writer = os.pipe()
    os.write(writer, b"a request")
    begin = time.monotonic()
    energy.wait(20.0, [reader])
    assert time.monotonic() - begin < 10
    os.close(reader)
    os.close(writer)


def test_bench_says_what_requests_took(tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = ["--model", str(tiny_model), "--device", "cpu", "--report-energy", "--energy-meter", METER]
    sizes = ["--input-len", "8", "--output-len", "8", "--output-json", str(tmp_path / "found.json")]
    assert main(["bench", "throughput", "--num-prompts", "3", *sizes, *settings]) == 0
    assert "J per output token, measured (fake)" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["joules"] > 0 and (found["energy_estimated"], found["energy_source"]) == (False, "fake")
    assert main(["bench", "latency", "--batch-size", "2", "--num-iters", "2", *sizes, *settings]) == 0
    assert "measured (fake)" in capsys.readouterr().out
