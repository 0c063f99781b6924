"""The base model and LoRA adapters of it in one batch. `python adapters.py FOLDER …` uses your own adapters."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams


def random_adapter(folder: Path, llm: LLM) -> str:
    """An adapter of the first layer's queries, in the files that PEFT would write."""
    model, name = llm.llm_engine.info.model, "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.randn(8, model.hidden_size) / 4, torch.randn(model.num_heads * model.head_dim, 8) / 4
    folder.mkdir()
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    return str(folder)


def main(*folders: str, max_tokens: int = 16, **settings) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with tempfile.TemporaryDirectory() as made, LLM(enable_lora=True, **settings) as llm:
        paths = folders or [random_adapter(Path(made) / name, llm) for name in ("first", "second")]
        adapters = [LoRARequest(Path(path).name, number, path) for number, path in enumerate(paths, 1)]
        halves = [LoRARequest(one.name, one.lora_int_id, one.path, weight=0.5) for one in adapters]
        choices = {"base": None, **{one.name: one for one in adapters}, "half of each": halves}
        loras = list(choices.values())
        outputs = llm.generate(["Once upon a time"] * len(loras), params, lora_request=loras, use_tqdm=False)
        for name, output in zip(choices, outputs, strict=True):
            print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
