"""Executors by name: the known ones, one given by a dotted path, and an unknown one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.base import ExecutorSpec, StartedExecutor
from quire.executor.local import LocalBackend
from quire.executor.null import NullExecutor
from quire.executor.registry import EXECUTORS, executor_backend

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class CountingBackend(LocalBackend):
    """A user's own executor: the local one, which counts how often it was started."""

    starts = 0

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        CountingBackend.starts += 1
        return super().start(spec)


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_name_resolves(name: str) -> None:
    backend = executor_backend(EngineConfig("m", distributed_executor_backend=name))
    assert backend.uses_local_devices == (name in ("uni", "mp"))


def test_the_null_executor_needs_no_weights(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(distributed_executor_backend="null", num_gpu_blocks_override=20)
    assert isinstance(llm.llm_engine.core._executor, NullExecutor)
    assert (llm.llm_engine.info.device, llm.llm_engine.info.num_blocks) == ("null", 20)
    assert [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], PARAMS)] == [[7] * 5] * 2


def test_an_executor_by_its_dotted_path(make_llm: Callable[..., LLM]) -> None:
    expected = make_llm().generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids
    llm = make_llm(distributed_executor_backend=f"{__name__}.CountingBackend")
    assert CountingBackend.starts == 1
    assert llm.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    "name, message",
    [
        ("slurm", "unknown executor backend 'slurm'; known: mp, null, ray, uni; or give a dotted path"),
        ("no_such_module.Backend", "executor backend 'no_such_module.Backend' cannot be imported"),
    ],
)
def test_an_unknown_executor_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        executor_backend(EngineConfig("m", distributed_executor_backend=name))
    assert caught.value.parameter == "distributed_executor_backend"
