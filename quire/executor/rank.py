"""A rank's own process: `python -m quire.executor.rank SOCKET PULSE RING HOST RANK SIZE` by `executor/processes.py`.

It loads its part of the model and then does nothing but steps: take plans, run them, tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import socket
import sys
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.distributed.interfaces import use_interface_of
from quire.errors import QuireError, StepError
from quire.executor import child, wire
from quire.executor.base import pause_after
from quire.executor.liveness import beat_over
from quire.executor.pulse import beat
from quire.executor.rank_listener import BEATS, MESSAGES, dial
from quire.executor.shared_ring import RingReader
from quire.layers.expert_placement import Placement
from quire.messages.frames import FrameSplitter
from quire.messages.plan import StepMasks, decode_masks, decode_plan, encode
from quire.messages.shared_memory import map_shared

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.distributed.groups import Ranks
    from quire.executor.local import LocalExecutor
    from quire.platforms.base import Platform
    from quire.worker.moves import HostMemory
    from quire.worker.worker import Worker

logger = logging.getLogger("quire.executor.rank")

JOIN_SECONDS = 600.0
"""So long ranks wait for each other. A dead one is noticed long before, by the engine."""


class RankLink(child.ChildLink):
    """The rank's end of the socket, and of the memory that is shared with the engine, where some is."""

    def __init__(self, sock: socket.socket, ring: RingReader | None = None) -> None:
        super().__init__(sock)
        self._frames = FrameSplitter(wire.LARGEST)
        self._ring = ring

    def send(self, message: wire.Up) -> None:
        """May be called from any thread."""
        self.send_bytes(wire.encode(message))

    def receive(self, seconds: float | None) -> list[wire.Down]:
        """What has come; waits at most so long, None for ever. Raises EOFError when the engine is gone."""
        return [self._decode(each) for each in self.take(seconds)]

    def next(self) -> wire.Down:
        """The next message, waited for."""
        return self._decode(self.first())

    def _decode(self, data: bytes) -> wire.Down:
        message = wire.decode_down(data)
        if not isinstance(message, wire.Shared):
            return message
        if self._ring is None:
            raise RuntimeError("a rank that shares no memory was told to look there")
        return wire.decode_down(self._ring.take(message.at, message.length))


class RankLoop:
    """Plans in, steps, answers out; steps are launched as soon as they come and told in their order."""

    def __init__(self, link: RankLink, worker: Worker, executor: LocalExecutor, ranks: Ranks) -> None:
        self._link, self._worker, self._executor = link, worker, executor
        self._draws = ranks.is_last_stage
        self._reports = ranks.is_last_stage and ranks.tp_rank == 0
        self._launched: deque[tuple[int, Any]] = deque()
        self._waiting_since = 0.0
        self._is_open = True

    def run(self) -> None:
        """Until told to stop."""
        while self._is_open:
            for message in self._link.receive(self._pause()):
                self._take(message)
                self._tell_all()  # before the next step: it may wait long for the stage before
            self._tell_all()

    def _tell_all(self) -> None:
        """Of every step that is over."""
        while self._launched and _is_over(self._launched[0][1]):
            self._tell(*self._launched.popleft())
            self._waiting_since = time.monotonic()

    def _pause(self) -> float | None:
        """How long nothing but a message needs to be looked for."""
        if not self._launched or _waits_for_masks(self._launched[0][1]):
            return None
        return pause_after(time.monotonic() - self._waiting_since)

    def _take(self, message: wire.Down) -> None:
        match message:
            case wire.Step(plan=data):
                plan = decode_plan(data)
                if not self._launched:
                    self._waiting_since = time.monotonic()
                self._launched.append((plan.step, self._executor.submit(plan)))
            case wire.Supply(masks=data):
                if self._draws:
                    self._supply(decode_masks(data))
            case wire.CountExperts():
                counts = {layer: list(map(int, each)) for layer, each in self._executor.expert_counts().items()}
                self._link.send(wire.ExpertCounts(counts))
            case wire.PlaceExperts(placements=placements):
                self._executor.place_experts({layer: Placement.of(slots) for layer, slots in placements.items()})
                self._link.send(wire.Placed())
            case wire.ShutdownRank():
                self._is_open = False
            case _:
                raise RuntimeError(f"a rank that runs was sent {type(message).__name__}")

    def _supply(self, masks: StepMasks) -> None:
        """For the step launched last; for none if that has failed, and been told."""
        if not self._launched or self._launched[-1][0] != masks.step:
            return
        step, handle = self._launched[-1]
        try:
            self._executor.supply(handle, masks)
        except StepError as error:
            self._launched[-1] = (step, error)

    def _tell(self, step: int, handle: Any) -> None:
        from quire.distributed.collectives import calls

        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._link.send(wire.StepFailed(step, type(error).__name__, str(error), calls()))
            return
        moves, result.moves_done = result.moves_done, []
        drawn = zlib.crc32(result.tokens.tobytes())
        self._link.send(wire.Done(step, drawn, moves, encode(result) if self._reports else b""))


def _waits_for_masks(handle: Any) -> bool:
    return not isinstance(handle, StepError) and handle.draws is None


def _is_over(handle: Any) -> bool:
    return isinstance(handle, StepError) or (handle.draws is not None and handle.ready())


def main() -> int:
    """A process of the engine's own machine, with what it inherits."""
    child.leave_signals()
    descriptor, pulse, ring, host, rank, size = map(int, sys.argv[1:])
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    threading.Thread(target=beat, args=(map_shared(pulse), rank), name="quire-pulse", daemon=True).start()
    return serve(sock, RankLink(sock, RingReader.inherit(ring, size, rank)), host)


def serve_engine_at(address: tuple[str, int], secret: bytes, rank: int) -> int:
    """A rank of an engine on another machine, or on this one: everything goes over the network."""
    sock = dial(address, secret, rank, MESSAGES)
    beats = dial(address, secret, rank, BEATS)
    use_interface_of(sock)
    threading.Thread(target=beat_over, args=(beats,), name="quire-pulse", daemon=True).start()
    return serve(sock, RankLink(sock))


def serve(sock: socket.socket, link: RankLink, host: int | None = None) -> int:
    """A rank from its first message to its end, which is the process's where it has begun to run.

    `host`: descriptor of the file for host memory that is shared with the engine.
    """
    start = link.next()
    assert isinstance(start, wire.StartRank)
    child.leave_with(sock, lambda: _tidy_up(start))
    level = start.log_level if start.rank == 0 else max(start.log_level, logging.WARNING)
    child.adopt(start, level, link.send, f"rank {start.rank}: ")
    try:
        loop = _start(link, start, host)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the rank could not start")
        link.send(wire.StartRefused(type(error).__name__, str(error), getattr(error, "parameter", None)))
        return 1
    gc.freeze()  # what is there now stays: a collection that went through all of it would stop every stream
    code = 0
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):
            loop.run()
    except Exception:
        logger.exception("the rank's loop failed")
        code = 1
    os._exit(code)  # the system takes everything back faster than we could, and nobody hangs in a destructor


def _tidy_up(start: wire.StartRank) -> None:
    """The engine's doing, where it lived to."""
    if "://" not in start.rendezvous:
        shutil.rmtree(Path(start.rendezvous).parent, ignore_errors=True)


def _start(link: RankLink, start: wire.StartRank, host: int | None) -> RankLoop:
    """Load this rank's part; the cache comes when all ranks have said what they have room for."""
    # Imported now and not above: torch takes its time, and the watch on the engine must stand before.
    import torch

    from quire.distributed.groups import Ranks
    from quire.distributed.world import join
    from quire.executor.local import LocalExecutor
    from quire.worker.memory import no_room
    from quire.worker.worker import Worker

    torch.set_num_threads(start.threads)
    config, files, model = child.model_of(start)
    platform, config, backend = _place(config, start)
    ranks = Ranks.at(start.rank, config.tensor_parallel_size, config.pipeline_parallel_size, config.stage_layers)
    join(ranks, start.rendezvous, backend, JOIN_SECONDS)
    before = platform.free_memory()
    doing = "while the model was loaded and a first step tried"
    worker: Worker | None = None
    try:
        limits = (start.max_model_len, start.max_rows, start.max_tokens)
        shares_host = host is not None and config.kv_disk is not None
        worker = Worker(config, files, model, platform, *limits, ranks, host_comes_later=shares_host)
        memory = worker.needs.plan(config, platform, before, platform.free_memory())
        link.send(
            wire.WeightsLoaded(
                device=platform.describe(),
                dtype=str(worker.needs.dtype),
                weight_bytes=worker.needs.weight_bytes,
                reads_groups=worker.reads_groups,
                memory=dataclasses.asdict(memory),
                phases=worker.phases,
                host_slots=worker.host_slots,
                slot_bytes=worker.slot_bytes,
            )
        )
        given = _cache(link)
        doing = f"with a KV cache of {given.num_blocks} blocks"
        worker.make_cache(given.num_blocks, _host_memory(given.host, host, worker.slot_bytes, platform))
    except torch.OutOfMemoryError as error:
        if worker is None:
            raise
        raise no_room(error, worker.needs, platform, doing) from error
    link.send(_ready(worker))
    return RankLoop(link, worker, LocalExecutor(worker, can_give_up=False), ranks)


def _cache(link: RankLink) -> wire.MakeCache:
    message = link.next()
    assert isinstance(message, wire.MakeCache)
    return message


def _host_memory(
    share: wire.HostShare | None, descriptor: int | None, part_bytes: int, platform: Platform
) -> HostMemory | None:
    """This rank's part of the host memory that it shares with the others and the engine."""
    from quire.worker.moves import HostMemory
    from quire.worker.shared_host import open_part

    if share is None or descriptor is None:
        return None
    place = (descriptor, share.slots, share.slot_bytes, share.offset, part_bytes, platform.device)
    return HostMemory(share.slots, part_bytes, platform.device.type == "cuda", lambda: open_part(*place))


def _ready(worker: Worker) -> wire.RankReady:
    if worker.mover is None:
        return wire.RankReady()
    room = worker.mover.room()
    return wire.RankReady(room.num_slots, room.slot_bytes, room.out_rate, room.back_rate)


def _place(config: EngineConfig, start: wire.StartRank) -> tuple[Platform, EngineConfig, str]:
    """The device of this rank, what it may take of it, and how it talks to the others'."""
    import torch

    from quire.distributed.world import BACKENDS
    from quire.platforms import choose

    size = start.neighbours
    if config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    platform = choose(config.device)
    backend = BACKENDS[platform.device.type]
    share: dict[str, Any] = {"swap_space": config.swap_space / size}  # all ranks share the machine's memory
    if platform.device.type == "cpu":
        share["cpu_kv_cache_share"] = config.cpu_kv_cache_share / size
        if config.kv_cache_memory_bytes is None and (space := config.cpu_kv_cache_bytes) is not None:
            share["kv_cache_memory_bytes"] = max(1, space // size)
    elif not start.own_device and size > torch.cuda.device_count():
        # Several to a card, which NCCL refuses and gloo cannot capture.
        eager = config.enforce_eager or config.tensor_parallel_size > 1  # between stages nothing is captured
        share |= {"gpu_memory_utilization": config.gpu_memory_utilization / size, "enforce_eager": eager}
        backend = "gloo"
    return platform, dataclasses.replace(config, **share), backend


if __name__ == "__main__":
    sys.exit(main())
