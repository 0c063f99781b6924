"""A rank's process: `python -m quire.executor.rank SOCKET HEARTBEATS RING HOST RANK SIZE`. See `processes.py`.

It loads its part of the model, then runs plans and reports their results.
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

from quire.errors import QuireError, StepError
from quire.executor import child, wire
from quire.executor.base import pause_after
from quire.executor.liveness import beat_in_memory, beat_over_socket
from quire.executor.rank_listener import HEARTBEATS, MESSAGES, connect_to_engine
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

MEASURE_SECONDS = 1.0
"""How often a rank reports its memory."""

JOIN_SECONDS = 600.0
"""Timeout of collectives. The engine notices a dead rank long before."""


class RankLink(child.ChildLink):
    """The rank's end of the socket, and of the memory shared with the engine, if any."""

    def __init__(self, sock: socket.socket, ring: RingReader | None = None) -> None:
        super().__init__(sock)
        self._frames = FrameSplitter(wire.LARGEST)
        self._ring = ring

    def send(self, message: wire.Up) -> None:
        """May be called from any thread."""
        self.send_bytes(wire.encode(message))

    def receive(self, seconds: float | None) -> list[wire.Down]:
        """Messages that have arrived; waits at most `seconds` (None: no limit). Raises EOFError when the engine has
        exited."""
        return [self._decode(payload) for payload in self.receive_payloads(seconds)]

    def next(self) -> wire.Down:
        """Waits for the next message."""
        return self._decode(self.next_payload())

    def _decode(self, data: bytes) -> wire.Down:
        message = wire.decode_down(data)
        if not isinstance(message, wire.Shared):
            return message
        if self._ring is None:
            raise RuntimeError("got the position of a message in shared memory, but this rank shares none")
        return wire.decode_down(self._ring.take(message.at, message.length))


class RankLoop:
    """Plans in, results out: steps are launched as soon as they arrive, and reported in order."""

    def __init__(self, link: RankLink, executor: LocalExecutor, ranks: Ranks) -> None:
        self._link, self._executor = link, executor
        self._samples = ranks.is_last_stage
        self._measured_at = 0.0
        self._reports = ranks.is_last_stage and ranks.tp_rank == 0
        self._launched: deque[tuple[int, Any]] = deque()
        self._waiting_since = 0.0
        self._is_open = True

    def run(self) -> None:
        """Run until `ShutdownRank` arrives."""
        while self._is_open:
            for message in self._link.receive(self._pause()):
                self._handle(message)
                self._report_done()  # before the next step, which may wait long for the previous stage
            self._report_done()

    def _report_done(self) -> None:
        """Report every step that is done."""
        while self._launched and _is_done(self._launched[0][1]):
            self._report(*self._launched.popleft())
            self._waiting_since = time.monotonic()

    def _pause(self) -> float | None:
        """Seconds to wait for a message before polling the device again; None: until a message comes."""
        if not self._launched or _waits_for_masks(self._launched[0][1]):
            return None
        return pause_after(time.monotonic() - self._waiting_since)

    def _handle(self, message: wire.Down) -> None:
        match message:
            case wire.Step(plan=data):
                plan = decode_plan(data)
                if not self._launched:
                    self._waiting_since = time.monotonic()
                self._launched.append((plan.step, self._executor.submit(plan)))
            case wire.Supply(masks=data):
                if self._samples:
                    self._supply(decode_masks(data))
            case wire.CountExperts():
                counts = {layer: list(map(int, each)) for layer, each in self._executor.expert_counts().items()}
                self._link.send(wire.ExpertCounts(counts))
            case wire.PlaceExperts(placements=placements):
                self._executor.place_experts(
                    {layer: Placement.from_lists(slots) for layer, slots in placements.items()}
                )
                self._link.send(wire.Placed())
            case wire.ShutdownRank():
                self._is_open = False
            case _:
                raise RuntimeError(f"unexpected message after the start: {type(message).__name__}")

    def _supply(self, masks: StepMasks) -> None:
        """Pass masks to the step launched last, unless it has failed and been reported."""
        if not self._launched or self._launched[-1][0] != masks.step:
            return
        step, handle = self._launched[-1]
        try:
            self._executor.supply(handle, masks)
        except StepError as error:
            self._launched[-1] = (step, error)

    def _report(self, step: int, handle: Any) -> None:
        """Send the result of a step, or its error."""
        from quire.distributed.collectives import collectives_started

        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._link.send(wire.StepFailed(step, type(error).__name__, str(error), collectives_started()))
            return
        moves, result.moves_done = result.moves_done, []
        loads, result.adapters_done = result.adapters_done, []
        crc = zlib.crc32(result.tokens.tobytes())
        memory, now = None, time.monotonic()
        if now - self._measured_at >= MEASURE_SECONDS:
            memory, self._measured_at = self._executor.memory_use(), now
        self._link.send(wire.Done(step, crc, moves, encode(result) if self._reports else b"", memory, loads))


def _waits_for_masks(handle: Any) -> bool:
    return not isinstance(handle, StepError) and handle.draws is None


def _is_done(handle: Any) -> bool:
    return isinstance(handle, StepError) or (handle.draws is not None and handle.ready())


def main() -> int:
    """A rank on the engine's machine."""
    child.ignore_signals()
    descriptor, heartbeats, ring, host, rank, size = map(int, sys.argv[1:])
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    counters = map_shared(heartbeats)
    threading.Thread(target=beat_in_memory, args=(counters, rank), name="quire-heartbeat", daemon=True).start()
    return serve(sock, RankLink(sock, RingReader.inherit(ring, size, rank)), host)


def serve_engine_at(address: tuple[str, int], secret: bytes, rank: int) -> int:
    """A rank of an engine that may be on another machine: everything goes over the network."""
    sock = connect_to_engine(address, secret, rank, MESSAGES)
    heartbeats = connect_to_engine(address, secret, rank, HEARTBEATS)
    threading.Thread(target=beat_over_socket, args=(heartbeats,), name="quire-heartbeat", daemon=True).start()
    from quire.distributed.process_group import use_interface_of  # imports torch, which takes seconds

    use_interface_of(sock)
    return serve(sock, RankLink(sock))


def serve(sock: socket.socket, link: RankLink, host: int | None = None) -> int:
    """Run a rank from its first message on. Exits the process once the rank has run.

    `host`: descriptor of the file for host memory shared with the engine.
    """
    start = link.next()
    assert isinstance(start, wire.StartRank)
    child.exit_with_peer(sock, lambda: _remove_rendezvous(start))
    level = start.log_level if start.rank == 0 else max(start.log_level, logging.WARNING)
    child.apply_context(start, level, link.send, f"rank {start.rank}: ")
    try:
        loop = _start(link, start, host)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the rank could not start")
        link.send(wire.StartRefused(type(error).__name__, str(error), getattr(error, "parameter", None)))
        return 1
    gc.freeze()  # these objects stay: a collection over all of them would pause every stream
    code = 0
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):
            loop.run()
    except Exception:
        logger.exception("the rank's loop failed")
        code = 1
    os._exit(code)  # the system frees everything faster than destructors would, and none of them can hang


def _remove_rendezvous(start: wire.StartRank) -> None:
    """The engine removes it itself unless it was killed."""
    if "://" not in start.rendezvous:
        shutil.rmtree(Path(start.rendezvous).parent, ignore_errors=True)


def _start(link: RankLink, start: wire.StartRank, host: int | None) -> RankLoop:
    """Load this rank's part, and allocate the cache once all ranks have reported what fits."""
    # Imported here: torch takes seconds, and `exit_with_peer` must run before.
    import torch

    from quire.distributed.groups import Ranks
    from quire.distributed.process_group import join
    from quire.executor.local import LocalExecutor
    from quire.worker.memory import no_room
    from quire.worker.worker import Worker

    torch.set_num_threads(start.threads)
    config, files, model = child.load_context(start)
    platform, config, backend = _choose_device(config, start)
    ranks = Ranks.at(start.rank, config.tensor_parallel_size, config.pipeline_parallel_size, config.stage_layers)
    join(ranks, start.rendezvous, backend, JOIN_SECONDS)
    free_before = platform.free_memory()
    phase = "while the model was loaded and a first step tried"
    worker: Worker | None = None
    try:
        limits = (start.max_model_len, start.max_rows, start.max_tokens)
        shares_host = host is not None and config.kv_disk is not None
        worker = Worker(config, files, model, platform, *limits, ranks, host_comes_later=shares_host)
        memory = worker.needs.plan(config, platform, free_before, platform.free_memory())
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
                groups=worker.needs.groups,
                layout=worker.needs.layout,
                drafts=worker.drafts,
                encoder=worker.limits,
            )
        )
        cache = link.next()
        assert isinstance(cache, wire.MakeCache)
        phase = f"with a KV cache of {cache.num_blocks} blocks"
        worker.make_cache(cache.num_blocks, _host_memory(cache.host, host, worker.slot_bytes, platform))
    except torch.OutOfMemoryError as error:
        if worker is None:
            raise
        raise no_room(error, worker.needs, platform, phase) from error
    link.send(_ready(worker))
    return RankLoop(link, LocalExecutor(worker, can_give_up=False), ranks)


def _host_memory(
    share: wire.HostShare | None, descriptor: int | None, part_bytes: int, platform: Platform
) -> HostMemory | None:
    """This rank's part of the host memory shared with the other ranks and the engine."""
    from quire.worker.moves import HostMemory, open_shared_part

    if share is None or descriptor is None:
        return None
    arguments = (descriptor, share.slots, share.slot_bytes, share.offset, part_bytes, platform.device)
    return HostMemory(share.slots, part_bytes, platform.device.type == "cuda", lambda: open_shared_part(*arguments))


def _ready(worker: Worker) -> wire.RankReady:
    if worker.mover is None:
        return wire.RankReady()
    room = worker.mover.tier_info()
    return wire.RankReady(room.num_slots, room.slot_bytes, room.out_rate, room.back_rate)


def _choose_device(config: EngineConfig, start: wire.StartRank) -> tuple[Platform, EngineConfig, str]:
    """(this rank's platform, its share of the machine's memory as settings, the backend of its collectives)."""
    import torch

    from quire.platforms import choose

    size = start.local_size
    if config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    platform = choose(config.device)
    backend = platform.collectives
    share: dict[str, Any] = {"swap_space": config.swap_space / size}  # all ranks share the machine's memory
    if platform.device.type == "cpu":
        share["cpu_kv_cache_share"] = config.cpu_kv_cache_share / size
        if config.kv_cache_memory_bytes is None and (space := config.cpu_kv_cache_bytes) is not None:
            share["kv_cache_memory_bytes"] = max(1, space // size)
    elif not start.owns_device and size > torch.cuda.device_count():
        # Several ranks on one GPU: NCCL refuses that, and gloo cannot be captured in a graph.
        eager = config.enforce_eager or config.tensor_parallel_size > 1  # sends between stages are not captured
        share |= {"gpu_memory_utilization": config.gpu_memory_utilization / size, "enforce_eager": eager}
        backend = "gloo"
    return platform, dataclasses.replace(config, **share), backend


if __name__ == "__main__":
    sys.exit(main())
