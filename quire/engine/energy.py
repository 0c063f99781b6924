"""An engine's energy: samples its meter, charges requests, and says how long a step is to be held back."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.energy.account import EnergyAccount
from quire.energy.machine import ProcessorTemperature, has_battery, on_battery
from quire.energy.meters import Estimate, Meter, MeterContext, MeterError, make_meter
from quire.energy.policies import EnergyPolicy, Load, make_energy_policy
from quire.energy.power import LONGEST_HOLD_SECONDS, PowerController
from quire.engine.stats import Metric, labelled_metric
from quire.messages.outputs import StepEnergy, StepOutputs
from quire.messages.request import Request, RequestState

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.energy.nvml import GpuControl
    from quire.platforms.base import Platform
    from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.1
"""Least time between two samples under load…"""
END_SAMPLE_SECONDS = 0.01
"""…and if a request has ended, whose share is to be exact."""
READ_SHARE = 1 / 500
"""Share of the time that reading the meter may take: one that is slow is read less often, at least…"""
LONGEST_GAP_SECONDS = 2.0
"""…this often."""
IDLE_SECONDS = 30.0
"""Time between samples of an idle engine: counters must not start again unseen."""
TEMPERATURE_SECONDS = 2.0
BATTERY_SECONDS = 5.0
FIRST_REQUEST_STEPS = 32.0
"""Steps of a request, before any has ended."""
NEWEST_WEIGHT = 0.2
ON_MAINS, ON_BATTERY = "performance", "saver"
"""Policies of a machine with a battery, if none is configured."""


class Temperature(Protocol):
    """How far the device is below its limit."""

    def headroom(self) -> float | None: ...


class NoEnergy:
    """Nothing is metered, no step is held back."""

    is_on = False

    def arrived(self) -> None: ...

    def launched(self) -> None: ...

    def collected(self, requests: Sequence[Request], counts: Sequence[int], num_decodes: int) -> None: ...

    def forget_in_flight(self) -> None: ...

    def finish(self, outputs: StepOutputs) -> None: ...

    def hold(self) -> float:
        return 0.0

    def wait(self, seconds: float, wakes: Sequence[int]) -> None: ...

    def tick_idle(self) -> float | None:
        return None

    def metrics(self) -> list[Metric]:
        return []

    def close(self) -> None: ...


class EngineEnergy:
    """Meters an engine's steps. Called around steps; reads files and counters a few times a second at most."""

    is_on = True

    def __init__(
        self,
        scheduler: Scheduler,
        meter: Meter,
        policy: EnergyPolicy | None = None,
        budget: float | None = None,
        reports: bool = True,
        temperature: Temperature | None = None,
        paces: bool = True,
        control: GpuControl | None = None,
        context: MeterContext = MeterContext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: None: chosen by whether the machine is on its battery. `reports`: whether outputs say how much
        energy requests took. `paces`: whether steps may be held back, also because of the temperature. `context`: of an
        estimate, if the meter fails."""
        self.account = EnergyAccount()
        self.controller = PowerController(budget)
        self.held = {"budget": 0.0, "temperature": 0.0, "policy": 0.0}
        """Seconds that steps were held back, by reason."""
        self.busy = 0.0
        """Seconds of steps."""
        self._scheduler = scheduler
        self._meter = meter
        self._offset = self._last_reading = 0.0
        self._reports = reports
        self._temperature = temperature
        self._paces = paces
        self._control = control
        self._context = context
        self._clock = clock
        self._follows_battery = policy is None
        self._policy = policy or make_energy_policy(ON_BATTERY if on_battery() else ON_MAINS)
        self._launched: deque[float] = deque()
        """When the steps in flight were launched."""
        self._collected_at = self._begun_at = -math.inf
        self._step_seconds = 0.0
        self._not_before = -math.inf
        """Budget and temperature allow no step before."""
        self._hold_reason = "budget"
        self._gathering_since: float | None = None
        self._arrived_at: float | None = None
        self._arrival_gap = math.inf
        self._sampled_at = self._felt_at = self._looked_at = -math.inf
        self._read_seconds = LONGEST_HOLD_SECONDS
        self._headroom: float | None = None
        self._is_warned = False
        self.gpu_limit: float | None = None
        """What the cards were limited to, in watts."""
        if control is not None and budget is not None:
            self.gpu_limit = control.limit(budget)
        self._set_policy(self._policy)
        self.sample()

    def describe(self) -> str:
        """What is metered and how, for the log."""
        kind = "estimated" if self._meter.is_estimate else "measured"
        budget = "" if self.controller.budget is None else f", budget {self.controller.budget:g} W"
        return f"energy is {kind} ({self._meter.source}); policy {self._policy.name}{budget}"

    # Requests and steps

    def arrived(self) -> None:
        """A request was added."""
        now = self._clock()
        if self._arrived_at is not None:
            gap = now - self._arrived_at
            is_first = math.isinf(self._arrival_gap)
            self._arrival_gap = gap if is_first else self._arrival_gap + NEWEST_WEIGHT * (gap - self._arrival_gap)
        self._arrived_at = now
        if self._gathering_since is None:
            self._gathering_since = now

    def launched(self) -> None:
        """A step is launched."""
        now = self._clock()
        if not self._launched and now - self._sampled_at >= SAMPLE_SECONDS:
            self.sample()  # what was used before it is idle
            now = self._clock()
        self._launched.append(now)
        self._begun_at = now
        self._gathering_since = None

    def collected(self, requests: Sequence[Request], counts: Sequence[int], num_decodes: int) -> None:
        """The oldest step has been computed; `requests` computed `counts` tokens each, decodes first."""
        now = self._clock()
        seconds = now - max(self._launched.popleft(), self._collected_at)
        self._collected_at = now
        self.busy += seconds
        self._step_seconds = seconds
        is_open = [one.state is not RequestState.FINISHED for one in requests]
        self.account.step([one.id for one in requests], counts, num_decodes, seconds, None if all(is_open) else is_open)
        account, controller = self.account, self.controller
        hold = controller.hold(seconds, account.step_watts, account.idle_watts)
        self._hold_reason = "temperature" if controller.duty < 1 and not controller.debt > 0 else "budget"
        self._not_before = min(max(self._not_before, now) + hold, now + LONGEST_HOLD_SECONDS)
        self._sample_after(SAMPLE_SECONDS, now)

    def forget_in_flight(self) -> None:
        """Steps in flight were dropped."""
        self._launched.clear()

    def finish(self, outputs: StepOutputs) -> None:
        """Add the energy of requests to a step's outputs."""
        if outputs.is_empty:
            return
        if outputs.finished:
            if self.account.busy_watts is None or not self._scheduler.unfinished:
                self.sample()  # no other request could be charged what the prediction gets wrong
            else:
                self._sample_after(END_SAMPLE_SECONDS, self._clock())
        charged, joules = self.account.take()
        if self._reports and charged:
            outputs.energy = StepEnergy(charged, joules, self._meter.source, self._meter.is_estimate)
        if outputs.finished:
            open_sequences = self._scheduler.requests.sequences
            self.account.end([end.key[0] for end in outputs.finished if not open_sequences(end.key[0])])

    # Holding steps back

    def hold(self) -> float:
        """Seconds until a step may be launched; 0: now."""
        if not self._paces:
            return 0.0
        now = self._clock()
        scheduler = self._scheduler
        stats = scheduler.stats
        load = Load(
            running=scheduler.rows.used,
            waiting=scheduler.waiting,
            waited=0.0 if self._gathering_since is None else now - self._gathering_since,
            step_seconds=self._step_seconds,
            arrival_gap=max(self._arrival_gap, now - (now if self._arrived_at is None else self._arrived_at)),
            request_steps=stats.generated_tokens / stats.finished if stats.finished else FIRST_REQUEST_STEPS,
            max_rows=scheduler.rows.size,
        )
        until = self._begun_at + min(LONGEST_HOLD_SECONDS, self._policy.step_interval(load))
        if self._gathering_since is not None and not load.running and load.waiting:
            until = max(until, self._gathering_since + min(LONGEST_HOLD_SECONDS, self._policy.gather_seconds(load)))
        return max(0.0, max(until, self._not_before) - now)

    def wait(self, seconds: float, wakes: Sequence[int]) -> None:
        """Sleep; messages wake it."""
        begin = self._clock()
        reason = self._hold_reason if self._not_before > begin else "policy"
        if wakes:
            poll = select.poll()
            for each in wakes:
                poll.register(each, select.POLLIN)
            poll.poll(math.ceil(1000 * seconds))
        else:
            time.sleep(seconds)
        self.held[reason] += self._clock() - begin

    # Sampling

    def _sample_after(self, seconds: float, now: float) -> None:
        if now - self._sampled_at >= max(seconds, min(LONGEST_GAP_SECONDS, self._read_seconds / READ_SHARE)):
            self.sample()

    def sample(self) -> None:
        """Read the meter; now and then also the temperature and whether the machine is on its battery."""
        begin = self._clock()
        before, since = self._last_reading, self._sampled_at
        self._last_reading = self._read()
        now = self._clock()
        self._read_seconds = min(now - begin, 0.9 * self._read_seconds + 0.1 * (now - begin))
        self._sampled_at = now
        self.account.sample(self._last_reading, now)
        if math.isfinite(since):
            self.controller.sample(now - since, self._last_reading - before)
        if self._temperature is not None and now - self._felt_at >= TEMPERATURE_SECONDS:
            self._felt_at = now
            self._headroom = self._temperature.headroom()
            self.controller.warm(self._headroom)
        if self._follows_battery and now - self._looked_at >= BATTERY_SECONDS:
            self._looked_at = now
            wanted = ON_BATTERY if on_battery() else ON_MAINS
            if wanted != self._policy.name:
                logger.info("energy policy %s: %s", wanted, "on battery" if wanted == ON_BATTERY else "on mains")
                self._set_policy(make_energy_policy(wanted))
        if not self._is_warned and self.controller.is_unreachable(self.account.idle_watts):
            self._is_warned = True
            logger.warning(
                "the power budget of %g W cannot be held: the device draws %.1f W when idle; steps are %g s apart",
                self.controller.budget, self.account.idle_watts, LONGEST_HOLD_SECONDS,
            )  # fmt: skip

    def _read(self) -> float:
        try:
            return self._offset + self._meter.read()
        except MeterError as error:
            self._offset = self._last_reading
            self._meter = Estimate(self._context)
            logger.warning("energy is estimated from now on (%s): %s", self._meter.describe(), error)
            return self._offset + self._meter.read()

    def _set_policy(self, policy: EnergyPolicy) -> None:
        self._policy = policy
        if self._control is not None:
            self._control.slow(policy.saves)

    def tick_idle(self) -> float:
        """While idle: sample. Returns after how many seconds to call this again."""
        left = IDLE_SECONDS - (self._clock() - self._sampled_at)
        if left > 0 and self._sampled_at >= self._collected_at:
            return left
        self.sample()
        return IDLE_SECONDS

    def metrics(self) -> list[Metric]:
        """Joules, power, and what was done about it."""
        self._sample_after(SAMPLE_SECONDS, self._clock())
        account, controller = self.account, self.controller
        estimated = float(self._meter.is_estimate)
        kinds = {"prompt": account.prompt, "decode": account.decode, "idle": account.idle}
        metrics = [
            labelled_metric("energy_joules", account.total, kinds),
            labelled_metric("energy_estimated", estimated, {self._meter.source: estimated}),
            labelled_metric("power_watts", controller.average),
            labelled_metric("power_budget_watts", controller.budget or 0.0),
            labelled_metric("energy_held_seconds", sum(self.held.values()), self.held),
            labelled_metric("energy_policy", 1.0, {self._policy.name: 1.0}),
        ]
        if account.idle_watts is not None:
            metrics.append(labelled_metric("power_idle_watts", account.idle_watts))
        if self._headroom is not None:
            metrics.append(labelled_metric("temperature_headroom_celsius", self._headroom))
        if self.gpu_limit is not None:
            metrics.append(labelled_metric("gpu_power_limit_watts", self.gpu_limit))
        return metrics

    def close(self) -> None:
        """Put back what was changed on the device."""
        if self._control is not None:
            self._control.restore()
        self._meter.close()


def make_energy(config: EngineConfig, scheduler: Scheduler, platform: Platform) -> EngineEnergy | NoEnergy:
    """The energy part of an engine; nothing unless a setting asks for it, or the machine has a battery."""
    is_wanted = config.report_energy or config.power_budget is not None or config.energy_policy is not None
    if not is_wanted and not has_battery():
        return NoEnergy()
    is_gpu = platform.device.type == "cuda"
    cards = engine_cards(config.num_ranks) if is_gpu else ()
    made: list[EngineEnergy] = []
    context = MeterContext(
        is_gpu, cards, config.num_ranks > 1, lambda: made[0].busy if made else 0.0, config.watts_per_core
    )
    temperature: Temperature = ProcessorTemperature()
    control = None
    if is_gpu:
        from quire.energy.nvml import GpuControl, NvmlTemperature

        try:
            temperature = NvmlTemperature(cards)
            control = GpuControl(cards) if config.allow_gpu_power_control else None
        except MeterError as error:
            logger.warning("the GPU's temperature is not watched: %s", error)
    energy = EngineEnergy(
        scheduler,
        make_meter(config.energy_meter, context),
        None if config.energy_policy is None else make_energy_policy(config.energy_policy),
        config.power_budget,
        config.report_energy,
        temperature,
        (config.power_budget is not None or config.energy_policy is not None or has_battery())
        and not config.steps_together,
        control,
        context,
    )
    made.append(energy)
    logger.info("%s", energy.describe())
    return energy


def engine_cards(count: int) -> tuple[str, ...]:
    """The engine's GPUs as NVML knows them."""
    import torch

    found = []
    for number in range(min(count, torch.cuda.device_count())):
        uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        by_order = visible[number].strip() if number < len(visible) and visible[number].strip() else str(number)
        found.append(by_order if uuid is None else f"GPU-{uuid}")
    return tuple(found)
