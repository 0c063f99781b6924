"""Ranks on the nodes of a Ray cluster: one actor each, in one placement group.

Ray places, starts and ends them. Plans, results and beats go over connections of our own, and ranks meet at a store
that this process keeps.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import ClusterError
from quire.executor import ray_actor, ray_cluster
from quire.executor.links import RankPlace
from quire.executor.liveness import Heartbeats
from quire.executor.rank_listener import RankListener
from quire.loading.files import ModelFiles

logger = logging.getLogger(__name__)

BUSY_SECONDS = 60
"""So long resources that the cluster has may be in use by others: those of an engine that has just died, maybe."""
ABSENT_SECONDS = 5
"""So long they may be missing altogether: a node may just be joining."""
START_SECONDS = 60
"""So long an actor may take to start, and to find its way here."""
BURIAL_SECONDS = 3.0
"""So long one waits to learn from Ray how an actor ended."""
CARRIED = ("QUIRE_", "HF_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_")
"""Variables that ranks get as they are here."""
NOT_CARRIED = ("CUDA_VISIBLE_DEVICES",)
"""Ray's own business."""


class RayRanks:
    """One actor a rank, with two connections to each."""

    ring = host_file = None

    def __init__(self, config: EngineConfig, files: ModelFiles, size: int, on_gpus: bool) -> None:
        """`on_gpus`: a GPU for each; else a CPU."""
        self._held = _Held()
        ray_cluster.hold()
        self.end = weakref.finalize(self, _end, self._held, os.getpid())
        self._size = size
        try:
            self._start(config, files, on_gpus)
        except BaseException:
            self.end()
            raise

    def _start(self, config: EngineConfig, files: ModelFiles, on_gpus: bool) -> None:
        address = ray_cluster.connect(config.ray_address)
        self._ray = ray_cluster.import_ray()
        self._place(address, "GPU" if on_gpus else "CPU", config.ray_placement_timeout)
        self._facts = self._ask(str(files.path))
        check_versions(self._facts)
        check_model(self._facts, str(files.path))
        neighbours = Counter(facts["node"] for facts in self._facts)
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        self.places = [
            RankPlace(
                threads=max(1, (int(wanted) if wanted.isdecimal() else facts["cores"]) // neighbours[facts["node"]]),
                neighbours=neighbours[facts["node"]],
                own_device=on_gpus,
            )
            for facts in self._facts
        ]
        here = self._ray.util.get_node_ip_address()
        self.rendezvous = self._held.open_store(here)
        self.sockets = self._meet(here, carried(config.ray_env, os.environ))

    # Placement

    def _place(self, address: str, kind: str, patience: int | None) -> None:
        """A bundle for each rank, of as few nodes as can be."""
        needed = f"{self._size} rank{'s' if self._size > 1 else ''} need{'' if self._size > 1 else 's'}"
        needed += f" {self._size} {kind}{'s' if self._size > 1 else ''}"
        absent = ABSENT_SECONDS if patience is None else patience
        deadline = time.monotonic() + absent
        while (there := _resources(kind)) and sum(there.values()) < self._size and time.monotonic() < deadline:
            time.sleep(0.2)
        total = int(sum(there.values()))
        if total < self._size:
            listed = ", ".join(f"{node}: {count:g}" for node, count in there.items())
            raise ClusterError(
                f"{needed}, and the Ray cluster at {address} has {total} ({listed}), also after {absent} s: add "
                f"nodes, lower the parallel sizes, or set ray_placement_timeout to wait longer"
            )
        group = self._ray.util.placement_group([{kind: 1}] * self._size, strategy="PACK")
        self._held.group = group
        busy = BUSY_SECONDS if patience is None else patience
        if not group.wait(busy):
            free = int(self._ray.available_resources().get(kind, 0))
            raise ClusterError(
                f"{needed}; the Ray cluster at {address} has {total}, and {free} of them were free for {busy} s: end "
                "what holds the others, or set ray_placement_timeout to wait longer"
            )
        self._make_actors(group, kind)

    def _make_actors(self, group: Any, kind: str) -> None:
        ray = self._ray
        ray.cloudpickle.register_pickle_by_value(ray_actor)
        table = ray.util.placement_group_table(group)["bundles_to_node_id"]
        crowd = Counter(table.values())
        # Neighbours in rank are neighbours in place: those of one stage talk the most.
        bundles = sorted(table, key=lambda bundle: (-crowd[table[bundle]], table[bundle], bundle))
        actor = ray.remote(ray_actor.RankActor)
        for bundle in bundles:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
            options = {"num_cpus": int(kind == "CPU"), "num_gpus": int(kind == "GPU"), "max_restarts": 0}
            self._held.actors.append(actor.options(scheduling_strategy=strategy, **options).remote())

    def _ask(self, path: str) -> list[dict[str, Any]]:
        questions = [actor.facts.remote([path]) for actor in self._held.actors]
        try:
            return list(self._ray.get(questions, timeout=START_SECONDS))
        except Exception as error:  # of Ray's making: its words, in one line
            said = type(error).__name__ if isinstance(error, TimeoutError) else _words(error)
            raise ClusterError(f"an actor of the Ray cluster did not start within {START_SECONDS} s: {said}") from error

    # Connections

    def _meet(self, host: str, environment: dict[str, str]) -> list[socket.socket]:
        with contextlib.closing(RankListener(host, self._size)) as gate:
            for rank, (actor, place) in enumerate(zip(self._held.actors, self.places, strict=True)):
                own = {**environment, "OMP_NUM_THREADS": str(place.threads)}
                self._held.runs.append(actor.run.remote(gate.address, gate.secret, rank, own))
            try:
                sockets, beats = gate.admit(self._look, time.monotonic() + START_SECONDS)
            except TimeoutError as error:
                raise ClusterError(f"{error} within {START_SECONDS} s: can the nodes reach this one?") from error
        self._held.sockets += sockets
        self._held.pulse = self.pulse = Heartbeats(beats)
        return sockets

    def _look(self) -> None:
        """Raises if an actor has ended before it has come here."""
        ended, _ = self._ray.wait(list(self._held.runs), num_returns=1, timeout=0)
        for run in ended:
            name = self.name(self._held.runs.index(run))
            try:
                self._ray.get(run, timeout=1)
                said = "it has ended"
            except Exception as error:  # as above
                said = _words(error)
            raise ClusterError(f"{name} did not start: {said}")

    # How they are

    @property
    def pids(self) -> list[int]:
        return [facts["pid"] for facts in self._facts]

    def name(self, rank: int) -> str:
        facts = self._facts[rank]
        return f"rank {rank} of {self._size} (pid {facts['pid']} on node {facts['address']})"

    def describe_end(self, rank: int) -> str:
        node = self._facts[rank]["node"]
        deadline = time.monotonic() + BURIAL_SECONDS
        while time.monotonic() < deadline:
            nodes = ray_cluster.alive_nodes()
            if nodes and node not in nodes:
                return f"{self.name(rank)} was lost: its node has left the Ray cluster"
            time.sleep(0.2)
        return f"{self.name(rank)} was lost: its process was killed, or its machine has gone"

    def wait(self, seconds: float) -> None:
        runs = list(self._held.runs)
        ray_cluster.bounded(lambda: self._ray.wait(runs, num_returns=len(runs), timeout=seconds), seconds + 1)


class _Held:
    """What must be given back."""

    def __init__(self) -> None:
        self.group: Any = None
        self.actors: list[Any] = []
        self.runs: list[Any] = []
        self.sockets: list[socket.socket] = []
        self.pulse: Heartbeats | None = None
        self.store: torch.distributed.TCPStore | None = None

    def open_store(self, host: str) -> str:
        """Where ranks find each other; it listens at this address alone."""
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self.store = torch.distributed.TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_SECONDS),
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return f"tcp://{host}:{port}"


def carried(chosen: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks get: ours, those of the libraries, and those the user has chosen."""
    return {
        name: value
        for name, value in environment.items()
        if name in chosen or (name.startswith(CARRIED) and name not in NOT_CARRIED)
    }


def check_versions(facts: Sequence[Mapping[str, Any]]) -> None:
    """All ranks must run what the engine runs."""
    ours = {"quire": str(import_module("quire").__version__), "torch": importlib.metadata.version("torch")}
    for rank, each in enumerate(facts):
        for package, version in ours.items():
            theirs = str(each[package])
            if _public(theirs) != _public(version):
                has = f"has {package} {theirs}" if theirs else f"cannot import {package}"
                raise ClusterError(
                    f"mixed versions: node {each['address']} ({each['host']}, rank {rank}) {has}, the engine has "
                    f"{version}: install the same {package} on all nodes"
                )


def check_model(facts: Sequence[Mapping[str, Any]], path: str) -> None:
    """All ranks must find the model where the engine found it."""
    for rank, each in enumerate(facts):
        if each["missing"]:
            raise ClusterError(
                f"node {each['address']} ({each['host']}, rank {rank}) has no {path}: put the model there under the "
                "same path, or on a file system that all nodes share"
            )


def _public(version: str) -> str:
    """Without what was built in: the engine's node may have torch without CUDA."""
    return version.partition("+")[0]


def _resources(kind: str) -> dict[str, float]:
    """How many each node has."""
    nodes = ray_cluster.alive_nodes()
    if not nodes:
        raise ClusterError("the Ray cluster does not answer any more")
    return {
        f"{node['NodeManagerAddress']} ({name[:8]})": node["Resources"].get(kind, 0.0) for name, node in nodes.items()
    }


def _words(error: BaseException) -> str:
    """The last line of what Ray says: the error itself, below where it came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _end(held: _Held, owner: int) -> None:
    """Whatever happened, nothing stays behind."""
    if os.getpid() != owner:
        return  # a fork of ours ends, and the ranks are not its own
    for sock in held.sockets:  # first: a rank whose connection closes leaves, also where Ray cannot be asked any more
        sock.close()
    if held.pulse is not None:
        held.pulse.close()
    held.store = None

    def release() -> None:
        ray = ray_cluster.import_ray()
        for actor in held.actors:
            ray.kill(actor)
        if held.group is not None:
            ray.util.remove_placement_group(held.group)

    if held.actors or held.group is not None:
        ray_cluster.bounded(release)
    ray_cluster.leave()
