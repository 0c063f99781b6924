"""Meters against a machine made of files and a driver made of numbers."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.energy import machine, meters
from quire.energy.meters import Estimate, MeterContext, MeterError, Rapl, make_meter
from quire.energy.nvml import GpuControl, NvmlMeter, NvmlTemperature
from quire.errors import ConfigError, ValidationError

RANGE = 262_143_328_850


def zone(root: Path, folder: str, name: str, energy: int) -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    return path / "energy_uj"


@pytest.fixture
def powercap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    return tmp_path


def test_rapl_adds_packages_and_memory_and_not_their_parts(powercap: Path) -> None:
    files = [
        zone(powercap, "intel-rapl:0", "package-0", 5_000_000),
        zone(powercap, "intel-rapl:1", "package-1", 7_000_000),
        zone(powercap, "intel-rapl:0:2", "dram", 1_000_000),
        zone(powercap, "intel-rapl:0:0", "core", 3_000_000),
        zone(powercap, "intel-rapl:2", "psys", 9_000_000),
        zone(powercap, "intel-rapl-mmio:0", "package-0", 5_000_000),
    ]
    meter = Rapl()
    assert meter.read() == 0
    for file in files:
        file.write_text(str(int(file.read_text()) + 2_500_000))
    assert meter.read() == pytest.approx(7.5)
    assert (meter.source, meter.is_estimate) == ("rapl", False)


def test_rapl_counts_on_when_a_counter_starts_again(powercap: Path) -> None:
    file = zone(powercap, "intel-rapl:0", "package-0", RANGE - 4_000_000)
    meter = Rapl()
    for value, joules in ((RANGE - 1_000_000, 3.0), (2_000_000, 6.0), (5_000_000, 9.0)):
        file.write_text(str(value))
        assert meter.read() == pytest.approx(joules)


def test_a_counter_that_only_root_may_read_says_so(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(powercap, "intel-rapl:0", "package-0", 0)
    real = Path.read_text

    def read(self: Path, *args: Any, **options: Any) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(MeterError, match=r"energy_uj may be read by root only: chmod"):
        Rapl()
    with pytest.raises(ConfigError, match="energy_meter is 'rapl', but .*root only"):
        make_meter("rapl", MeterContext())
    assert make_meter("auto", MeterContext()).is_estimate


def test_auto_takes_rapl_where_it_can_be_read_and_own_does_not(powercap: Path) -> None:
    assert make_meter("auto", MeterContext()).source == "estimate"
    zone(powercap, "intel-rapl:0", "package-0", 0)
    assert make_meter("auto", MeterContext()).source == "rapl"
    assert make_meter("own", MeterContext()).source == "estimate"
    both = make_meter("rapl+estimate", MeterContext())
    assert (both.source, both.is_estimate) == ("rapl+estimate", True)
    with pytest.raises(ValidationError, match="unknown energy meter 'watts'; known: estimate, nvml, rapl"):
        make_meter("watts", MeterContext())


def test_the_estimate_is_cpu_time_times_watts() -> None:
    meter = Estimate(MeterContext(watts_per_core=10.0))
    begin, first = time.process_time(), meter.read()
    while time.process_time() - begin < 0.02:
        pass
    assert meter.read() - first == pytest.approx(10 * (time.process_time() - begin), abs=0.05)


def test_the_estimate_of_ranks_counts_child_processes() -> None:
    meter = Estimate(MeterContext(has_children=True, watts_per_core=10.0))
    child = multiprocessing.get_context("spawn").Process(target=_burn, args=(0.3,))
    child.start()
    seen = 0.0
    while child.is_alive():
        seen = max(seen, meter.read())
        time.sleep(0.02)
    child.join()
    assert seen > 10 * 0.2
    assert meter.read() >= seen  # what ended processes used stays


def _burn(seconds: float) -> None:
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        os.getpid()


def test_the_estimate_of_a_gpu_is_by_time_of_steps() -> None:
    now, busy = [0.0], [0.0]
    context = MeterContext(True, ("0", "1"), busy_seconds=lambda: busy[0], watts_per_core=1e-9)
    meter = Estimate(context, clock=lambda: now[0])
    now[0], busy[0] = 10.0, 4.0
    assert meter.read() == pytest.approx(2 * (4 * 350 + 6 * 75))


class FakeNvml:
    """A driver of two cards."""

    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_TEMPERATURE_GPU, NVML_CLOCK_GRAPHICS = 1, 0, 0

    class NVMLError(Exception):
        pass

    def __init__(self, has_counter: bool = True, may_change: bool = True) -> None:
        self.cards = [
            SimpleNamespace(energy=1_000_000, power=300_000, limit=700_000, clock=None, celsius=50) for _ in range(2)
        ]
        self.has_counter, self.may_change = has_counter, may_change

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Any:  # noqa: N802 - the library's names
        return self.cards[number]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Any) -> int:  # noqa: N802
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        return card.energy

    def nvmlDeviceGetPowerUsage(self, card: Any) -> int:  # noqa: N802
        return card.power

    def nvmlDeviceGetTemperatureThreshold(self, card: Any, which: int) -> int:  # noqa: N802
        return 90

    def nvmlDeviceGetTemperature(self, card: Any, which: int) -> int:  # noqa: N802
        return card.celsius

    def nvmlDeviceGetPowerManagementLimitConstraints(self, card: Any) -> tuple[int, int]:  # noqa: N802
        return 200_000, 700_000

    def nvmlDeviceGetPowerManagementLimit(self, card: Any) -> int:  # noqa: N802
        return card.limit

    def nvmlDeviceSetPowerManagementLimit(self, card: Any, limit: int) -> None:  # noqa: N802
        if not self.may_change:
            raise self.NVMLError("Insufficient Permissions")
        card.limit = limit

    def nvmlDeviceGetMaxClockInfo(self, card: Any, which: int) -> int:  # noqa: N802
        return 2000

    def nvmlDeviceSetGpuLockedClocks(self, card: Any, least: int, most: int) -> None:  # noqa: N802
        if not self.may_change:
            raise self.NVMLError("Insufficient Permissions")
        card.clock = most

    def nvmlDeviceResetGpuLockedClocks(self, card: Any) -> None:  # noqa: N802
        card.clock = None

    def nvmlShutdown(self) -> None: ...  # noqa: N802


CARDS = MeterContext(True, ("0", "1"))


def test_nvml_sums_the_counters_of_all_cards() -> None:
    library = FakeNvml()
    meter = NvmlMeter(CARDS, library)
    library.cards[0].energy += 1_500
    library.cards[1].energy += 500
    assert meter.read() == pytest.approx(2.0)
    assert (meter.source, meter.is_estimate) == ("nvml", False)


def test_a_card_without_a_counter_is_integrated_and_said_to_be_estimated() -> None:
    library, now = FakeNvml(has_counter=False), [0.0]
    meter = NvmlMeter(CARDS, library, clock=lambda: now[0])
    now[0] = 2.0
    assert meter.read() == pytest.approx(1200.0)
    assert (meter.source, meter.is_estimate) == ("nvml-power", True)


def test_unknown_cards_are_named() -> None:
    with pytest.raises(MeterError, match="NVML does not know the GPUs GPU-1"):
        NvmlMeter(MeterContext(True, ("GPU-1",)), FakeNvml())


def test_limits_and_clocks_are_lowered_and_put_back() -> None:
    library = FakeNvml()
    control = GpuControl(("0", "1"), library)
    assert control.limit(1000) == 1000
    control.slow(True)
    assert [(card.limit, card.clock) for card in library.cards] == [(500_000, 1400)] * 2
    control.restore()
    assert [(card.limit, card.clock) for card in library.cards] == [(700_000, None)] * 2
    assert control.limit(100) == 400  # no card goes below 200 W
    control.restore()


def test_without_permission_nothing_is_changed() -> None:
    library = FakeNvml(may_change=False)
    control = GpuControl(("0", "1"), library)
    assert control.limit(400) is None
    control.slow(True)
    assert [(card.limit, card.clock) for card in library.cards] == [(700_000, None)] * 2


def test_the_hottest_card_counts() -> None:
    library = FakeNvml()
    library.cards[1].celsius = 84
    assert NvmlTemperature(("0", "1"), library).headroom() == 6


# Battery and temperature


def supply(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (root / name / file).write_text(text + "\n")


def test_a_laptop_knows_its_battery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SUPPLIES", tmp_path)
    supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging")
    assert not machine.has_battery()
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    supply(tmp_path, "AC", type="Mains", online="0")
    assert machine.has_battery() and machine.on_battery()
    supply(tmp_path, "AC", online="1")
    assert not machine.on_battery()
    supply(tmp_path, "AC", online="0")
    supply(tmp_path, "BAT0", status="Full")
    assert not machine.on_battery()


def test_the_processors_zone_and_its_limit_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "THERMAL", tmp_path)
    assert machine.ProcessorTemperature().headroom() is None
    supply(tmp_path, "thermal_zone0", type="iwlwifi_1", temp="99000")
    supply(tmp_path, "thermal_zone1", type="x86_pkg_temp", temp="80000")
    supply(
        tmp_path, "thermal_zone2", type="acpitz", temp="60000", trip_point_0_type="critical", trip_point_0_temp="64000"
    )
    assert machine.ProcessorTemperature().headroom() == 4
    supply(tmp_path, "thermal_zone2", temp="40000")
    assert machine.ProcessorTemperature().headroom() == machine.ASSUMED_LIMIT - 80
