"""The analytical model behind docs/scaling.md: its bytes are the engine's, its times match measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import scaling_model
from benchmarks.scaling_model import Card, Layout, Shape
from quire.distributed.groups import Ranks
from quire.loading.hub import resolve
from quire.loading.model_config import read_model_config
from tests.benchmarks.test_gpu_table import FOLDER
from tests.models.harness import PLAIN, PagedRun, Target, empty_model, loaded_model, random_reference
from tests.models.zoo import ZOO

META = Target("meta", PLAIN.ops, PLAIN.attention)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [scaling_model.LLAMA_8B, scaling_model.QWEN_30B], ids=lambda shape: shape.name)
def test_a_ranks_weights_match_the_engine(shape: Shape, tensor: int) -> None:
    config = read_model_config(resolve(str(FOLDER / "models" / shape.name.lower())))
    model = empty_model(config, Ranks(tp_size=tensor), target=META)
    counted = sum(weight.numel() for weight in model.parameters())
    assert 2 * counted == pytest.approx(scaling_model.weight_bytes(shape, Layout(tensor)), rel=2e-3), (
        "norms are left out"
    )


def test_a_steps_collectives_match_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_reference(ZOO["llama"])
    raw = reference.config
    shape = Shape(
        "tiny", raw.num_hidden_layers, raw.hidden_size, raw.num_attention_heads, raw.num_key_value_heads,
        raw.hidden_size // raw.num_attention_heads, raw.intermediate_size, raw.vocab_size,
    )  # fmt: skip
    sums: list[int] = []
    gathered: list[int] = []

    def all_reduce(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        sums.append(x.numel())
        return x

    def all_gather_last(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        gathered.append(x.numel())
        return torch.cat([x, x], -1)

    monkeypatch.setattr("quire.layers.linear.all_reduce", all_reduce)
    monkeypatch.setattr("quire.layers.embedding.all_reduce", all_reduce)
    monkeypatch.setattr("quire.layers.embedding.all_gather_last", all_gather_last)
    model = loaded_model(reference, Ranks(tp_size=2))
    PagedRun(model).step({"row": list(range(7))})
    assert 2 * sum(sums) == scaling_model.reduced_bytes(shape, 7)
    assert len(sums) == 2 * shape.layers + 1
    padded = -(-shape.vocab // 2) * 2
    assert 2 * sum(gathered) == scaling_model.gathered_bytes(replace(shape, vocab=padded), 7, 2)


def test_times_on_one_card_are_within_a_tenth_of_measurements() -> None:
    for name, measured, modelled in scaling_model.checks():
        assert modelled == pytest.approx(measured, rel=0.1), name


def test_more_cards_never_slow_a_single_request_of_a_large_model() -> None:
    card = Card()
    times = [
        scaling_model.step_seconds(scaling_model.LLAMA_70B, Layout(tensor), 1, 2048, card) for tensor in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_tokens_are_sent_to_other_ranks_once_each() -> None:
    shape = scaling_model.QWEN_235B
    whole = 2 * shape.layers * shape.hidden * scaling_model.BF16
    assert scaling_model.exchanged_bytes(shape, 1, 1) == 0
    assert scaling_model.exchanged_bytes(shape, 1, 2) == pytest.approx(whole * (1 - 0.5**8))
    assert scaling_model.exchanged_bytes(shape, 1, 10_000) == pytest.approx(8 * whole, rel=0.01), (
        "never twice to a rank"
    )
