"""DeepSeek, GLM, Granite 4 and Qwen3-Next from GGUF files: names are the gguf package's, layouts and keys those of
llama.cpp's converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import MODEL_ARCH_NAMES

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.build_context import collect_targets, quantized_weights
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights
from quire.loading.model_config import read_model_config
from quire.quantization.schemes.gguf import GGUFScheme
from tests.models.harness import assert_same, checkpoint_tensors, empty_model, random_reference, reference_logits
from tests.models.hybrid import in_chunks
from tests.models.relatives import RELATIVES
from tests.models.test_hybrids import HYBRIDS, hybrid_reference
from tests.models.test_hybrids_gguf import as_stored, place
from tests.models.test_relatives_gguf import paired
from tests.models.zoo import ZOO

TOKENS = [(7 * i + 3) % 90 for i in range(40)]
# What llama.cpp's files cannot say: a magnitude of YaRN's angles.
YARN = ZOO["deepseek-v3"].rope_parameters | {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 4, "beta_slow": 0.5}
FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "deepseek-v2": ("deepseek2", ZOO["deepseek-v2"], {"rope_parameters": YARN}),
    "deepseek-v2-lite": ("deepseek2", ZOO["deepseek-v2-lite"], {"rope_parameters": YARN}),
    "deepseek-v3": ("deepseek2", ZOO["deepseek-v3"], {"rope_parameters": YARN, "attention_bias": False}),
    "glm4-moe-lite": ("deepseek2", RELATIVES["glm4-moe-lite"], {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "glm4": ("glm4", RELATIVES["glm4"], {}),
    "glm4-biases": ("glm4", RELATIVES["glm4"], {"attention_bias": True}),
    "glm4-moe": ("glm4moe", RELATIVES["glm4-moe"], {}),
    "granite-4": ("granitehybrid", HYBRIDS["granite-4"], {"mamba_n_groups": 2}),
    "granite-4-dense": ("granitehybrid", HYBRIDS["granite-4-dense"], {"mamba_proj_bias": False}),
    "qwen3-next": ("qwen3next", HYBRIDS["qwen3-next"], {"mlp_only_layers": []}),
}
RECURRENT = ("granite-4", "granite-4-dense", "qwen3-next")


def reference_of(name: str, **changes: Any) -> Any:
    _, config, own = FAMILIES[name]
    if name in RECURRENT:
        return hybrid_reference(name, **own, **changes)
    return random_reference(type(config)(**(config.to_dict() | own | changes)))


def stored(config: Any, name: str, tensor: torch.Tensor, is_early: bool) -> dict[str, torch.Tensor]:
    """What llama.cpp's converters make of a tensor, by the names they look up."""
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith("kv_b_proj.weight") and not is_early:
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        return {name.replace("kv_b", "k_b"): keys.mT, name.replace("kv_b", "v_b"): values}
    if config.model_type == "granitemoehybrid":
        return stored_granite(config, name, tensor)
    if config.model_type == "qwen3_next":
        return stored_next(config, name, tensor, is_early)
    return as_stored(config, name, tensor)


def stored_granite(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    layer, kind = name.split(".")[2:3], name.rpartition("block_sparse_moe.")[2] or name
    own = f"blk.{layer[0]}." if layer else ""
    suffix = "_shexp" if config.num_local_experts else ""
    if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
        return {name: paired(tensor, config.num_attention_heads if ".q_" in name else config.num_key_value_heads)}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"{own}ffn_gate{suffix}.weight": gate, f"{own}ffn_up{suffix}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"{own}ffn_down{suffix}.weight": tensor}
    if kind.startswith("router"):
        return {f"{own}ffn_gate_inp.weight": tensor}
    if "block_sparse_moe" in name:
        return as_stored(config, name, tensor)
    if name.endswith("conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if name.endswith((".A_log", ".mamba.D")):
        return {name: (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    if name.endswith("mamba.norm.weight"):
        return {name: tensor.unflatten(0, (config.mamba_n_groups, -1))}
    return {name: tensor}


def stored_next(config: Any, name: str, tensor: torch.Tensor, is_early: bool) -> dict[str, torch.Tensor]:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if name.endswith("in_proj_qkvz.weight") and not is_early:
        key, keys = config.linear_key_head_dim, config.linear_num_key_heads
        value = config.linear_num_value_heads // keys * config.linear_value_head_dim
        q, k, v, z = (each.flatten(0, 1) for each in tensor.unflatten(0, (keys, -1)).split((key, key, value, value), 1))
        own = f"blk.{name.split('.')[2]}."
        return {f"{own}attn_qkv.weight": torch.cat((q, k, v)), f"{own}attn_gate.weight": z}
    if name.endswith("conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if name.endswith(".A_log"):
        return {name: -tensor.exp()}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    return as_stored(config, name, tensor)


def add_recurrent_fields(writer: gguf.GGUFWriter, config: Any, is_early: bool) -> None:
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_next":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        full = config.layer_types.index("full_attention") + 1
        if is_early:
            writer.add_full_attention_interval(full)
        else:
            marks = [kind == "linear_attention" for kind in config.layer_types]
            writer.add_array("qwen3next.attention.recurrent_layers", marks)
        return
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def add_latent_fields(writer: gguf.GGUFWriter, config: Any, is_early: bool) -> None:
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if is_early:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(query)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(config.v_head_dim)


def add_mixture_fields(writer: gguf.GGUFWriter, config: Any, names_gating: bool) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    kinds = getattr(config, "mlp_layer_types", None)
    writer.add_leading_dense_block_count(kinds.count("dense") if kinds else config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if names_gating:
        is_v2 = config.model_type == "deepseek_v2"
        writer.add_expert_gating_func(getattr(gguf.ExpertGatingFuncType, "SOFTMAX" if is_v2 else "SIGMOID"))


def write(
    path: Path, reference: Any, arch: str, encoding: Kind = Kind.F32, is_early: bool = False, guesses: int = 0
) -> None:
    """`is_early`: as the first files of DeepSeek were, with `kv_b_proj` in one piece and without names for the scoring
    of experts, and those of Qwen3-Next, with one matrix for q, k, v and z. `guesses`: layers for multi-token
    prediction behind the others."""
    config, kind = reference.config, next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    layers, rope = config.num_hidden_layers, config.rope_parameters
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers + guesses)
    for layer in range(layers, layers + guesses):
        writer.add_nextn_predict_layers(guesses)
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(4, np.float32))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "deepseek2":
        add_latent_fields(writer, config, is_early)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        counts = [
            config.num_key_value_heads if each == "full_attention" else 0 for each in getattr(config, "layer_types", ())
        ]
        writer.add_head_count_kv(counts if arch == "granitehybrid" else config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if arch in ("granitehybrid", "qwen3next"):
        add_recurrent_fields(writer, config, is_early)
    if hasattr(config, "n_routed_experts"):
        add_mixture_fields(writer, config, names_gating=not is_early)
    names = gguf.get_tensor_name_map(kind, layers)
    for name, tensor in checkpoint_tensors(reference).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for made, part in stored(config, name, tensor, is_early).items():
            own = made if made.startswith("blk.") else place(names, made)
            assert own is not None, made
            values = part.detach().float().contiguous().numpy()
            is_packed = encoding != Kind.F32 and values.ndim > 1 and values.shape[-1] % 32 == 0
            is_packed = is_packed and "norm" not in own and "conv" not in own
            packed = gguf.quantize(values, encoding) if is_packed else values
            writer.add_tensor(own, packed, raw_dtype=encoding if is_packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded(path: Path, scheme: GGUFScheme | None = None) -> Any:
    model = empty_model(read_model_config(local_files("m", path)), max_model_len=64, scheme=scheme)
    load_weights(collect_targets(model), model.ignores, GGUFCheckpoint(path), progress=False)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    reference, path = reference_of(name), tmp_path / "model.gguf"
    write(path, reference, FAMILIES[name][0], guesses=int(name in ("glm4-moe", "glm4-moe-lite")))
    assert_same(in_chunks(loaded(path), TOKENS, lambda i: (2, 3, 1, 17)[i % 4]), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "qwen3-next"])
def test_early_files(name: str, tmp_path: Path) -> None:
    reference, path = reference_of(name), tmp_path / "model.gguf"
    write(path, reference, FAMILIES[name][0], is_early=True)
    assert_same(in_chunks(loaded(path), TOKENS, lambda i: 11), reference_logits(reference, TOKENS))


# Sizes that blocks of 32 values fit.
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
WIDE_LATENT = WIDE | {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek-v3", WIDE_LATENT),
        ("glm4", WIDE),
        ("glm4-moe", WIDE),
        ("granite-4-dense", {"hidden_size": 64, "shared_intermediate_size": 64, "mamba_n_heads": 8}),
        ("qwen3-next", {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    ],
)
def test_packed_matrices_give_the_logits_of_the_dequantized_ones(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Also those that are joined of two, or are half of one."""
    path = tmp_path / "model.gguf"
    write(path, reference_of(name, **sizes), FAMILIES[name][0], Kind.Q8_0)
    models = [loaded(path, scheme) for scheme in (GGUFScheme(GGUFCheckpoint(path)), None)]
    assert len(quantized_weights(models[0])) >= 3
    packed, plain = (in_chunks(model, TOKENS, lambda i: 11) for model in models)
    assert_same(packed, plain)


def header_only(path: Path, arch: str, tensors: tuple[str, ...] = (), **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8}
    heads = {"attention.head_count": 1, "attention.head_count_kv": 1, "rope.dimension_count": 4, "vocab_size": 4}
    latent = {"attention.key_length": 8, "attention.value_length": 8, "attention.kv_lora_rank": 8}
    mixture = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 4}
    wanted = sizes | heads | latent | (mixture if arch != "glm4" else {})
    for key, value in (wanted | {key.replace("__", "."): value for key, value in fields.items()}).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    for name in tensors:
        writer.add_tensor(name, np.ones((1, 4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "fields", "said"),
    [
        ("deepseek2", {"expert_gating_func": 4}, "expert_gating_func 4 is not supported"),
        ("deepseek2", {"attention__temperature_scale": 0.1}, "attention.temperature_scale"),
        ("glm4", {"rope__dimension_sections": 4}, "rope.dimension_sections"),
        ("glm4moe", {"expert_gating_func": 1}, "softmax gating"),
    ],
)
def test_what_a_file_asks_for_and_is_not_implemented_is_refused_by_name(
    arch: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = header_only(tmp_path / "model.gguf", arch, **fields)
    with pytest.raises(UnsupportedModelError, match=said):
        read_model_config(local_files("m", path))


def test_half_of_a_joined_matrix_is_an_error(tmp_path: Path) -> None:
    path = header_only(tmp_path / "model.gguf", "deepseek2", ("blk.0.attn_k_b.weight",))
    with pytest.raises(CheckpointError, match=r"only 'blk.0.attn_k_b.weight' for .*kv_b_proj"):
        GGUFCheckpoint(path)
