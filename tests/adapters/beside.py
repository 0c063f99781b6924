"""What PEFT and transformers generate with adapters, to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class Beside:
    """A model's folder, and adapters of it that PEFT writes under `root`."""

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self.root = model, root
        self._scales: dict[str, float] = {}

    def write(self, name: str, seed: int = 0, size: float = 0.3, **settings: Any) -> Path:
        """An adapter of rank 4 with random values."""
        torch.manual_seed(seed + len(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.model), LoraConfig(r=4, **settings))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += torch.randn_like(parameter) * size
            model.save_pretrained(str(self.root / name))
        self._scales[name] = settings.get("lora_alpha", 8) / 4
        return self.root / name

    def tokens(self, prompt: list[int], count: int, weights: Mapping[str, float]) -> list[int]:
        """The greedy continuation."""
        model = self.model_with(weights)
        given = torch.tensor([prompt])
        found = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens

    def model_with(self, weights: Mapping[str, float]) -> Any:
        """The model with adapters added to its weights: scale · weight · B A each."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        for name, weight in weights.items():
            tensors = load_file(self.root / name / "adapter_model.safetensors")
            for key in (key for key in tensors if key.endswith("lora_A.weight")):
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[key.replace("lora_A", "lora_B")]
                model.get_submodule(module).weight.data += self._scales[name] * weight * (b @ tensors[key])
        return model
