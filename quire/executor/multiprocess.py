"""The executor `mp`: the model split over processes, all of which run every plan. The executor `ray` uses it too.

Plans go to every rank as bytes over a socket. The first rank of the last stage returns the result, the others of that
stage a checksum of their tokens, and the stages before just that they are done. The engine's own process computes
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from quire import errors
from quire.config import EngineConfig
from quire.distributed.groups import shares_gpu
from quire.distributed.process_group import loopback_environment
from quire.errors import ConfigError, EngineDeadError, QuireError, StepError, StepMemoryError
from quire.executor import wire
from quire.executor.base import ExecutorSpec, StartedExecutor
from quire.executor.child import child_context
from quire.executor.estimate import estimate_needs
from quire.executor.expert_balance import ExpertBalance
from quire.executor.links import RankLinks, StartedRanks
from quire.executor.processes import RankProcesses
from quire.messages.experts import Rebalanced
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import AdapterLoaded, MovesDone, StepMasks, StepPlan, StepResult, decode_result, encode
from quire.messages.shared_memory import map_shared
from quire.paths import child_environment
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.worker.memory import MemoryPlan
from quire.worker.moves import HostTierInfo

FAILURE_SECONDS = 5.0
"""After one rank failed a step, how long the others of its stage may take to report the same. After that they are taken
to wait in a collective that it never joins."""
IDLE_CHECK_SECONDS = 1.0
"""How often idle ranks are checked."""


class MultiprocessExecutor:
    """Runs plans on all ranks. When one rank is lost all are: make another executor."""

    lockstep = None

    def __init__(self, spec: ExecutorSpec, ranks: StartedRanks) -> None:
        """Waits until the ranks have loaded and allocated their caches; raises the error of a rank that could not."""
        config = spec.config
        self._stage_size = config.tensor_parallel_size
        self._ranks = RankLinks(ranks)
        self._loaded: dict[int, wire.WeightsLoaded] = {}
        self._ready: dict[int, wire.RankReady] = {}
        self._answers: dict[int, dict[int, wire.Done | wire.StepFailed]] = {}
        """By step, then by rank."""
        self._moves: dict[int, list[MovesDone]] = {}
        """By step: its transfers between tiers, of the ranks that have completed them."""
        self._loads: dict[tuple[int, bytes], dict[int, AdapterLoaded]] = {}
        """By slot and content: loads of adapters, of the ranks that have ended them."""
        self._counts: dict[int, Mapping[int, Sequence[int]]] = {}
        self._memory: dict[int, MemoryUse] = {}
        """What each rank reported last."""
        self._is_dense = False
        """The model has no experts in any stage: ranks need not be queried again."""
        self._placed: set[int] = set()
        self.balance: ExpertBalance | None = None
        if config.enable_expert_parallel and config.expert_ranks > 1:
            self.balance = ExpertBalance.from_config(config)
        try:
            self._load(spec)
            self._make_caches(share_host=config.kv_disk is not None)
        except errors.RankLostError as error:
            raise EngineDeadError(f"{error}, before it was ready") from error
        except BaseException:
            ranks.kill()
            raise

    def _load(self, spec: ExecutorSpec) -> None:
        ranks, limits = self._ranks.ranks, spec.limits
        context = child_context(spec.config, spec.files)
        if not ranks.on_this_machine:
            context["import_path"] = []
        starts = [
            wire.StartRank(
                **context, rank=rank, size=len(self._ranks), rendezvous=ranks.rendezvous,
                **dataclasses.asdict(resources),
                max_model_len=limits.model_len, max_rows=limits.rows, max_tokens=limits.tokens,
            )
            for rank, resources in enumerate(ranks.resources)
        ]  # fmt: skip
        self._ranks.send_bytes([wire.encode(start) for start in starts], watch=False)
        self._ranks.receive(lambda: len(self._loaded) == len(self._ranks), self._handle, watch=False)

    def _make_caches(self, share_host: bool) -> None:
        self._check_groups()
        # Ranks may have found different amounts of free memory; all of them have the same blocks.
        self._num_blocks = min(int(loaded.memory["num_blocks"]) for loaded in self._loaded.values())
        self._host = self._share_host() if share_host else None
        shares = [None] * len(self._ranks) if self._host is None else self._host.shares
        messages = [wire.encode(wire.MakeCache(self._num_blocks, share)) for share in shares]
        self._ranks.send_bytes(messages, watch=False)
        self._ranks.receive(lambda: len(self._ready) == len(self._ranks), self._handle, watch=False)

    def _check_groups(self) -> None:
        """One plan is for all ranks: their block tables must have the same groups."""
        for rank, loaded in self._loaded.items():
            if loaded.groups != self._loaded[0].groups:
                raise EngineDeadError(
                    f"rank {rank} has the cache groups {loaded.groups}, and rank 0 {self._loaded[0].groups}"
                )

    def _share_host(self) -> SharedHostMemory | None:
        """Host memory of all ranks, mapped here too for the disk tier."""
        file = self._ranks.ranks.host_file
        loaded = [self._loaded[rank] for rank in range(len(self._ranks))]
        slots = min(each.host_slots for each in loaded)
        if file is None or not slots:
            return None
        return SharedHostMemory(file, slots, [each.slot_bytes for each in loaded])

    # What the ranks have

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._ranks.pids

    def started(self) -> StartedExecutor:
        """This executor, with the sizes its ranks reported."""
        first, plans = self._loaded[0], [loaded.memory for loaded in self._loaded.values()]
        return StartedExecutor(
            executor=self,
            memory=self._first_memory(),
            device=f"{len(self._ranks)} × {first.device}",
            dtype=first.dtype,
            weight_bytes=sum(loaded.weight_bytes for loaded in self._loaded.values()),
            cache_bytes=sum(self._num_blocks * (plan["cache"] // plan["num_blocks"]) for plan in plans),
            reads_groups=first.reads_groups,
            groups=first.groups,
            drafts=first.drafts,
            encoder=first.encoder,
            layout="|".join(filter(None, (self._loaded[rank].layout for rank in sorted(self._loaded)))),
            host_room=self._host_room(),
            phases=first.phases,
        )

    def _first_memory(self) -> MemoryPlan:
        """Memory of the first rank's device, with the number of blocks all ranks agreed on."""
        plan = MemoryPlan(**self._loaded[0].memory)
        block_bytes = plan.cache // plan.num_blocks
        return dataclasses.replace(plan, cache=self._num_blocks * block_bytes, num_blocks=self._num_blocks)

    def _host_room(self) -> HostTierInfo | None:
        """The ranks' host tiers as one: each keeps its part of a block in the same slot."""
        rooms = list(self._ready.values())
        slots = min(room.host_slots for room in rooms)
        if not slots:
            return None
        out, back = min(room.out_rate for room in rooms), min(room.back_rate for room in rooms)
        slot = None if self._host is None else self._host.slot
        return HostTierInfo(slots, sum(room.slot_bytes for room in rooms), len(rooms) * out, len(rooms) * back, slot)

    # Steps

    def submit(self, plan: StepPlan) -> int:
        if plan.reset:
            self._moves.clear()
            self._loads.clear()
        if self.balance is not None and self.balance.is_due():
            self.rebalance_experts()
        self._ranks.send(wire.Step(encode(plan)))
        return plan.step

    def supply(self, handle: int, masks: StepMasks) -> None:
        self._ranks.send(wire.Supply(encode(masks)))

    def collect(self, handle: int) -> StepResult:
        answers = self._answers.setdefault(handle, {})
        failed_at: float | None = None

        def is_over() -> bool:
            nonlocal failed_at
            if len(answers) == len(self._ranks):
                return True
            if not self._has_split_stage(answers):
                failed_at = None
                return False
            failed_at = time.monotonic() if failed_at is None else failed_at
            return time.monotonic() - failed_at > FAILURE_SECONDS

        self._ranks.receive(is_over, self._handle)
        for step in [step for step in self._answers if step <= handle]:
            del self._answers[step]  # earlier ones are of steps that the loop dropped
        if any(isinstance(answer, wire.StepFailed) for answer in answers.values()):
            raise self._failure(answers)
        return self._result(handle, answers)

    def _has_split_stage(self, answers: Mapping[int, wire.Done | wire.StepFailed]) -> bool:
        """Whether a rank has failed and another of its stage has not answered. Other stages do not wait for the failed
        rank, and may take as long as they need."""
        answered = Counter(rank // self._stage_size for rank in answers)
        failed = {rank // self._stage_size for rank, answer in answers.items() if isinstance(answer, wire.StepFailed)}
        return any(answered[stage] < self._stage_size for stage in failed)

    def _failure(self, answers: Mapping[int, wire.Done | wire.StepFailed]) -> StepError:
        """The error for the loop. The ranks stay usable if all of each failed stage failed at the same collective."""
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, wire.StepFailed)}
        rank, first = min(failures.items())
        message = f"rank {rank} of {len(self._ranks)}: {first.message}"
        kinds = [_error_class(failed.error) for failed in failures.values()]
        is_lost = any(issubclass(kind, errors.DeviceLostError) for kind in kinds)
        if is_lost or len(answers) < len(self._ranks) or not self._are_in_sync(failures):
            return self._ranks.lose(message)
        no_memory = any(issubclass(kind, StepMemoryError) for kind in kinds)
        return StepMemoryError(message) if no_memory else StepError(message)

    def _are_in_sync(self, failures: Mapping[int, wire.StepFailed]) -> bool:
        """Whether all ranks of each failed stage have failed, after the same number of collectives."""
        stages: dict[int, list[int]] = {}
        for rank, failed in failures.items():
            stages.setdefault(rank // self._stage_size, []).append(failed.collectives)
        return all(len(started) == self._stage_size and len(set(started)) == 1 for started in stages.values())

    def _result(self, step: int, answers: Mapping[int, wire.Done | wire.StepFailed]) -> StepResult:
        """The result of the first rank of the last stage. Raises if other ranks sampled other tokens."""
        done = {rank: answer for rank, answer in answers.items() if isinstance(answer, wire.Done)}
        first = len(self._ranks) - self._stage_size  # of the last stage, which samples
        differing = [
            rank for rank, answer in done.items() if rank > first and answer.tokens_crc != done[first].tokens_crc
        ]
        if differing:
            raise self._ranks.lose(f"rank {differing[0]} sampled other tokens in step {step} than rank {first}")
        result = decode_result(done[first].result)
        for answer in done.values():
            for move in answer.moves_done:
                self._moves.setdefault(move.step, []).append(move)
        for moved, parts in list(self._moves.items()):
            if len(parts) == len(self._ranks):
                del self._moves[moved]
                seconds = (max(part.out_seconds for part in parts), max(part.back_seconds for part in parts))
                result.moves_done.append(MovesDone(moved, *seconds))
        for rank, answer in done.items():
            for load in answer.adapters_done:
                self._loads.setdefault((load.slot, load.key), {})[rank] = load
        for key, loads in list(self._loads.items()):
            if len(loads) == len(self._ranks):
                del self._loads[key]
                error = next((load.error for load in loads.values() if load.error), "")
                result.adapters_done.append(AdapterLoaded(*key, error))
        return result

    # Experts

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        if self._is_dense:
            return {}
        try:
            counts = self._count_experts()
            self._is_dense = not counts
            return counts
        except errors.RankLostError:  # the next `collect` raises it
            return {}

    def _count_experts(self) -> Mapping[int, Sequence[int]]:
        self._counts.clear()
        self._ranks.send(wire.CountExperts())
        self._ranks.receive(lambda: len(self._counts) == len(self._ranks), self._handle)
        # Ranks of a stage have the same layers, and see all tokens.
        return {layer: counts for _, each in sorted(self._counts.items()) for layer, counts in each.items()}

    def memory_use(self) -> MemoryUse | None:
        return MemoryUse.tightest(self._memory.values())

    def rebalance_experts(self) -> Rebalanced | None:
        """Between two steps, move experts to balance the load since the last rebalance. Waits for launched steps."""
        if self.balance is None:
            return None
        counts = self._count_experts()
        placements, outcome = self.balance.plan(counts)
        if placements:
            slots = {layer: [list(held) for held in placement.slots] for layer, placement in placements.items()}
            self._placed.clear()
            self._ranks.send(wire.PlaceExperts(slots))
            self._ranks.receive(lambda: len(self._placed) == len(self._ranks), self._handle)
        self.balance.commit(placements, counts)
        return outcome

    # Ranks

    def check(self) -> float:
        self._ranks.poll(self._handle)
        return IDLE_CHECK_SECONDS

    def give_up(self, message: str) -> None:
        self._ranks.given_up = message

    def shutdown(self) -> None:
        self._ranks.stop()

    def _handle(self, rank: int, message: wire.Up) -> None:
        match message:
            case wire.Done(step=step) | wire.StepFailed(step=step):
                self._answers.setdefault(step, {})[rank] = message
                if isinstance(message, wire.Done) and message.memory is not None:
                    self._memory[rank] = message.memory
            case wire.WeightsLoaded():
                self._loaded[rank] = message
            case wire.RankReady():
                self._ready[rank] = message
            case wire.ExpertCounts(counts=counts):
                self._counts[rank] = counts
            case wire.Placed():
                self._placed.add(rank)
            case wire.StartRefused():
                raise _start_error(message, rank, len(self._ranks))


class SharedHostMemory:
    """Host memory of the ranks, mapped by the engine: each slot holds the ranks' parts of a block one after another."""

    def __init__(self, file: int, slots: int, parts: Sequence[int]) -> None:
        """`file`: an empty file that all ranks have open. `parts`: the bytes of each rank's part."""
        self._slot_bytes = sum(parts)
        os.truncate(file, slots * self._slot_bytes)
        # Never closed: the disk's threads may be copying a slot. The mapping goes with its last reference.
        self._data = memoryview(map_shared(os.dup(file)))
        offsets = [sum(parts[:rank]) for rank in range(len(parts))]
        self.shares = [wire.HostShare(slots, self._slot_bytes, offset) for offset in offsets]
        """For each rank."""

    def slot(self, number: int) -> memoryview:
        """A slot's bytes."""
        return self._data[number * self._slot_bytes : (number + 1) * self._slot_bytes]


def _error_class(name: str) -> type[QuireError]:
    return type(errors.error_by_name(name, "") or StepError())


def _start_error(refused: wire.StartRefused, rank: int, size: int) -> QuireError:
    """The error that kept a rank from starting."""
    return errors.error_by_name(refused.error, refused.message, refused.parameter) or EngineDeadError(
        f"rank {rank} of {size} could not start: {refused.error}: {refused.message}"
    )


class MultiprocessBackend:
    """Starts a process for each rank on this machine."""

    uses_local_devices = True

    def choose_platform(self, config: EngineConfig) -> Platform:
        return choose(config.device)

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        config, platform = spec.config, spec.platform
        # A model that cannot be split, or does not fit, is refused before any process is started.
        needs = estimate_needs(config, spec.files, spec.model, platform, spec.limits)
        _check_devices(config, platform)
        needs.check_weights(config, platform, platform.free_memory())
        size = config.num_ranks
        threads = max(1, torch.get_num_threads() // size)
        environment = loopback_environment({**child_environment(), "OMP_NUM_THREADS": str(threads)})
        return MultiprocessExecutor(spec, RankProcesses(size, threads, environment)).started()


def _check_devices(config: EngineConfig, platform: Platform) -> None:
    size = config.num_ranks
    if shares_gpu() or platform.device.type != "cuda" or size <= torch.cuda.device_count():
        return
    names = [n for n in ("tensor_parallel_size", "pipeline_parallel_size") if getattr(config, n) > 1]
    sizes = " and ".join(f"{name} is {getattr(config, name)}" for name in names)
    raise ConfigError(
        f"{sizes}, and this machine shows {torch.cuda.device_count()} GPUs; lower it, or check CUDA_VISIBLE_DEVICES",
        names[0] if names else "tensor_parallel_size",
        size,
    )
