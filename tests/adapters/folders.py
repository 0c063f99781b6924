"""Small adapter folders written by hand, to spoil in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors(rank: int = 4, width: int = 32) -> dict[str, Tensor]:
    return {f"{Q}.lora_A.weight": torch.randn(rank, width), f"{Q}.lora_B.weight": torch.randn(width, rank)}


def write(folder: Path, changed: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    """A folder with the tensors above, or with `changed`, and these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if changed is None else changed, folder / "adapter_model.safetensors")
    return folder
