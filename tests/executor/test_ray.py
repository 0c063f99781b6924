"""Ranks on a Ray cluster: the same tokens as in one process, clear errors when something is wrong or lost.

The cluster is real, its two nodes are on this machine. One test runs in CI, the others under `slow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.device_split import limit_to_share
from quire.errors import ClusterError, ConfigError, EngineDeadError, QuireError
from quire.executor import ray_ranks
from quire.executor.base import StepLimits
from quire.executor.estimate import estimate_needs
from quire.executor.liveness import SocketHeartbeats
from quire.executor.rank_listener import HEARTBEATS, MESSAGES, SECRET_BYTES, RankListener, connect_to_engine
from quire.executor.ray_ranks import forwarded
from quire.loading.files import ModelFiles, local_files
from quire.loading.model_config import read_model_config
from quire.platforms.cuda import RemoteCudaPlatform
from tests.executor.test_multiprocess import BEGIN, TIGHT, is_running, lose_a_rank, mixed_load, ranks_of, tokens

ray = pytest.importorskip("ray")
RAY = {**TIGHT, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    made.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def two_nodes(cluster: Any) -> Iterator[Any]:
    """The cluster, with its second node restored if a test has removed it."""
    if cluster.second not in cluster.list_all_nodes():
        cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    assert not ray.is_initialized(), "an engine that has ended holds no connection to the cluster"


def nodes_of(llm: LLM) -> list[str]:
    return [info["node"] for info in llm.llm_engine.core._executor._ranks.ranks._nodes]


def exits(pid: int, seconds: float = 15.0) -> bool:
    """Whether a process exits within the time."""
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_ranks_on_two_nodes_match_one_process_and_a_lost_one_is_named(
    two_nodes: Any, make_llm: Callable[..., LLM], capfd: pytest.CaptureFixture[str]
) -> None:
    alone = mixed_load(make_llm(**TIGHT), with_grammars=False)
    capfd.readouterr()
    llm = make_llm(**RAY, ray_address=two_nodes.address)
    assert len(set(nodes_of(llm))) == 2
    assert mixed_load(llm, with_grammars=False) == alone
    pids = ranks_of(llm)
    lose_a_rank(llm, rf"rank 1 of 2 \(pid {pids[1]} on node [0-9.]+\) was lost: its process", seconds=15)
    assert all(exits(pid) for pid in pids)
    llm.llm_engine.abort_request(["0", "1", "2"])
    error_text = capfd.readouterr()
    assert "raylet" not in error_text.out + error_text.err


@pytest.mark.slow
def test_stages_on_two_nodes(two_nodes: Any, make_llm: Callable[..., LLM]) -> None:
    stages = {**RAY, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert mixed_load(make_llm(**stages, ray_address=two_nodes.address)) == mixed_load(make_llm(**TIGHT))


@pytest.mark.slow
def test_two_engines_on_one_cluster(two_nodes: Any, tiny_model: Path, make_llm: Callable[..., LLM]) -> None:
    expected = [samples[0] for samples in tokens(make_llm(**TIGHT), [[3 + i, *BEGIN] for i in range(6)])]

    async def live() -> list[list[int]]:
        replicas = {**RAY, "tensor_parallel_size": 1, "data_parallel_size": 2}
        llm = AsyncLLM(str(tiny_model), **replicas, ray_address=two_nodes.address)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

        async def ask(i: int) -> list[int]:
            outputs = [output async for output in llm.generate([3 + i, *BEGIN], params, str(i))]
            return list(outputs[-1].outputs[0].token_ids)

        try:
            return await asyncio.gather(*(ask(i) for i in range(6)))
        finally:
            llm.shutdown()

    assert asyncio.run(live()) == expected


# What is refused


@contextlib.contextmanager
def mute_port() -> Iterator[int]:
    """A server that is not Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def answer() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    caller, _ = server.accept()
                    with caller:
                        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def refused(tiny_model: Path, **settings: Any) -> str:
    """The error, which is one line and comes within seconds."""
    begin = time.monotonic()
    with pytest.raises(QuireError) as caught:
        LLM(str(tiny_model), **{**RAY, **settings})
    assert time.monotonic() - begin < 20
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, (ClusterError, ConfigError))
    return str(caught.value)


def test_an_address_without_a_ray_cluster(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error_text = refused(tiny_model, ray_address=f"127.0.0.1:{port}")
    assert f"no Ray cluster can be reached at 127.0.0.1:{port} (connection refused" in error_text
    with mute_port() as port:
        assert f"the server at 127.0.0.1:{port} is not a Ray" in refused(tiny_model, ray_address=f"127.0.0.1:{port}")
    assert "no Ray cluster can be reached at no.such.host.invalid:6379" in refused(
        tiny_model, ray_address="no.such.host.invalid:6379"
    )
    assert "must be HOST:PORT, for example 10.0.0.1:6379; got '6379'" in refused(tiny_model, ray_address="6379")
    assert "not as a client from outside" in refused(tiny_model, ray_address="ray://127.0.0.1:10001")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "no Ray cluster can be reached at 127.0.0.1:9" in refused(tiny_model)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "Ray is not installed: pip install 'quire[ray]'" in refused(tiny_model)


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ray_address is set, but distributed_executor_backend is 'mp'"):
        EngineConfig("m", tensor_parallel_size=2, distributed_executor_backend="mp", ray_address="10.0.0.1:6379")
    with pytest.raises(ConfigError, match="ray_placement_timeout must be an integer of at least 0"):
        EngineConfig("m", distributed_executor_backend="ray", ray_placement_timeout=-1)
    with pytest.raises(ConfigError, match="kv_disk"):
        EngineConfig("m", distributed_executor_backend="ray", kv_disk=str(tmp_path))


@pytest.mark.slow
def test_a_cluster_without_the_resources_or_versions(
    two_nodes: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "ABSENT_SECONDS", 1)
    here = {"ray_address": two_nodes.address}
    error_text = refused(tiny_model, **here, tensor_parallel_size=4)
    assert f"4 ranks need 4 CPUs, and the Ray cluster at {two_nodes.address} has 2" in error_text
    assert "2 ranks need 2 GPUs, and the Ray cluster" in refused(tiny_model, **here, device="cuda")
    monkeypatch.setattr("quire.__version__", "9.9.9")
    assert "has quire 0." in (error_text := refused(tiny_model, **here))
    assert "mixed versions: node" in error_text
    assert "the engine has 9.9.9: install the same quire on all nodes" in error_text
    monkeypatch.undo()
    config = EngineConfig(str(tiny_model), **{**RAY, **here})
    nowhere = Path("/no/such/folder")
    with pytest.raises(ClusterError, match=r"node [0-9.]+ \(.*, rank 0\) has no /no/such/folder: put the model there"):
        ray_ranks.RayRanks(config, ModelFiles("m", nowhere, folder=nowhere), 2, on_gpus=False)


@pytest.mark.slow
def test_resources_that_others_use_are_waited_for(
    two_nodes: Any, tiny_model: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for too short a time, then until the other has ended. In a process that the user has connected to Ray."""
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "0.0002")
    ray.init(address=two_nodes.address, log_to_driver=False, logging_level="ERROR")
    try:

        @ray.remote(num_cpus=1)
        class Other:
            def ready(self) -> None: ...

        other = Other.remote()
        ray.get(other.ready.remote())
        error_text = refused(tiny_model, ray_placement_timeout=2)
        assert "has 2, and 1 of them were free for 2 s: end what holds the others" in error_text
        threading.Timer(2.0, ray.kill, [other]).start()
        llm = make_llm(**{**RAY, "num_gpu_blocks_override": None})
        assert len(tokens(llm, [BEGIN])[0][0]) == 24
        assert llm.llm_engine.info.memory.cache <= 0.0002 * 2**30, "the variable has reached the ranks"
        llm.shutdown()
        assert ray.is_initialized(), "the user's connection is kept"
    finally:
        ray.shutdown()


# What is lost


@pytest.mark.slow
def test_a_lost_node_is_named_and_the_engine_restarts_with_another(two_nodes: Any, tiny_model: Path) -> None:
    async def live() -> None:
        llm = AsyncLLM(str(tiny_model), **RAY, ray_address=two_nodes.address, ray_placement_timeout=2)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        try:

            async def ask() -> str:
                try:
                    async for _ in llm.generate(BEGIN, params, "a"):
                        started.set()
                except EngineDeadError as error:
                    return str(error)
                return ""

            started = asyncio.Event()
            asked = asyncio.ensure_future(ask())
            await started.wait()
            two_nodes.remove_node(two_nodes.second, allow_graceful=False)
            begin = time.monotonic()
            error_text = await asyncio.wait_for(asked, 30)
            assert time.monotonic() - begin < 15
            assert "was lost" in error_text
            assert "on node" in error_text
            # Ray may not have noticed yet, and count the node.
            with pytest.raises(ClusterError, match=r"2 ranks need 2 CPUs.* (has 1|1 of them were free)"):
                await llm.restart(only_if_dead=True)
            two_nodes.second = two_nodes.add_node(num_cpus=1)
            while llm.errored and time.monotonic() - begin < 90:  # as the server does
                with contextlib.suppress(ClusterError):
                    await llm.restart(only_if_dead=True)
            short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            outputs = [output async for output in llm.generate(BEGIN, short, "b")]
            assert len(outputs[-1].outputs[0].token_ids) == 5
        finally:
            llm.shutdown()

    asyncio.run(live())


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_noticed(
    two_nodes: Any, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.liveness.SILENT_SECONDS", 3.0)
    llm = make_llm(**RAY, ray_address=two_nodes.address)
    pids = ranks_of(llm)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"rank 0 of 2 \(pid {pids[0]} on node [0-9.]+\) hangs"):
        tokens(llm, [BEGIN])
    assert all(exits(pid) for pid in pids)


@pytest.mark.slow
def test_actors_exit_with_a_killed_engine(two_nodes: Any, tiny_model: Path) -> None:
    program = f"""
import sys
from quire import LLM
llm = LLM({str(tiny_model)!r}, **{RAY!r}, ray_address={two_nodes.address!r})
print("pids", *llm.llm_engine.core._executor.pids, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = next(list(map(int, line.split()[1:])) for line in engine.stdout if line.startswith("pids"))
        assert len(pids) == 2
        engine.kill()
    assert all(exits(pid) for pid in pids)


@pytest.mark.slow
def test_a_cluster_started_by_the_engine_ends_with_it(tiny_model: Path) -> None:
    program = f"""
import sys
from quire import LLM, SamplingParams
llm = LLM({str(tiny_model)!r}, **{RAY!r}, ray_address="local")
print(len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids), flush=True)
sys.stdin.read()
"""
    for end in ("leaves", "is killed"):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert "4\n" in engine.stdout.readline()
            children = descendants(engine.pid)
            assert any("raylet" in name for name in children.values())
            if end == "is killed":
                engine.kill()
            else:
                assert engine.stdin is not None
                engine.stdin.close()
        # Ray's agents take a minute to notice that their head has exited.
        assert {pid: name for pid, name in children.items() if not exits(pid, 90)} == {}, end


def descendants(root: int) -> dict[int, str]:
    """Descendants of a process: pid to name."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, rest = (folder / "stat").read_text().rpartition(")")[::2]
            parents[int(folder.name)] = (int(rest.split()[1]), name.partition("(")[2])
    found = {root}
    while grown := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= grown
    return {pid: parents[pid][1] for pid in found - {root}}


# Connections


def test_only_connections_with_the_secret_are_accepted() -> None:
    listener = RankListener("127.0.0.1", 1)
    unauthorized = [socket.create_connection(listener.address) for _ in range(3)]
    unauthorized[0].sendall(b"GET / HTTP/1.1\r\nHost: engine\r\nAccept: anything at all\r\n\r\n")
    unauthorized[1].sendall(bytes(SECRET_BYTES + 5))
    callers = [
        connect_to_engine(listener.address, bytes(SECRET_BYTES), 0, MESSAGES),
        connect_to_engine(listener.address, listener.secret, 7, MESSAGES),
    ]
    known = [connect_to_engine(listener.address, listener.secret, 0, kind) for kind in (MESSAGES, HEARTBEATS)]
    second = connect_to_engine(listener.address, listener.secret, 0, MESSAGES)
    messages, beats = listener.accept_all(lambda: None, time.monotonic() + 10)
    assert len(messages) == len(beats) == 1
    messages[0].sendall(b"plan")
    assert known[0].recv(10) == b"plan"
    for sock in (*unauthorized, *callers, second):
        sock.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(10) == b""
    listener.close()


def test_ranks_that_do_not_connect_are_named() -> None:
    listener = RankListener("127.0.0.1", 2)
    connect_to_engine(listener.address, listener.secret, 0, MESSAGES)
    with pytest.raises(TimeoutError, match="ranks 0, 1 of 2 did not connect"):
        listener.accept_all(lambda: None, time.monotonic() + 0.5)
    listener.close()


def test_a_rank_without_heartbeats_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.liveness.SILENT_SECONDS", 1.0)
    pairs = [socket.socketpair() for _ in range(2)]
    beats = SocketHeartbeats([ours for ours, _ in pairs])
    beats.watch()
    deadline = time.monotonic() + 30
    while (silent := beats.silent()) is None and time.monotonic() < deadline:
        pairs[0][1].sendall(b"\0")
        time.sleep(0.05)
    assert silent == 1
    beats.close()


def test_engines_on_a_cluster_need_no_devices_of_their_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig("m", data_parallel_size=2, tensor_parallel_size=2, distributed_executor_backend="ray")
    limit_to_share(config, 1, 2)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with pytest.raises(ConfigError, match="4 are needed, and this machine shows 1"):
        limit_to_share(EngineConfig("m", data_parallel_size=2, tensor_parallel_size=2), 1, 2)


def test_which_environment_variables_are_forwarded() -> None:
    here = {
        "QUIRE_CACHE": "a",
        "HF_HOME": "b",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_DEBUG": "c",
        "MINE": "d",
        "HOME": "e",
    }
    assert forwarded(["MINE"], here) == {"QUIRE_CACHE": "a", "HF_HOME": "b", "NCCL_DEBUG": "c", "MINE": "d"}


def test_an_engine_without_a_gpu_plans_for_ranks_that_have_some(tiny_model: Path) -> None:
    """As on the head node of a cluster: a rank's memory can be estimated there."""
    files = local_files("m", tiny_model)
    config = EngineConfig(str(tiny_model), distributed_executor_backend="ray", tensor_parallel_size=2)
    limits = StepLimits(256, 8, 64)
    needs = estimate_needs(config, files, read_model_config(files), RemoteCudaPlatform({"H100"}), limits)
    alone = estimate_needs(EngineConfig("m"), files, read_model_config(files), RemoteCudaPlatform(), limits)
    assert 0.4 * alone.weight_bytes < needs.weight_bytes < 0.6 * alone.weight_bytes
    assert RemoteCudaPlatform({"H100", "H200"}).max_num_seqs > RemoteCudaPlatform({"H100", "T4"}).max_num_seqs
