"""Adapters of every kind over tiny random models, written by PEFT: the models, the settings, and the folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def biased() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, attention_bias=True))


def tied() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=3))


def gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=False)
        self.up_proj = nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)


def single_experts() -> nn.Module:
    """Experts that are modules of their own, as models had them before transformers 5."""
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList(_Expert() for _ in range(3))
    return model


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (llama, {"target_modules": "all-linear", "lora_alpha": 12}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "rslora": (llama, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            # The second names less, and comes too late for what the first matches.
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 6},
            "alpha_pattern": {"self_attn.v_proj": 3, "layers.[01].*": 5},
        },
    ),
    "rslora patterns": (llama, {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"1.*": 3}}),
    "lora bias": (biased, {"target_modules": ["o_proj"], "lora_bias": True, "lora_alpha": 5}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True}),
    "dora embedding": (llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "embeddings": (llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied": (tied, {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [7, 2, 40]}),
    "tokens of two": (
        llama,
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [3]}},
    ),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "conv1d dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "conv1d saved": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["c_fc"]}),
    "biases": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "biases of lora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts patterns": (
        mixtral,
        {"target_modules": [], "target_parameters": EXPERTS, "rank_pattern": {"gate_up_proj": 2, "down_proj": 3}},
    ),
    "experts down": (mixtral, {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "experts up": (mixtral, {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    "router": (
        mixtral,
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"], "alpha_pattern": {"gate.weight": 3}},
    ),
    "single experts": (
        single_experts,
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "alpha_pattern": {"1.up_proj": 3}},
    ),
    "some experts": (single_experts, {"target_modules": ["0.gate_proj", "2.down_proj"], "rank_pattern": {"2.*": 2}}),
    "activated": (llama, {"target_modules": ["q_proj"], "alora_invocation_tokens": [9, 4], "task_type": "CAUSAL_LM"}),
}


def build(kind: str, seed: int = 0) -> PeftModel:
    """A model with an adapter of this kind, its values random."""
    make, settings = KINDS[kind]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(make(), LoraConfig(r=4, **settings))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn_like(parameter) / 8
            # A magnitude is a norm.
            parameter.data = parameter.data * (1 + noise.abs()) if "magnitude" in name else parameter.data + noise
    return model


def save(model: PeftModel, folder: Path, safetensors: bool = True) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder), safe_serialization=safetensors)
    if not safetensors and not (folder / "adapter_model.bin").exists():
        raise AssertionError("PEFT wrote no .bin")
    return folder


def load(kind: str, folder: Path, seed: int = 0) -> PeftModel:
    """The same base with the adapter that PEFT reads back from the folder: patterns are in the file's order there."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(KINDS[kind][0](), str(folder))
