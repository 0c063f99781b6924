"""The memory plan: parts sum to the total, the cache gets the rest, and what does not fit is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from quire import LLM
from quire.config import EngineConfig
from quire.engine import setup
from quire.errors import CacheTooSmallError, ModelTooLargeError
from quire.executor import local as workers
from quire.loading.hub import resolve
from quire.loading.model_config import read_model_config
from quire.messages.media import EncoderLimits
from quire.messages.speculation import DeviceDrafts
from quire.platforms.cpu import CpuPlatform
from quire.worker.memory import KEPT_FREE, MemoryNeeds, gib, profile_activations

GIB = 2**30
NEEDS = MemoryNeeds(
    dtype=torch.bfloat16,
    parameters=8 * 10**9,
    weight_bytes=16 * GIB,
    block_bytes=2 * 2**20,
    activation_bytes=2 * GIB,
    most_blocks=10**6,
    step_tokens=8192,
    step_rows=256,
)


class FakeGpu(CpuPlatform):
    """A card with `total` GiB, of which `free` are free. It computes on the CPU."""

    ops = "quire.kernels.reference.TorchOps"
    attention = "torch"

    def __init__(self, total: float = 80, free: float = 79, device: str = "cuda") -> None:
        self.device = torch.device(device)  # type: ignore[misc]
        self._total, self._free = int(total * GIB), int(free * GIB)

    def describe(self) -> str:
        return "Test Card"

    def free_memory(self) -> int:
        return self._free

    def total_memory(self) -> int:
        return self._total


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"gpu_memory_utilization": 0.9, **settings})


def test_the_cache_gets_what_weights_activations_and_reserve_leave_of_the_share() -> None:
    platform = FakeGpu()
    plan = NEEDS.plan(config(), platform, platform.free_memory(), int(62.5 * GIB))
    allowed = 0.9 * 80 * GIB
    taken = 79 * GIB - int(62.5 * GIB)
    assert plan.loaded == taken - NEEDS.weight_bytes == GIB // 2
    left = allowed - taken - NEEDS.activation_bytes - NEEDS.reserve_bytes
    assert left - NEEDS.block_bytes < plan.cache <= left
    assert plan.cache == plan.num_blocks * NEEDS.block_bytes
    assert plan.before == GIB
    assert plan.free == pytest.approx(0.1 * 80 * GIB - GIB, abs=2 * NEEDS.block_bytes)


@pytest.mark.parametrize("now", [None, 60])
@pytest.mark.parametrize("free", [79, 40])
def test_the_parts_sum_up_to_the_whole(now: int | None, free: int) -> None:
    platform = FakeGpu(free=free)
    plan = NEEDS.plan(config(), platform, platform.free_memory(), None if now is None else (free - 17) * GIB)
    parts = (plan.before, plan.weights, plan.loaded, plan.activations, plan.reserve, plan.cache, plan.free)
    assert sum(parts) == plan.total and all(part >= 0 for part in parts)


def test_memory_used_by_others_and_the_last_bytes_are_not_used() -> None:
    platform = FakeGpu(free=40)
    plan = NEEDS.plan(config(), platform, platform.free_memory())
    assert plan.free == pytest.approx(KEPT_FREE * plan.total, abs=2 * NEEDS.block_bytes)


def test_two_engines_can_share_a_card() -> None:
    first = NEEDS.plan(config(gpu_memory_utilization=0.45), FakeGpu(), 79 * GIB)
    left = first.free + first.reserve + first.activations
    second = NEEDS.plan(config(gpu_memory_utilization=0.45), FakeGpu(free=left / GIB), left)
    assert second.cache == pytest.approx(first.cache, rel=0.05)


def test_explicit_sizes_win() -> None:
    assert NEEDS.plan(config(num_gpu_blocks_override=7), FakeGpu(), 79 * GIB).num_blocks == 8
    assert NEEDS.plan(config(kv_cache_memory_bytes=GIB), FakeGpu(), 79 * GIB).cache == GIB


def test_no_more_blocks_than_the_rows_could_fill() -> None:
    few = MemoryNeeds(**{**vars(NEEDS), "most_blocks": 100})
    assert few.plan(config(), FakeGpu(), 79 * GIB).num_blocks == 100


def test_a_measured_step_replaces_the_estimate() -> None:
    measured = NEEDS.measured(5 * GIB)
    assert (measured.activation_bytes, measured.is_measured) == (5 * GIB, True)
    assert NEEDS.measured(0) is NEEDS
    assert "measured, 8,192 tokens" in str(measured.plan(config(), FakeGpu(), 79 * GIB))
    assert "estimated, 8,192 tokens" in str(NEEDS.plan(config(), FakeGpu(), 79 * GIB))


def test_the_table_names_every_part_in_columns() -> None:
    text = str(NEEDS.plan(config(), FakeGpu(), 79 * GIB, 62 * GIB))
    lines = text.splitlines()
    for part in ("total", "in use before", "weights", "kernels", "activations", "reserve", "KV cache", "free"):
        assert any(part in line for line in lines), part
    assert len({line.index("GiB") for line in lines}) == 1
    assert "gpu_memory_utilization is 0.9" in text


# What does not fit


@pytest.mark.parametrize("check", ["plan", "check_weights"])
def test_weights_that_do_not_fit_are_refused_with_a_remedy(check: str) -> None:
    platform = FakeGpu(total=15.9, free=14.2)
    with pytest.raises(ModelTooLargeError) as caught:
        getattr(NEEDS, check)(config(), platform, platform.free_memory())
    message = str(caught.value)
    assert "the weights need 16.00 GiB" in message
    assert "14.20 GiB of 15.90 GiB are free" in message
    assert "a GPU with at least 22 GiB" in message
    assert "\n" not in message


def test_float32_weights_are_advised_a_smaller_dtype() -> None:
    wide = MemoryNeeds(**{**vars(NEEDS), "dtype": torch.float32})
    with pytest.raises(ModelTooLargeError, match="use dtype bfloat16"):
        wide.check_weights(config(), FakeGpu(16, 15), 15 * GIB)


def test_no_room_for_a_cache_names_the_settings_that_help() -> None:
    platform = FakeGpu(total=20, free=19)
    NEEDS.check_weights(config(), platform, platform.free_memory())
    with pytest.raises(ModelTooLargeError, match="leave no room for a KV cache") as caught:
        NEEDS.plan(config(), platform, platform.free_memory())
    for setting in ("max_num_batched_tokens (8192)", "max_num_seqs (256)", "max_model_len", "gpu_memory_utilization"):
        assert setting in str(caught.value)


def test_a_card_of_the_advised_size_is_enough() -> None:
    platform = FakeGpu(total=22, free=21.9)
    assert NEEDS.plan(config(), platform, platform.free_memory()).num_blocks >= 2


def test_an_explicit_size_below_two_blocks_is_refused() -> None:
    with pytest.raises(CacheTooSmallError, match="two are needed"):
        NEEDS.plan(config(kv_cache_memory_bytes=NEEDS.block_bytes), FakeGpu(), 79 * GIB)


# In the engine


@pytest.fixture
def tiny(tiny_model: Path) -> tuple[EngineConfig, Any, Any]:
    settings = EngineConfig(model=str(tiny_model), num_gpu_blocks_override=16)
    files = resolve(settings.model)
    return settings, files, read_model_config(files)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    tiny: tuple[EngineConfig, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.LocalBackend, "choose_platform", lambda self, config: FakeGpu(total=1e-4, free=9e-5))
    monkeypatch.setattr(workers, "Worker", lambda *arguments: pytest.fail("the model was loaded"))
    with pytest.raises(ModelTooLargeError, match="the weights need"):
        setup.make_engine(*tiny)


@pytest.mark.parametrize(
    ("where", "message"), [("load", "a first step tried"), ("cache", "with a KV cache of 0.00 GiB")]
)
def test_out_of_memory_at_start_is_one_line(
    tiny: tuple[EngineConfig, Any, Any], monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    class Unlucky:
        needs = NEEDS

        def __init__(self, *arguments: Any, **more: Any) -> None:
            self._fail("load")

        def make_cache(self, num_blocks: int) -> None:
            self._fail("cache")

        def _fail(self, at: str) -> None:
            if at == where:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(workers.LocalBackend, "choose_platform", lambda self, config: FakeGpu())
    monkeypatch.setattr(workers, "Worker", Unlucky)
    with pytest.raises(ModelTooLargeError, match="out of memory on Test Card") as caught:
        setup.make_engine(*tiny)
    assert message.replace("0.00", f"{17 * NEEDS.block_bytes / GIB:.2f}") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_is_logged_on_a_gpu(
    tiny: tuple[EngineConfig, Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Idle:
        needs = NEEDS
        reads_groups = False
        mover = None
        drafts = DeviceDrafts()
        limits = EncoderLimits()
        phases: ClassVar[dict[str, float]] = {"weights": 1.25}

        def __init__(self, *arguments: Any, **more: Any) -> None:
            pass

        def make_cache(self, num_blocks: int) -> None:
            pass

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(workers.LocalBackend, "choose_platform", lambda self, config: FakeGpu())
    monkeypatch.setattr(workers, "Worker", Idle)
    with caplog.at_level(logging.INFO):
        core, info = setup.make_engine(*tiny)
    core.shutdown()
    assert f"memory of Test Card:\n{info.memory}" in caplog.text


def test_on_a_cpu_the_plan_is_kept_with_the_engine_info(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        llm = make_llm()
    assert "memory of" not in caplog.text, "memory of a CPU is not planned"
    memory = llm.llm_engine.info.memory
    assert memory.num_blocks - 1 == llm.llm_engine.info.num_blocks == 128
    assert memory.cache == llm.llm_engine.info.kv_bytes


# Measuring a step


def test_a_cpu_is_not_measured() -> None:
    assert profile_activations(lambda: pytest.fail("a step was run"), torch.device("cpu")) == 0


def test_a_step_is_measured_relative_to_the_memory_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    allocated, peak = [100, 350], [0, 900]

    def note(name: str) -> Callable[..., None]:
        return lambda *arguments: calls.append(name)

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, note(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["step" in calls])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["step" in calls])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1024)
    assert profile_activations(note("step"), torch.device("cuda")) == max(900 - 100, 1024 - 200)
    before, after = calls[: calls.index("step")], calls[calls.index("step") + 1 :]
    assert before[-1] == "reset_peak_memory_stats" and after[0] == "synchronize", calls


def test_sizes_are_readable() -> None:
    assert [gib(size) for size in (0, 5 * 2**20, GIB // 2, 3 * GIB)] == ["0.00 GiB", "5.0 MiB", "0.50 GiB", "3.00 GiB"]
