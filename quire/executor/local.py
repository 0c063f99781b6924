"""The executor `uni`: the worker in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.groups import shares_gpu
from quire.distributed.lockstep import LockstepAddress, LockstepAgreement
from quire.errors import ConfigError, DeviceLostError, StepError, StepMemoryError
from quire.executor.base import Executor, ExecutorSpec, StartedExecutor, pause_after
from quire.executor.estimate import estimate_needs
from quire.executor.expert_balance import ExpertBalance
from quire.executor.lockstep import LockstepExecutor
from quire.layers.expert_placement import Placement
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.worker.memory import MemoryPlan, is_out_of_memory, measure_memory, no_room
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker

JOIN_SECONDS = 600.0
"""How long engines in lockstep wait for each other while they load, and in steps if `step_timeout` is 0."""


class LocalExecutor:
    """Calls the worker directly. On a GPU `submit` only launches; on a CPU the step is done when it returns."""

    balance = lockstep = None

    def __init__(self, worker: Worker, can_give_up: bool = True) -> None:
        """`can_give_up`: `collect` polls, so that `give_up` can end it; otherwise it is one blocking call."""
        self._worker = worker
        self._can_give_up = can_give_up
        self._given_up = ""
        self._lost = False

    def submit(self, plan: StepPlan) -> PendingStep | StepError:
        try:
            return self._worker.launch(plan)
        except Exception as error:  # of any kind: `collect` raises it
            return self._failure(error)
        finally:
            self._given_up = ""  # the launch took long, but it returned

    def supply(self, handle: Any, masks: StepMasks) -> None:
        if isinstance(handle, StepError):
            return  # `collect` raises it
        try:
            self._worker.supply(handle, masks)
        except Exception as error:  # as in `submit`
            raise self._failure(error) from error

    def collect(self, handle: Any) -> StepResult:
        if isinstance(handle, StepError):
            raise handle
        try:
            if self._can_give_up:
                self._wait(handle)
            return handle.result()
        except StepError:
            raise
        except RuntimeError as error:  # an asynchronous device error is raised by the wait for it
            raise self._failure(error) from error

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        try:
            return {} if self._lost else self._worker.expert_counts()
        except RuntimeError:  # a step has failed on the device: its `collect` raises that
            return {}

    def memory_use(self) -> MemoryUse | None:
        try:
            return None if self._lost else measure_memory()
        except RuntimeError:  # as above
            return None

    def place_experts(self, placements: Mapping[int, Placement]) -> None:
        """Hold these experts from the next step on."""
        self._worker.place_experts(placements)

    def rebalance_experts(self) -> None:
        return None  # a single rank has all experts

    def check(self) -> None:
        return None

    def give_up(self, message: str) -> None:
        self._given_up = message

    def shutdown(self) -> None:
        if not self._lost:  # calls to a lost device fail or hang: the system frees its memory with the process
            self._worker.shutdown()

    def _wait(self, handle: Any) -> None:
        """Polls until the step is done: a wait inside the driver could not be interrupted."""
        begin = time.monotonic()
        self._given_up = ""
        while not handle.ready():
            pause = pause_after(time.monotonic() - begin)
            if not pause:
                continue
            if self._given_up:
                self._lost = True
                raise DeviceLostError(self._given_up)
            time.sleep(pause)
        self._given_up = ""  # the step was slow, but it ended

    def _failure(self, error: Exception) -> StepError:
        """Classifies an error: device lost, out of memory, or a failed step after which the device is usable."""
        message = f"{type(error).__name__}: {_first_line(error)}"
        no_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in message
        # The frames hold the step's tensors, whose memory the next step needs.
        traceback.clear_frames(error.__traceback__)
        failure = StepMemoryError(message) if no_memory else StepError(message)
        if not _device_works(free_memory=no_memory):
            self._lost = True
            failure = DeviceLostError(message)
        failure.__cause__ = error
        return failure


def _device_works(free_memory: bool) -> bool:
    """Whether the device is usable. After a fault inside a kernel every later CUDA call fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        if free_memory:
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


class LocalBackend:
    """Starts a worker in this process, in lockstep with other engines if they share the experts."""

    uses_local_devices = True

    def choose_platform(self, config: EngineConfig) -> Platform:
        return choose(config.device)

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        config, platform = spec.config, spec.platform
        if config.steps_together and spec.lockstep is None:
            raise ConfigError(
                "enable_expert_parallel over replicas needs each in its own process: use AsyncLLM or quire serve",
                "data_parallel_size",
                config.data_parallel_size,
            )
        free_before = platform.free_memory()
        needs = estimate_needs(config, spec.files, spec.model, platform, spec.limits)
        needs.check_weights(config, platform, free_before)
        # Before anything is loaded: on a GPU the first step already exchanges tokens with the other engines.
        agreement = None if spec.lockstep is None else _join_lockstep(platform, spec.lockstep)
        phase = "while the model was loaded and a first step tried"
        try:
            worker = _load(spec)
            memory = worker.needs.plan(config, platform, free_before, platform.free_memory())
            phase = f"with a KV cache of {memory.cache / 2**30:.2f} GiB"
            worker.make_cache(memory.num_blocks)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise no_room(error, needs, platform, phase) from error
        return _started(_executor(config, worker, agreement), worker, memory, platform)


def _load(spec: ExecutorSpec) -> Worker:
    limits = spec.limits
    return Worker(
        spec.config, spec.files, spec.model, spec.platform, limits.model_len, limits.rows, limits.tokens,
        replica=0 if spec.lockstep is None else spec.lockstep.rank,
    )  # fmt: skip


def _join_lockstep(platform: Platform, address: LockstepAddress) -> LockstepAgreement:
    # NCCL refuses several processes on one GPU.
    backend = "gloo" if shares_gpu() else platform.collectives
    return LockstepAgreement(address, backend, JOIN_SECONDS)


def _executor(config: EngineConfig, worker: Worker, agreement: LockstepAgreement | None) -> Executor:
    local = LocalExecutor(worker, can_give_up=config.step_timeout > 0)
    if agreement is None:
        return local
    executor = LockstepExecutor(local, worker, agreement, ExpertBalance.from_config(config))
    if config.step_timeout:  # only now: loading may take longer than a step
        agreement.set_timeout(config.step_timeout)
    return executor


def _started(executor: Executor, worker: Worker, memory: MemoryPlan, platform: Platform) -> StartedExecutor:
    return StartedExecutor(
        executor=executor,
        memory=memory,
        device=platform.describe(),
        dtype=str(worker.needs.dtype),
        weight_bytes=worker.needs.weight_bytes,
        cache_bytes=memory.cache,
        reads_groups=worker.reads_groups,
        groups=worker.needs.groups,
        layout=worker.needs.layout,
        drafts=worker.drafts,
        encoder=worker.limits,
        host_room=None if worker.mover is None else worker.mover.tier_info(),
        phases=worker.phases,
    )
