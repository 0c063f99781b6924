"""The protocols of an executor: what the loop calls, and how one is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.executor.expert_balance import ExpertBalance
from quire.messages.caches import FULL, CacheGroup
from quire.messages.experts import Rebalanced
from quire.messages.media import EncoderLimits
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.messages.speculation import DeviceDrafts

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.distributed.lockstep import LockstepAddress
    from quire.loading.files import ModelFiles
    from quire.loading.model_config import ModelConfig
    from quire.platforms.base import Platform
    from quire.worker.memory import MemoryPlan
    from quire.worker.moves import HostTierInfo

SPIN_SECONDS = 0.005
"""A wait for the device polls without sleeping for this long, as the driver's own wait does; Python would not switch
threads sooner either."""
PAUSE_SHARE = 0.01
"""After that it sleeps 1% of the time waited so far: no wait gets longer by more than that."""


def pause_after(waited: float) -> float:
    """Seconds to sleep before polling the device again, after `waited` seconds."""
    return 0.0 if waited < SPIN_SECONDS else min(PAUSE_SHARE * waited, 0.001)


class Executor(Protocol):
    """Runs plans in order. `submit` returns at once; `collect` waits for that step's result.

    A step that samples for a row with a grammar waits for `supply` before it samples; no other step can be submitted
    until then.
    """

    @property
    def balance(self) -> ExpertBalance | None:
        """Placement of experts over ranks; None without expert parallelism."""
        ...

    @property
    def lockstep(self) -> Lockstep | None:
        """This executor, if it runs in lockstep with other engines; else None."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Launch the step; returns a handle."""
        ...

    def supply(self, handle: Any, masks: StepMasks) -> None:
        """Token masks for a step that waits for them; raises StepError like `collect`."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """The step's result; raises StepError if it failed, DeviceLostError if no further step can run."""
        ...

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        """How often each expert was chosen, by layer; empty for a model without experts. Waits for the device."""
        ...

    def rebalance_experts(self) -> Rebalanced | None:
        """Between two steps, move experts to balance the load. None if they cannot be moved."""
        ...

    def memory_use(self) -> MemoryUse | None:
        """Bytes in use now, of the rank with the least free; None if not known. Does not wait for the device."""
        ...

    def check(self) -> float | None:
        """Raise DeviceLostError if a rank has exited while idle; returns seconds until the next check, None: never."""
        ...

    def give_up(self, message: str) -> None:
        """From any thread: a `collect` that still waits raises DeviceLostError with this message."""
        ...

    def shutdown(self) -> None:
        """End all ranks and free their memory."""
        ...


class Lockstep(Executor, Protocol):
    """Runs plans in rounds that all engines sharing the experts make together."""

    @property
    def is_active(self) -> bool:
        """Whether rounds are being made: then there is a step to make, with or without a plan."""
        ...

    def wake(self, number: int) -> None:
        """Request `number`, counted over all engines, has been sent to one of them."""
        ...

    def join_round(self, has_work: bool) -> bool:
        """Take part in a round without a plan. Returns whether a pass was made."""
        ...

    def request_rebalance(self, number: int) -> None:
        """Move experts once all engines have received this request; see `take_rebalanced`."""
        ...

    def take_rebalanced(self) -> list[Rebalanced]:
        """Outcomes of requested rebalances since the last call."""
        ...


@dataclass(frozen=True)
class StepLimits:
    """The longest sequence, and the most rows and tokens of a step."""

    model_len: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class ExecutorSpec:
    """What an executor is started from."""

    config: EngineConfig
    files: ModelFiles
    model: ModelConfig
    platform: Platform
    limits: StepLimits
    lockstep: LockstepAddress | None = None
    """This engine among those in lockstep, if any."""


@dataclass(frozen=True)
class StartedExecutor:
    """An executor with its model loaded and its cache allocated."""

    executor: Executor
    memory: MemoryPlan
    """Memory of the first rank's device."""
    device: str
    dtype: str
    weight_bytes: int
    """Over all ranks, like `cache_bytes`."""
    cache_bytes: int
    reads_groups: bool
    """Whether attention reads a prefix that rows share once for all of them."""
    groups: tuple[CacheGroup, ...] = (FULL,)
    """The model's cache groups."""
    layout: str = ""
    """Names the layout of blocks on all ranks, if it is not that of a plain model: blocks of other layouts must not be
    read."""
    drafts: DeviceDrafts = field(default_factory=DeviceDrafts)
    """What the device does about drafts."""
    encoder: EncoderLimits = field(default_factory=EncoderLimits)
    """What requests may have beside token ids."""
    host_room: HostTierInfo | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds each part of the start took."""


class ExecutorBackend(Protocol):
    """Starts executors of one kind. `distributed_executor_backend` names one; executor/registry.py lists them."""

    uses_local_devices: bool
    """Whether ranks run on this machine's devices, which replicas must then divide among them."""

    def choose_platform(self, config: EngineConfig) -> Platform:
        """The platform the ranks run on."""
        ...

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        """Load the model and allocate the cache; raises if the model does not fit."""
        ...
