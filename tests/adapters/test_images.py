"""Adapters of models that see: the text part is changed, images are not; against PEFT on transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from quire.adapters.peft_folder import read_adapter
from quire.messages.adapter_use import AdapterUse
from tests.vision.engine_harness import Case
from tests.vision.test_engine_families import PICTURES, make

__all__ = ["make"]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava"])
def test_an_image_with_and_without_an_adapter(make: Callable[[str], Case], tmp_path: Path, name: str) -> None:
    case = make(name)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj|down_proj)")
    base = case.sighted.reference
    tuned = get_peft_model(copy.deepcopy(base), config).eval()
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 3
    tuned.save_pretrained(str(tmp_path))
    use = AdapterUse("tuned", str(tmp_path), read_adapter(tmp_path, 8).digest)
    prompts = [case.prompt(PICTURES[:1], seed=1), case.prompt(PICTURES[:2], seed=2, before=30)]
    plain = [case.theirs(PICTURES[: i + 1], prompt) for i, prompt in enumerate(prompts)]
    case._answers.clear()
    case.sighted.reference = tuned
    changed = [case.theirs(PICTURES[: i + 1], prompt) for i, prompt in enumerate(prompts)]
    case.sighted.reference = base
    case._answers.clear()
    assert plain != changed
    engine = case.sighted.engine(**LORA)
    names: dict[tuple[int, bool], Any] = {}
    for again in range(2):  # the second time from the cache: each finds its own blocks
        for i, prompt in enumerate(prompts):
            for adapted in (False, True):
                names[i, adapted] = engine.add(prompt, 6, adapters=[use] if adapted else [])
        engine.run()
        for (i, adapted), request in names.items():
            assert engine.ends[request, 0].reason == "length", engine.ends[request, 0]
            assert engine.outputs[request, 0] == (changed if adapted else plain)[i]
            if again:
                assert engine.cached[request] == (len(prompts[i].tokens) - 1) // 16 * 16
    assert engine.stats.encoded == 2, "the encoder's cache is shared: adapters do not change what images are"
    engine.close()
