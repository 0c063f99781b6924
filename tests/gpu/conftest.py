"""Engines on the device, checked to be idle and shut down after each test; and a transformers model as reference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from tests.conftest import assert_idle, write_tiny_model
from tests.gpu.near_ties import NearTies
from tests.gpu.target import DEVICE, SMALL_GROUPS, USUAL


@pytest.fixture(scope="session", autouse=True)
def full_float32() -> Iterator[None]:
    """float32 GEMMs in float32: TF32 has ten bits, too few for comparisons with transformers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    """The tiny model in transformers."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


@pytest.fixture
def ties(reference: Any) -> NearTies:
    return NearTies(reference)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups form where rows share a block or two."""
    for name, value in SMALL_GROUPS.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Engines with a test's own settings."""
    made: list[LLM] = []

    def make(model: str | Path = folder, **settings: Any) -> LLM:
        made.append(LLM(str(model), **(USUAL | settings)))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
        llm.shutdown()
    made.clear()
    gc.collect()
