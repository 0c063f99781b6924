"""What is not implemented is refused by name, before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from quire.errors import UnsupportedModelError, ValidationError
from quire.loading.model_config import ModelConfig
from quire.models import registry
from tests.models.harness import empty_model
from tests.models.zoo import ZOO

ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt-neox": "GPTNeoXForCausalLM", "gpt2": "GPT2LMHeadModel"}


def config(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(ZOO[name].to_dict() | {"architectures": [ARCHITECTURES[name]]} | changes)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("gpt-neox", {"hidden_act": "xielu"}, "xielu"),
        ("gpt2", {"activation_function": "xielu"}, "xielu"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_features_that_are_not_implemented(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        empty_model(config(name, **changes))


def test_gpt2_cannot_be_longer_than_its_positions() -> None:
    with pytest.raises(ValidationError, match=r"65.*64 positions"):
        empty_model(config("gpt2"), max_model_len=65)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'NoSuchLM'.*LlamaForCausalLM"):
        registry.model_class("NoSuchLM")


def test_an_architecture_can_be_registered_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    registry.register("MyLM", "torch.nn.Linear")
    assert registry.model_class("MyLM") is nn.Linear
    assert "MyLM" in registry.supported()
