"""Quantized models on a CUDA device: our kernels give the logits of the plain torch products."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.triton.quantized import base, experts, registry
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 320, "intermediate_size": 192,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED},
}  # fmt: skip
"""Experts in spans of 64 inputs, as gpt-oss-20b's."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def group(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }  # fmt: skip


def token(kind: str) -> dict[str, Any]:
    return group(8, kind, "token", dynamic=True)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "fp8": compressed("float-quantized", group(8, "float", "channel"), token("float")),
    "int8": compressed("int-quantized", group(8, "int", "channel"), token("int")),
    "fp8 blocks": BLOCKS,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq, act-order": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True},
    "int4 groups of 32": compressed("pack-quantized", group(4, "int", "group", group_size=32)),
    "mxfp4": compressed("mxfp4-pack-quantized", group(4, "float", "group", group_size=32)),
    "nvfp4": compressed("nvfp4-pack-quantized", group(4, "float", "tensor_group", group_size=16)),
}
PROMPTS = [[(5 * i + 3 * j) % 1000 + 3 for j in range(length)] for i, length in enumerate([1, 30, 200, 700])]


@contextmanager
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_KNOWN", {})
        patch.setattr(base, "quantized_experts", lambda *_, **__: None)
        patch.setattr(base, "goes_pair_by_pair", lambda *_: False)
        yield


def logprobs(folder: Path, **settings: Any) -> list[list[float]]:
    """The log-probability of every prompt token, and of the likeliest next one, in one batch and one by one."""
    llm = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True,
        gpu_memory_utilization=0.3, max_num_batched_tokens=2048, weight_copy_share=0.0, **settings,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, logprobs=0, detokenize=False)
    found = []
    for batch in (PROMPTS, *([prompt] for prompt in PROMPTS[:2])):
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False):
            own = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
            found.append(own + [next(iter(each.values())).logprob for each in output.outputs[0].logprobs[:1]])
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_kernels_give_the_logits_of_plain_torch(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "mixture" and "act-order" in name:
        pytest.skip("experts in act-order are refused")
    config = (LLAMA if family == "dense" else MIXTURE) | {"quantization_config": CHECKPOINTS[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = logprobs(tmp_path)
    with plain_torch(monkeypatch):
        plain = logprobs(tmp_path)
    pairs = [(a, b) for own, other in zip(ours, plain, strict=True) for a, b in zip(own, other, strict=True)]
    differences = sorted(abs(a - b) for a, b in pairs)
    # Sums in another order, and activations that round to another code; a router may choose another expert for a few.
    assert differences[len(differences) // 2] < 0.05, differences[-5:]
    assert differences[int(0.95 * len(differences))] < 0.3, differences[-5:]


def decoded(folder: Path, **settings: Any) -> tuple[list[list[int]], list[list[float]]]:
    """(tokens, log-probabilities) of twelve requests that decode together."""
    llm = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, gpu_memory_utilization=0.3,
        max_num_seqs=16, max_num_batched_tokens=256, **settings,
    )  # fmt: skip
    prompts = [[(7 * i + 3 * j) % 1000 + 3 for j in range(20 + 9 * i)] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.shutdown()
    own = [output.outputs[0] for output in outputs]
    return (
        [list(sample.token_ids) for sample in own],
        [[next(iter(each.values())).logprob for each in sample.logprobs] for sample in own],
    )


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("share", [0.0, 0.2], ids=["codes", "copies"])
def test_gpt_oss_on_hopper_gives_the_logits_of_plain_torch(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    used: list[int] = []
    kernel = experts._KERNELS["hopper"]

    def recorded(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        used.append(len(x))
        return kernel(x, *rest)

    monkeypatch.setitem(experts._KERNELS, "hopper", recorded)
    tokens, ours = decoded(tmp_path, weight_copy_share=share)  # decoding in captured graphs
    assert any(tokens <= 16 for tokens in used)
    assert share or any(tokens > 128 for tokens in used)
    with plain_torch(monkeypatch):
        others, plain = decoded(tmp_path, weight_copy_share=share, enforce_eager=True)
    differences = []
    for a, b, own, other in zip(tokens, others, ours, plain, strict=True):
        same = next((place for place in range(6) if a[place] != b[place]), 6)  # what follows another token differs
        differences += [abs(x - y) for x, y in zip(own[:same], other[:same], strict=True)]
    assert len(differences) > 36
    assert sorted(differences)[len(differences) // 2] < 0.05, sorted(differences)[-5:]


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_a_cache_of_few_bits_changes_logits_little(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    exact, found = logprobs(tmp_path), logprobs(tmp_path, kv_cache_dtype=name)
    differences = [abs(a - b) for own, other in zip(exact, found, strict=True) for a, b in zip(own, other, strict=True)]
    assert sorted(differences)[len(differences) // 2] < 0.05
