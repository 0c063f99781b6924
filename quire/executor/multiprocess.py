"""The executors `mp` and `ray`: the model cut over processes, here or on other machines, all of which run every plan.

Plans go to every rank as bytes over a socket. The result of the last stage's first rank comes back, from the others
of that stage that they drew the same, and from the stages before that they are done. The engine's own process computes
nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from quire import errors
from quire.config import EngineConfig
from quire.distributed.world import one_machine
from quire.errors import EngineDeadError, QuireError, StepError, StepMemoryError
from quire.executor import wire
from quire.executor.child import surroundings
from quire.executor.expert_balance import ExpertBalance
from quire.executor.host import EngineHost
from quire.executor.links import RankLinks, StartedRanks
from quire.executor.processes import RankProcesses
from quire.loading.files import ModelFiles
from quire.messages.experts import Rebalanced
from quire.messages.plan import MovesDone, StepMasks, StepPlan, StepResult, decode_result, encode
from quire.paths import child_environment
from quire.worker.memory import MemoryPlan
from quire.worker.moves import HostTierInfo

FAILURE_SECONDS = 5.0
"""After one rank failed a step the others of its stage have so long to say that they did too; else they wait for it for
ever."""
CHECK_SECONDS = 1.0
"""So often somebody should look after ranks that have nothing to do."""


class MultiprocessExecutor:
    """Runs plans on all ranks. One rank lost is all lost: make another executor."""

    lockstep = None

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        max_model_len: int,
        max_rows: int,
        max_tokens: int,
        ranks: StartedRanks | None = None,
    ) -> None:
        """Waits until the ranks are loaded and have their caches; raises what kept one from that.

        `ranks`: those that were started elsewhere; else they are started here.
        """
        size = config.num_ranks
        self._stage_size = config.tensor_parallel_size
        told = surroundings(config, files)
        self._ranks = RankLinks(_start_processes(size) if ranks is None else ranks)
        if ranks is not None:
            told["import_path"] = []
        self._loaded: dict[int, wire.WeightsLoaded] = {}
        self._ready: dict[int, wire.RankReady] = {}
        self._answers: dict[int, dict[int, wire.Done | wire.StepFailed]] = {}
        """By step, then by rank."""
        self._moves: dict[int, list[MovesDone]] = {}
        """Moves that some ranks have done."""
        self._counts: dict[int, Mapping[int, Sequence[int]]] = {}
        self._is_dense = False
        """There are no experts, in any stage: nobody is asked for them again."""
        self._placed: set[int] = set()
        self.balance: ExpertBalance | None = None
        """Of whole experts over the ranks of a stage, where they are so."""
        if config.enable_expert_parallel and config.expert_ranks > 1:
            self.balance = ExpertBalance.of(config)
        try:
            starts = [
                wire.StartRank(
                    **told, rank=rank, size=size, rendezvous=self._ranks.ranks.rendezvous, **dataclasses.asdict(place),
                    max_model_len=max_model_len, max_rows=max_rows, max_tokens=max_tokens,
                )
                for rank, place in enumerate(self._ranks.ranks.places)
            ]  # fmt: skip
            self._ranks.send_bytes([wire.encode(start) for start in starts], watch=False)
            self._ranks.receive(lambda: len(self._loaded) == size, self._take, watch=False)
            # Ranks may have found different amounts of free memory; blocks are the same everywhere.
            self.num_blocks = min(int(loaded.memory["num_blocks"]) for loaded in self._loaded.values())
            self._host = None if config.kv_disk is None else self._share_host()
            shares = [None] * size if self._host is None else self._host.shares
            caches = [wire.encode(wire.MakeCache(self.num_blocks, share)) for share in shares]
            self._ranks.send_bytes(caches, watch=False)
            self._ranks.receive(lambda: len(self._ready) == size, self._take, watch=False)
        except errors.RankLostError as error:
            raise EngineDeadError(f"{error}, before it was ready") from error
        except BaseException:
            self._ranks.end()
            raise

    def _share_host(self) -> EngineHost | None:
        """Host memory of all ranks that this process sees, for the disk below it."""
        file = self._ranks.ranks.host_file
        loaded = [self._loaded[rank] for rank in range(len(self._ranks))]
        slots = min(each.host_slots for each in loaded)
        return None if file is None or not slots else EngineHost(file, slots, [each.slot_bytes for each in loaded])

    # What the ranks turned out to be

    @property
    def first(self) -> wire.WeightsLoaded:
        """What the first rank said of itself."""
        return self._loaded[0]

    @property
    def device(self) -> str:
        return f"{len(self._ranks)} × {self.first.device}"

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._ranks.pids

    @property
    def weight_bytes(self) -> int:
        """What all ranks hold together."""
        return sum(loaded.weight_bytes for loaded in self._loaded.values())

    @property
    def memory(self) -> MemoryPlan:
        """Where the memory of the first rank's device goes."""
        plan = MemoryPlan(**self.first.memory)
        block_bytes = plan.cache // plan.num_blocks
        return dataclasses.replace(plan, cache=self.num_blocks * block_bytes, num_blocks=self.num_blocks)

    @property
    def cache_bytes(self) -> int:
        """The caches of all ranks."""
        plans = [loaded.memory for loaded in self._loaded.values()]
        return sum(self.num_blocks * (plan["cache"] // plan["num_blocks"]) for plan in plans)

    @property
    def host_room(self) -> HostTierInfo | None:
        """The ranks' tiers in host memory as one: each keeps its part of a block in the same slot."""
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

        self._ranks.receive(is_over, self._take)
        for step in [step for step in self._answers if step <= handle]:
            del self._answers[step]  # those before are of steps that were given up
        if any(isinstance(answer, wire.StepFailed) for answer in answers.values()):
            raise self._failure(answers)
        return self._result(handle, answers)

    def _has_split_stage(self, answers: Mapping[int, wire.Done | wire.StepFailed]) -> bool:
        """Whether a rank has failed, and another of its stage is still on its way. Other stages wait for nobody who
        failed, and may take as long as they do."""
        answered = Counter(rank // self._stage_size for rank in answers)
        failed = {rank // self._stage_size for rank, answer in answers.items() if isinstance(answer, wire.StepFailed)}
        return any(answered[stage] < self._stage_size for stage in failed)

    def _failure(self, answers: Mapping[int, wire.Done | wire.StepFailed]) -> StepError:
        """What the loop is to make of it. A stage whose ranks all failed in the same place can go on."""
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, wire.StepFailed)}
        rank, first = next(iter(sorted(failures.items())))
        said = f"rank {rank} of {len(self._ranks)}: {first.message}"
        lost = any(issubclass(_kind(each.error), errors.DeviceLostError) for each in failures.values())
        if lost or len(answers) < len(self._ranks) or not self._are_together(failures):
            return self._ranks.lose(said)
        no_memory = any(issubclass(_kind(each.error), StepMemoryError) for each in failures.values())
        return StepMemoryError(said) if no_memory else StepError(said)

    def _are_together(self, failures: Mapping[int, wire.StepFailed]) -> bool:
        """Whether no rank of a stage is where the others of it are not."""
        stages: dict[int, list[int]] = {}
        for rank, failed in failures.items():
            stages.setdefault(rank // self._stage_size, []).append(failed.collectives)
        return all(len(calls) == self._stage_size and len(set(calls)) == 1 for calls in stages.values())

    def _result(self, step: int, answers: Mapping[int, wire.Done | wire.StepFailed]) -> StepResult:
        done = {rank: answer for rank, answer in answers.items() if isinstance(answer, wire.Done)}
        first = len(self._ranks) - self._stage_size  # of the last stage, which draws
        strange = [rank for rank, answer in done.items() if rank > first and answer.drawn != done[first].drawn]
        if strange:
            raise self._ranks.lose(f"rank {strange[0]} drew other tokens in step {step} than rank {first}")
        result = decode_result(done[first].result)
        for answer in done.values():
            for move in answer.moves_done:
                self._moves.setdefault(move.step, []).append(move)
        for moved, parts in list(self._moves.items()):
            if len(parts) == len(self._ranks):
                del self._moves[moved]
                seconds = (max(part.out_seconds for part in parts), max(part.back_seconds for part in parts))
                result.moves_done.append(MovesDone(moved, *seconds))
        return result

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        if self._is_dense:
            return {}
        try:
            counts = self._count_experts()
            self._is_dense = not counts
            return counts
        except errors.RankLostError:  # who waits for a step will tell
            return {}

    def _count_experts(self) -> Mapping[int, Sequence[int]]:
        self._counts.clear()
        self._ranks.send(wire.CountExperts())
        self._ranks.receive(lambda: len(self._counts) == len(self._ranks), self._take)
        # Ranks of a stage have the same layers, and see all tokens.
        return {layer: counts for _, each in sorted(self._counts.items()) for layer, counts in each.items()}

    def rebalance_experts(self) -> Rebalanced | None:
        """Between two steps, move experts to where the load since the last time says they had better be.

        Steps that were launched before are waited for.
        """
        if self.balance is None:
            return None
        counts = self._count_experts()
        placements, outcome = self.balance.plan(counts)
        if placements:
            slots = {layer: [list(held) for held in placement.slots] for layer, placement in placements.items()}
            self._placed.clear()
            self._ranks.send(wire.PlaceExperts(slots))
            self._ranks.receive(lambda: len(self._placed) == len(self._ranks), self._take)
        self.balance.commit(placements, counts)
        return outcome

    def check(self) -> float:
        """Raise RankLostError if a rank has died while nobody waited for it; seconds until one should look again."""
        self._ranks.look(self._take)
        return CHECK_SECONDS

    def give_up(self, message: str) -> None:
        self._ranks.given_up = message

    def shutdown(self) -> None:
        self._ranks.stop()

    def _take(self, rank: int, message: wire.Up) -> None:
        match message:
            case wire.Done(step=step) | wire.StepFailed(step=step):
                self._answers.setdefault(step, {})[rank] = message
            case wire.WeightsLoaded():
                self._loaded[rank] = message
            case wire.RankReady():
                self._ready[rank] = message
            case wire.ExpertCounts(counts=counts):
                self._counts[rank] = counts
            case wire.Placed():
                self._placed.add(rank)
            case wire.StartRefused():
                raise _refusal(message, rank, len(self._ranks))


def _start_processes(size: int) -> RankProcesses:
    threads = max(1, torch.get_num_threads() // size)
    return RankProcesses(size, threads, one_machine({**child_environment(), "OMP_NUM_THREADS": str(threads)}))


def _kind(name: str) -> type[Exception]:
    kind = getattr(errors, name, StepError)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else StepError


def _refusal(refused: wire.StartRefused, rank: int, size: int) -> QuireError:
    """The error that kept a rank from starting."""
    return errors.told(refused.error, refused.message, refused.parameter) or EngineDeadError(
        f"rank {rank} of {size} could not start: {refused.error}: {refused.message}"
    )
