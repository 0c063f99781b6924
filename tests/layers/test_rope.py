"""The table's shape and sharing; its values are pinned, type by type, by the models' comparison with transformers."""

from __future__ import annotations

import torch

from quire.layers.attention.layer import Attention
from quire.loading.model_config import ModelConfig
from tests.models.harness import empty_model
from tests.models.zoo import ZOO


def model(name: str, architecture: str, **changes: object) -> torch.nn.Module:
    config = ModelConfig.from_dict(ZOO[name].to_dict() | {"architectures": [architecture]} | changes)
    return empty_model(config, max_model_len=40)


def tables(built: torch.nn.Module) -> list[torch.Tensor]:
    return [module.cos_sin for module in built.modules() if isinstance(module, Attention)]


def test_one_table_serves_all_layers() -> None:
    found = tables(model("llama", "LlamaForCausalLM"))
    assert len(found) == 2
    assert found[0] is found[1]
    assert found[0].shape == (40, 8)
    assert found[0].dtype == torch.float32


def test_position_zero_is_not_rotated() -> None:
    table = tables(model("llama", "LlamaForCausalLM"))[0]
    torch.testing.assert_close(table[0], torch.tensor([1.0] * 4 + [0.0] * 4))


def test_neox_rotates_a_quarter_of_each_head_by_default() -> None:
    old = {"rope_parameters": None, "rotary_emb_base": 10000}
    assert tables(model("gpt-neox", "GPTNeoXForCausalLM", **old))[0].shape == (40, 4)
    assert tables(model("gpt-neox", "GPTNeoXForCausalLM", **old, rotary_pct=0.5))[0].shape == (40, 8)


def test_a_dynamic_row_does_not_depend_on_the_tables_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    config = ModelConfig.from_dict(
        ZOO["llama"].to_dict()
        | {"architectures": ["LlamaForCausalLM"], "rope_parameters": rope, "max_position_embeddings": 8}
    )
    short, long = (tables(empty_model(config, max_model_len=n))[0] for n in (20, 40))
    torch.testing.assert_close(short, long[:20], rtol=1e-5, atol=1e-5)
