"""The executor `ray`: ranks on the nodes of a Ray cluster, one actor each, in one placement group.

Ray places, starts and ends them. Plans, results and heartbeats go over quire's own connections, and ranks form their
process group through a TCP store in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from quire.executor.base import ExecutorSpec, StartedExecutor
from quire.executor.estimate import estimate_needs
from quire.executor.links import RankResources
from quire.executor.liveness import SocketHeartbeats
from quire.executor.multiprocess import MultiprocessExecutor
from quire.executor.rank_listener import RankListener
from quire.loading.files import ModelFiles
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.platforms.cuda import RemoteCudaPlatform

logger = logging.getLogger(__name__)

BUSY_SECONDS = 60
"""Default wait for resources that others use, perhaps an engine that has just exited."""
ABSENT_SECONDS = 5
"""Default wait for resources the cluster does not have: a node may be joining."""
START_SECONDS = 60
"""How long an actor may take to start, and to connect to the engine."""
EXIT_STATUS_SECONDS = 3.0
"""How long to wait for Ray to report a lost node."""
FORWARDED = ("QUIRE_", "HF_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_")
"""Prefixes of environment variables that ranks get from this process."""
NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES",)
"""Set by Ray."""


class RayRanks:
    """One actor per rank, with two connections to each."""

    on_this_machine = False
    ring = host_file = None

    def __init__(self, config: EngineConfig, files: ModelFiles, size: int, on_gpus: bool) -> None:
        """`on_gpus`: a GPU for each rank; otherwise a CPU."""
        self._held = _RayResources()
        ray_cluster.hold()
        self.kill = weakref.finalize(self, _kill, self._held, os.getpid())
        self._size = size
        try:
            self._start(config, files, on_gpus)
        except BaseException:
            self.kill()
            raise

    def _start(self, config: EngineConfig, files: ModelFiles, on_gpus: bool) -> None:
        address = ray_cluster.connect(config.ray_address)
        self._ray = ray_cluster.import_ray()
        self._place(address, "GPU" if on_gpus else "CPU", config.ray_placement_timeout)
        self._nodes = self._node_infos(str(files.path))
        check_versions(self._nodes)
        check_model(self._nodes, str(files.path))
        local_sizes = Counter(info["node"] for info in self._nodes)
        wanted = str(config.threads or os.environ.get("OMP_NUM_THREADS", ""))
        self.resources = [
            RankResources(
                threads=max(1, (int(wanted) if wanted.isdecimal() else info["cores"]) // local_sizes[info["node"]]),
                local_size=local_sizes[info["node"]],
                owns_device=on_gpus,
            )
            for info in self._nodes
        ]
        here = self._ray.util.get_node_ip_address()
        self.rendezvous = self._held.open_store(here)
        self.sockets = self._connect(here, forwarded(config.ray_env, os.environ))

    # Placement

    def _place(self, address: str, kind: str, timeout: int | None) -> None:
        """Reserve a bundle for each rank, on as few nodes as possible."""
        needed = f"{self._size} rank{'s' if self._size > 1 else ''} need{'' if self._size > 1 else 's'}"
        needed += f" {self._size} {kind}{'s' if self._size > 1 else ''}"
        absent = ABSENT_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + absent
        while (counts := _resources(kind)) and sum(counts.values()) < self._size and time.monotonic() < deadline:
            time.sleep(0.2)
        total = int(sum(counts.values()))
        if total < self._size:
            listed = ", ".join(f"{node}: {count:g}" for node, count in counts.items())
            raise ClusterError(
                f"{needed}, and the Ray cluster at {address} has {total} ({listed}), also after {absent} s: add "
                f"nodes, lower the parallel sizes, or set ray_placement_timeout to wait longer"
            )
        group = self._ray.util.placement_group([{kind: 1}] * self._size, strategy="PACK")
        self._held.group = group
        busy = BUSY_SECONDS if timeout is None else timeout
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
        per_node = Counter(table.values())
        # Consecutive ranks on the same node: those of one stage communicate the most.
        bundles = sorted(table, key=lambda bundle: (-per_node[table[bundle]], table[bundle], bundle))
        actor = ray.remote(ray_actor.RankActor)
        for bundle in bundles:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
            options = {"num_cpus": int(kind == "CPU"), "num_gpus": int(kind == "GPU"), "max_restarts": 0}
            self._held.actors.append(actor.options(scheduling_strategy=strategy, **options).remote())

    def _node_infos(self, path: str) -> list[dict[str, Any]]:
        calls = [actor.node_info.remote([path]) for actor in self._held.actors]
        try:
            return list(self._ray.get(calls, timeout=START_SECONDS))
        except Exception as error:  # any error of Ray: its message in one line
            reason = type(error).__name__ if isinstance(error, TimeoutError) else _last_line(error)
            raise ClusterError(
                f"an actor of the Ray cluster did not start within {START_SECONDS} s: {reason}"
            ) from error

    # Connections

    def _connect(self, host: str, environment: dict[str, str]) -> list[socket.socket]:
        with contextlib.closing(RankListener(host, self._size)) as listener:
            for rank, (actor, resources) in enumerate(zip(self._held.actors, self.resources, strict=True)):
                own = {**environment, "OMP_NUM_THREADS": str(resources.threads)}
                self._held.runs.append(actor.run.remote(listener.address, listener.secret, rank, own))
            try:
                sockets, heartbeats = listener.accept_all(self._check_actors, time.monotonic() + START_SECONDS)
            except TimeoutError as error:
                raise ClusterError(f"{error} within {START_SECONDS} s: can the nodes reach this one?") from error
        self._held.sockets += sockets
        self._held.liveness = self.liveness = SocketHeartbeats(heartbeats)
        return sockets

    def _check_actors(self) -> None:
        """Raises if an actor has exited before it connected."""
        ended, _ = self._ray.wait(list(self._held.runs), num_returns=1, timeout=0)
        for run in ended:
            name = self.name(self._held.runs.index(run))
            try:
                self._ray.get(run, timeout=1)
                reason = "it has exited"
            except Exception as error:  # as above
                reason = _last_line(error)
            raise ClusterError(f"{name} did not start: {reason}")

    # State

    @property
    def pids(self) -> list[int]:
        return [info["pid"] for info in self._nodes]

    def name(self, rank: int) -> str:
        info = self._nodes[rank]
        return f"rank {rank} of {self._size} (pid {info['pid']} on node {info['address']})"

    def describe_exit(self, rank: int) -> str:
        node = self._nodes[rank]["node"]
        deadline = time.monotonic() + EXIT_STATUS_SECONDS
        while time.monotonic() < deadline:
            nodes = ray_cluster.alive_nodes()
            if nodes and node not in nodes:
                return f"{self.name(rank)} was lost: its node has left the Ray cluster"
            time.sleep(0.2)
        return f"{self.name(rank)} was lost: its process was killed, or its machine is unreachable"

    def wait(self, seconds: float) -> None:
        runs = list(self._held.runs)
        ray_cluster.bounded(lambda: self._ray.wait(runs, num_returns=len(runs), timeout=seconds), seconds + 1)


class _RayResources:
    """What the finalizer must release."""

    def __init__(self) -> None:
        self.group: Any = None
        self.actors: list[Any] = []
        self.runs: list[Any] = []
        self.sockets: list[socket.socket] = []
        self.liveness: SocketHeartbeats | None = None
        self.store: torch.distributed.TCPStore | None = None

    def open_store(self, host: str) -> str:
        """Start the store through which ranks form their process group, on this address only; returns its URL."""
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self.store = torch.distributed.TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_SECONDS),
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return f"tcp://{host}:{port}"


def forwarded(chosen: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ranks get: those of quire and its libraries, and those the user has chosen."""
    return {
        name: value
        for name, value in environment.items()
        if name in chosen or (name.startswith(FORWARDED) and name not in NOT_FORWARDED)
    }


def check_versions(nodes: Sequence[Mapping[str, Any]]) -> None:
    """All ranks must have the engine's versions."""
    ours = {"quire": str(import_module("quire").__version__), "torch": importlib.metadata.version("torch")}
    for rank, each in enumerate(nodes):
        for package, version in ours.items():
            theirs = str(each[package])
            if _without_build(theirs) != _without_build(version):
                has = f"has {package} {theirs}" if theirs else f"cannot import {package}"
                raise ClusterError(
                    f"mixed versions: node {each['address']} ({each['host']}, rank {rank}) {has}, the engine has "
                    f"{version}: install the same {package} on all nodes"
                )


def check_model(nodes: Sequence[Mapping[str, Any]], path: str) -> None:
    """All ranks must find the model under the engine's path."""
    for rank, each in enumerate(nodes):
        if each["missing"]:
            raise ClusterError(
                f"node {each['address']} ({each['host']}, rank {rank}) has no {path}: put the model there under the "
                "same path, or on a file system that all nodes share"
            )


def _without_build(version: str) -> str:
    """The version without its build suffix: the engine's node may have torch without CUDA."""
    return version.partition("+")[0]


def _resources(kind: str) -> dict[str, float]:
    """Amount of this resource by node."""
    nodes = ray_cluster.alive_nodes()
    if not nodes:
        raise ClusterError("the Ray cluster no longer answers")
    return {
        f"{node['NodeManagerAddress']} ({name[:8]})": node["Resources"].get(kind, 0.0) for name, node in nodes.items()
    }


def _last_line(error: BaseException) -> str:
    """The last line of Ray's error: the error itself, below its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _kill(held: _RayResources, owner: int) -> None:
    if os.getpid() != owner:
        return  # this is a fork of the owner: the ranks are not its own
    for sock in held.sockets:  # first: ranks exit when their connection closes, even if Ray no longer answers
        sock.close()
    if held.liveness is not None:
        held.liveness.close()
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


class RayBackend:
    """Starts an actor for each rank on a Ray cluster."""

    uses_local_devices = False  # Ray assigns each rank its device

    def choose_platform(self, config: EngineConfig) -> Platform:
        """GPUs if the cluster has any, whatever this machine has."""
        if config.device == "cpu":
            return choose("cpu")
        ray_cluster.connect(config.ray_address)
        nodes = ray_cluster.alive_nodes().values()
        resources = {name for node in nodes for name, count in node["Resources"].items() if count}
        if config.device == "cuda" or "GPU" in resources:
            label = "accelerator_type:"
            return RemoteCudaPlatform({name.removeprefix(label) for name in resources if name.startswith(label)})
        return choose("cpu")

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        # A model that cannot be split is refused before any actor is started.
        estimate_needs(spec.config, spec.files, spec.model, spec.platform, spec.limits)
        # Each rank must use the device Ray gives it, not whatever else its node has.
        config = dataclasses.replace(spec.config, device=spec.platform.device.type)
        ranks = RayRanks(config, spec.files, config.num_ranks, on_gpus=config.device == "cuda")
        return MultiprocessExecutor(dataclasses.replace(spec, config=config), ranks).started()
