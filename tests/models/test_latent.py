"""Latent attention and DeepSeek's mixtures: the engine, GPU kernels, FP8 checkpoints, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError, UnsupportedModelError, ValidationError
from quire.kernels.weights.scaled import BlockScaledWeight
from quire.layers.attention.triton import TritonPagedAttention
from quire.layers.build_context import collect_targets
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig, read_model_config
from quire.quantization.schemes.registry import scheme_of
from tests.conftest import tiny_tokenizer
from tests.models.harness import (
    Target,
    assert_same,
    empty_model,
    in_chunks,
    loaded_model,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.zoo import ZOO
from tests.quantization.checkpoints import blocks, change_config

TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek V3 with a tokenizer."""
    config = ZOO["deepseek-v3"].to_dict() | {"vocab_size": 128, "max_position_embeddings": 256, "attention_bias": False}
    path = tmp_path_factory.mktemp("deepseek")
    random_reference(type(ZOO["deepseek-v3"])(**config)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_greedy_text_equals_transformers_with_and_without_a_prefix_hit(
    folder: Path, make_llm: Callable[..., LLM]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = make_llm(folder, max_num_batched_tokens=24, max_num_seqs=8)
    prompts = [torch.randint(4, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (50, 9, 33)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for attempt in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            ours = list(output.outputs[0].token_ids)
            logits = reference_logits(reference, [*prompt, *ours])[len(prompt) - 1 : -1]
            assert (logits.max(dim=-1).values - logits[range(12), ours] < 1e-3).all()  # the best, or as good
            assert (output.num_cached_tokens > 0) == (attempt > 0 and len(prompt) > 16)


def test_caches_in_few_bits_are_refused(folder: Path, make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 is not implemented for latent attention"):
        make_llm(folder, kv_cache_dtype="fp8")


def test_the_gpu_kernels_equal_transformers() -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton.ops import TritonOps
    from tests.kernels.triton_target import DEVICE

    config = ZOO["deepseek-v2-lite"].to_dict() | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    reference = random_reference(type(ZOO["deepseek-v2-lite"])(**config))
    ours = loaded_model(reference, target=Target(DEVICE, TritonOps, TritonPagedAttention))
    # A prompt, a chunk that attends to it, a decode.
    assert_same(in_chunks(ours, TOKENS[:11], 5), reference_logits(reference, TOKENS[:11]))


# FP8 checkpoints of V3's form


def write_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Turn a checkpoint's matrices into FP8 with block scales; returns what they mean."""
    description = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    stored: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            stored[name] = means[name] = tensor
            continue
        parts, means[name] = blocks(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{key}": part for key, part in parts.items()}
    layers = 3
    stored[f"model.layers.{layers}.eh_proj.weight"] = torch.zeros(2, 2)  # of the layer for multi-token prediction
    save_file(stored, path / "model.safetensors")
    change_config(path, quantization_config=description, num_nextn_predict_layers=1)
    return means


def test_fp8_checkpoints_of_published_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounded activations flip the choice of experts in so small a model: that they are rounded is tested elsewhere.
    monkeypatch.setattr(BlockScaledWeight, "quantize_input", lambda self, x: x.float())
    config = ZOO["deepseek-v3"].to_dict() | {"attention_bias": False}
    reference = random_reference(type(ZOO["deepseek-v3"])(**config))
    reference.save_pretrained(tmp_path)
    means = write_fp8(tmp_path)
    files = local_files("m", tmp_path)
    shape = read_model_config(files)
    ours = empty_model(shape, scheme=scheme_of(shape.raw))
    targets = collect_targets(ours)
    load_weights(targets, ours.ignores, open_checkpoint(files, targets=targets), progress=False)
    attention = ours.model.layers["1"].self_attn
    up = means["model.layers.1.self_attn.kv_b_proj.weight"]
    assert torch.equal(attention.kv_b_proj.weight.flatten(0, 1), up)
    assert ours.model.layers["1"].mlp.shared_experts is not None
    meant = type(reference).from_pretrained(None, config=reference.config, state_dict=means).eval()
    assert_same(in_chunks(ours, TOKENS, 9), reference_logits(meant, TOKENS))


# Refusals


def changed(name: str, **changes: Any) -> ModelConfig:
    config = model_config(random_reference(ZOO[name]))
    return ModelConfig.from_dict({**config.raw, "architectures": [config.architecture], **changes})


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("deepseek-v3", {"index_topk": 2048}, UnsupportedModelError, "index_topk"),
        ("deepseek-v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func 'softmax'"),
        ("deepseek-v3", {"n_group": 3}, ValidationError, "8 experts in n_group = 3 groups"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob"),
        ("deepseek-v2-lite", {"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ("deepseek-v3", {"kv_lora_rank": None}, ValidationError, "kv_lora_rank"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    name: str, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        empty_model(changed(name, **changes))


def test_a_batch_invariant_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant is not implemented for latent attention"):
        empty_model(changed("deepseek-v3"), target=Target(attention=lambda: TritonPagedAttention(batch_invariant=True)))


def test_only_layers_for_multi_token_prediction_are_ignored() -> None:
    model = empty_model(changed("deepseek-v3", num_nextn_predict_layers=1))
    assert model.ignores("model.layers.3.self_attn.q_a_proj.weight")
    assert not model.ignores("model.layers.4.self_attn.q_a_proj.weight")
    assert not model.ignores("model.layers.2.self_attn.surprise.weight")
