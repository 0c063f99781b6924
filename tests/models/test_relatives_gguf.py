"""Relatives of Llama from GGUF files: the names are the gguf package's, the layouts those of llama.cpp's converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import MODEL_ARCH_NAMES

from quire.layers.build_context import collect_targets, quantized_weights
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights
from quire.loading.model_config import read_model_config
from quire.quantization.schemes.gguf import GGUFScheme
from tests.models.harness import (
    assert_same,
    checkpoint_tensors,
    empty_model,
    in_chunks,
    random_reference,
    reference_logits,
)
from tests.models.relatives import RELATIVES, longrope
from tests.models.test_against_transformers import PROMPTS
from tests.models.zoo import ZOO

FAMILIES = {
    "phi3": "phi3",
    "phi4-mini": "phi3",
    "granite": "granite",
    "granite-moe": "granitemoe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "cohere-qk-norm-tied": "command-r",
    "cohere2": "cohere2",
    "smollm3-gguf": "smollm3",
    "starcoder2-gguf": "starcoder2",
    "stablelm": "stablelm",
    "stablelm-parallel": "stablelm",
    "falcon-7b": "falcon",
    "falcon-11b": "falcon",
    "longrope": "phi3",
    "gemma-2": "gemma2",
    "gemma-3": "gemma3",
    "gemma-3-marked": "gemma3",
}
# llama.cpp's files do not have the scale of attention: it is that of the head size.
GEMMAS = {
    "gemma-2": ZOO["gemma-2"].to_dict() | {"query_pre_attn_scalar": 12},
    "gemma-3": ZOO["gemma-3"].to_dict()
    | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "final_logit_softcapping": 5.0}
    | {"layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
    "gemma-3-marked": ZOO["gemma-3"].to_dict() | {"query_pre_attn_scalar": 16},
}


def changed(name: str, **changes: Any) -> Any:
    return type(RELATIVES[name])(**(RELATIVES[name].to_dict() | changes))


def config_of(name: str) -> Any:
    if name == "longrope":
        return longrope()
    if name in GEMMAS:
        return type(ZOO[name.removesuffix("-marked")])(**GEMMAS[name])
    if name == "cohere-qk-norm-tied":
        return changed("cohere-qk-norm", tie_word_embeddings=True, attention_bias=False)
    if name == "smollm3-gguf":  # llama.cpp knows no other places of the layers without positions
        return changed("smollm3-windows", use_sliding_window=False, layer_types=None, attention_bias=False)
    if name == "starcoder2-gguf":  # and no windows of StarCoder 2
        return changed("starcoder2", sliding_window=None)
    if name == "stablelm-parallel":
        return changed("stablelm-12b", qk_layernorm=False)
    return RELATIVES[name]


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows with the two halves of each rotary pair side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def q_then_k_then_v(weight: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    groups = weight.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
    return torch.cat([groups[:, part].flatten(0, 2) for part in (slice(0, -2), slice(-2, -1), slice(-1, None))])


def write(path: Path, reference: Any, arch: str, encoding: Kind = Kind.F32) -> None:
    config, kind = reference.config, next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or (
        config.num_kv_heads if config.new_decoder_architecture else 1
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.ffn_hidden_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(reference.model.rotary_emb.attention_scaling)
        for length in ("short", "long"):
            factors = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors.numpy())
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch.startswith("gemma"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if arch == "olmo2" or (arch == "gemma3" and config.num_hidden_layers < 6):
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    if hasattr(config, "residual_multiplier"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "granitemoe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in checkpoint_tensors(reference).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in ("granite", "granitemoe", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            tensor = paired(tensor, heads if ".q_proj." in name else kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if "query_key_value" in name:
            tensor = q_then_k_then_v(tensor, heads, kv_heads)
        stored = {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor}
        if "block_sparse_moe" in name:
            stem = f"blk.{name.split('.')[2]}."
            if name.endswith("gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                stored = {f"{stem}ffn_gate_exps.weight": gate, f"{stem}ffn_up_exps.weight": up}
            else:
                place = "ffn_gate_inp" if "router" in name else "ffn_down_exps"
                stored = {f"{stem}{place}.weight": tensor}
        for own, part in stored.items():
            assert own is not None, name
            values = part.detach().float().contiguous().numpy()
            is_packed = encoding != Kind.F32 and values.ndim > 1 and values.shape[-1] % 32 == 0
            packed = gguf.quantize(values, encoding) if is_packed and "norm" not in own else values
            writer.add_tensor(own, packed, raw_dtype=None if packed is values else encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    reference = random_reference(config_of(name))
    path = tmp_path / "model.gguf"
    write(path, reference, FAMILIES[name])
    config = read_model_config(local_files("m", path))
    ours = empty_model(config, max_model_len=64)
    load_weights(collect_targets(ours), ours.ignores, GGUFCheckpoint(path), progress=False)
    assert_same(in_chunks(ours, PROMPTS["long"], 11), reference_logits(reference, PROMPTS["long"]))


@pytest.mark.parametrize(
    "name", ["cohere", "cohere2", "gemma-2", "phi3", "granite-moe", "falcon-7b", "falcon-11b", "starcoder2-gguf"]
)
def test_packed_matrices_give_the_logits_of_the_dequantized_ones(name: str, tmp_path: Path) -> None:
    """Also those whose rows are in another order than the kernels need, and parts of one matrix."""
    path = tmp_path / "model.gguf"
    write(path, random_reference(config_of(name)), FAMILIES[name], Kind.Q8_0)
    config = read_model_config(local_files("m", path))
    models = [empty_model(config, scheme=scheme) for scheme in (GGUFScheme(GGUFCheckpoint(path)), None)]
    for model in models:
        load_weights(collect_targets(model), model.ignores, GGUFCheckpoint(path), progress=False)
    assert len(quantized_weights(models[0])) >= 3
    packed, plain = (in_chunks(model, PROMPTS["long"], 11) for model in models)
    assert_same(packed, plain)
