"""A platform is found by its name or its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.platforms import choose
from quire.platforms.base import PlatformUnavailableError
from quire.platforms.cpu import CpuPlatform


class PlainCpu(CpuPlatform):
    """A platform that is in no registry."""

    ops = "quire.kernels.reference.TorchOps"
    attention = "torch"


class Missing(CpuPlatform):
    def __init__(self) -> None:
        raise PlatformUnavailableError("there is no such card")


def test_a_platform_by_name_and_by_path() -> None:
    assert isinstance(choose("cpu"), CpuPlatform)
    assert isinstance(choose("quire.platforms.cpu.CpuPlatform"), CpuPlatform)


def test_an_engine_runs_on_a_custom_platform(tiny_model: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(tiny_model), device=f"{__name__}.PlainCpu", dtype="float32", num_gpu_blocks_override=64) as own:
        ((ours,), (theirs,)) = (engine.generate([[1, 2, 3]], params, use_tqdm=False) for engine in (own, llm))
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_an_unknown_platform_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="device 'tpu'; known: cpu, cuda; or give a dotted path") as caught:
        choose("tpu")
    assert caught.value.value == "tpu"


def test_a_missing_platform_says_why() -> None:
    with pytest.raises(ConfigError, match="Missing', but there is no such card; device='cpu' runs") as caught:
        choose(f"{__name__}.Missing")
    assert caught.value.parameter == "device"
