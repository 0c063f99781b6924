"""gpt-oss as it is published: experts in MXFP4, in a whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig

from quire import LLM, SamplingParams
from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.weights.fp4 import Fp4Weight
from quire.loading.model_config import ModelConfig
from tests.models.harness import empty_model, random_reference

CODES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 128,
}
PROMPTS = [[7, 30, 51, 9, 64, 80, 3, 21] * 4, [11, 90, 4], [60, 61, 62, 63, 64, 65, 66] * 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A published checkpoint, and the transformers model with the numbers it means."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    reference = random_reference(GptOssConfig(**CONFIG))
    random = torch.Generator().manual_seed(1)
    tensors = dict(reference.state_dict())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, height = tensors.pop(name).shape
        codes = torch.randint(0, 16, (count, height, width), generator=random)
        scales = torch.randint(122, 125, (count, height, width // 32), generator=random, dtype=torch.uint8)
        values = CODES[codes] * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)
        reference.get_parameter(name).data = values.transpose(1, 2).contiguous()
        blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks.unflatten(2, (-1, 16)).contiguous(), f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    described = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    raw = GptOssConfig(**CONFIG).to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, reference


@torch.no_grad()
def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(reference(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}])
def test_the_published_format_stays_packed_and_gives_the_tokens_it_means(
    checkpoint: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    folder, reference = checkpoint
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(
        str(folder), dtype="float32", device="cpu", num_gpu_blocks_override=64, skip_tokenizer_init=True, **settings
    ) as llm:
        for _ in range(2):  # the second time from cached prefixes
            for prompt, result in zip(PROMPTS, llm.generate(asked, sampling), strict=True):
                assert list(result.outputs[0].token_ids) == greedy(reference, prompt, 12)


def test_experts_are_kept_in_four_bits(checkpoint: tuple[Path, Any]) -> None:
    from quire.quantization.schemes.mxfp4 import Mxfp4Scheme

    folder, _ = checkpoint
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    model = empty_model(config, scheme=Mxfp4Scheme(config.raw["quantization_config"]))
    held = model.model.layers["0"].mlp
    assert isinstance(held.gate_up, Fp4Weight) and isinstance(held.down, Fp4Weight)
    assert held.gate_up.shape == (4, 192, 64) and held.down.shape == (4, 64, 96)
    assert [cache.window for cache in model.caches] == [8, None, 8]


def test_groups_that_ranks_would_cut_are_refused(checkpoint: tuple[Path, Any]) -> None:
    from quire.distributed.groups import Ranks
    from quire.layers.build_context import collect_targets
    from quire.quantization.schemes.mxfp4 import Mxfp4Scheme

    raw = json.loads((checkpoint[0] / "config.json").read_text())
    model = empty_model(ModelConfig.from_dict(raw), Ranks(tp_size=2), scheme=Mxfp4Scheme(raw["quantization_config"]))
    with pytest.raises(ConfigError, match="down_proj .* 2 tensor-parallel ranks"):
        collect_targets(model)


@pytest.mark.parametrize("change", [{"swiglu_limit": 6.0}, {"swiglu_alpha": 1.0}])
def test_other_activations_are_refused(checkpoint: tuple[Path, Any], change: dict[str, Any]) -> None:
    raw = json.loads((checkpoint[0] / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        empty_model(ModelConfig.from_dict(raw | change))
