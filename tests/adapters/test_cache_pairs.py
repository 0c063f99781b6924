"""Adapters of models with latent attention and with recurrent states, and over keys in 8 bits: against PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from quire.messages.lora import LoRARequest
from tests.adapters.beside_peft import Base, check, greedy
from tests.adapters.folders import write
from tests.adapters.zoo import PROMPTS, SHAPE
from tests.conftest import assert_idle
from tests.engine.test_kv_formats import QuantizedCache
from tests.models.test_hybrids import HYBRIDS
from tests.models.zoo import ZOO

LONG = [(11 * i * i + 5 * i + 3) % 97 for i in range(37)]
MODELS = {
    "deepseek-v2-lite": (ZOO, [["q_proj", "o_proj"], ["kv_a_proj_with_mqa", "o_proj"]]),
    "qwen3.5": (HYBRIDS, [["q_proj", "o_proj", "down_proj"], ["in_proj_qkv", "out_proj", "up_proj"]]),
    "lfm2": (HYBRIDS, [["q_proj", "v_proj"], ["in_proj", "w1"]]),
    "nemotron-3-latent": (HYBRIDS, [["q_proj", "v_proj"], ["in_proj", "fc1_latent_proj", "shared_experts.down_proj"]]),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_caches(name: str, tmp_path: Path) -> None:
    """Two adapters and none in one batch, in chunks, then with prefix hits."""
    configs, targets = MODELS[name]
    base = Base(tmp_path, copy.deepcopy(configs[name]))
    for number, modules in enumerate(targets):
        base.adapter(f"adapter{number}", target_modules=modules)
    names = [*base.loras, None]
    with base.llm(max_num_batched_tokens=16, num_gpu_blocks_override=256, block_size=8) as llm:
        for _ in range(2):
            check(base, llm, names, [LONG, PROMPTS[0]], 5)
        (output,) = llm.generate([{"prompt_token_ids": LONG}], greedy(5), lora_request=base.loras["adapter0"])
        assert output.num_cached_tokens == 32
        assert_idle(llm)


def test_changes_of_up_proj_of_experts_without_gates_are_refused(tmp_path: Path) -> None:
    base = Base(tmp_path, copy.deepcopy(HYBRIDS["nemotron-3"]))
    name = "base_model.model.backbone.layers.1.mixer.experts.0.up_proj"
    tensors = {f"{name}.lora_A.weight": torch.randn(4, 32), f"{name}.lora_B.weight": torch.randn(20, 4)}
    folder = write(tmp_path / "adapter", tensors, target_modules=["up_proj"])
    with base.llm() as llm:
        (output,) = llm.generate([{"prompt_token_ids": LONG}], greedy(3), lora_request=LoRARequest("a", 1, str(folder)))
    assert "layers.1.mixer.experts, which have no gates" in str(output.error)


@pytest.mark.parametrize("kind", ["fp8_per_token_head", "int8_per_token_head"])
def test_keys_in_8_bits(kind: str, tmp_path: Path) -> None:
    """PEFT runs with keys and values that pass through the same codes."""
    base = Base(tmp_path, LlamaConfig(**SHAPE))
    for name, modules in {"one": ["q_proj", "k_proj"], "other": ["v_proj", "down_proj"]}.items():
        base.adapter(name, target_modules=modules)
    names = ["one", None, "other"]
    loras = [base.loras.get(name or "") for name in names]
    with base.llm(kv_cache_dtype=kind, max_num_batched_tokens=16) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": LONG}] * 3, greedy(5), lora_request=loras)
            for name, output in zip(names, outputs, strict=True):
                _assert_near(base, name, output, kind)
        assert_idle(llm)


@torch.no_grad()
def _assert_near(base: Base, name: str | None, output: Any, kind: str) -> None:
    model = base.reference if name is None else base._tuned[name]
    (sample,) = output.outputs
    tokens = torch.tensor([[*output.prompt_token_ids, *sample.token_ids]])
    logits = model(input_ids=tokens, past_key_values=QuantizedCache(kind), use_cache=True).logits[0]
    expected = logits.float().log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    for place, (token, found) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        # A value at the edge of two codes may take either.
        assert abs(found[token].logprob - float(expected[place, token])) < 0.05, (name, place)
        assert float(expected[place].max() - expected[place, token]) < 0.1, (name, place)
