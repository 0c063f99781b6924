"""Gemma 4, Nemotron-H, Ministral 3, MiniMax-M2 and Granite with a shared expert from GGUF files: names are the gguf
package's, layouts and keys those of llama.cpp's converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import MODEL_ARCH_NAMES
from transformers import GraniteMoeSharedConfig

from quire.errors import UnsupportedModelError
from quire.layers.build_context import collect_targets, quantized_weights
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights
from quire.loading.model_config import read_model_config
from quire.quantization.schemes.gguf import GGUFScheme
from tests.models.harness import assert_same, checkpoint_tensors, empty_model, random_reference, reference_logits
from tests.models.hybrid import in_chunks
from tests.models.relatives import RELATIVES
from tests.models.test_hybrids import hybrid_reference
from tests.models.test_hybrids_gguf import place
from tests.models.test_relatives_gguf import paired
from tests.models.zoo import ZOO

TOKENS = [(7 * i + 3) % 90 for i in range(29)]
SHARED = GraniteMoeSharedConfig(**(RELATIVES["granite-moe"].to_dict() | {"shared_intermediate_size": 28}))
FAMILIES: dict[str, tuple[str, Any]] = {
    "gemma-4": ("gemma4", ZOO["gemma-4"]),
    "gemma-4-shared": ("gemma4", ZOO["gemma-4-shared"]),
    "gemma-4-mixture": ("gemma4", ZOO["gemma-4-mixture"]),
    "granite-moe-shared": ("granitemoe", SHARED),
    "minimax-m2": ("minimax-m2", RELATIVES["minimax-m2"]),
    "ministral3": ("mistral3", RELATIVES["ministral3"]),
    "nemotron-h": ("nemotron_h", None),
    "nemotron-3": ("nemotron_h_moe", None),
    "nemotron-3-latent": ("nemotron_h_moe", None),
}


def reference_of(name: str, **changes: Any) -> Any:
    _, config = FAMILIES[name]
    if config is None:
        return hybrid_reference(name, **changes)
    return random_reference(type(config)(**(config.to_dict() | changes)))


def stored(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What llama.cpp's converters make of a tensor, by the file's names or those they look up."""
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    own, last = f"blk.{layer}.", name.rpartition(".")[2]
    if name.endswith((".q_proj.weight", ".k_proj.weight")) and config.model_type in ("ministral3", "granitemoeshared"):
        return {name: paired(tensor, config.num_attention_heads if ".q_" in name else config.num_key_value_heads)}
    special = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "router.proj.weight": "ffn_gate_inp.weight",
        "e_score_correction_bias": "exp_probs_b.bias",
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "experts.up_proj": "ffn_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "mixer.dt_bias": "ssm_dt.bias",
    }
    for ending, file_name in special.items():
        if name.endswith(ending):
            return {own + file_name: tensor}
    if name.endswith("experts.gate_up_proj"):
        if config.model_type == "gemma4_text":  # this converter leaves them in one
            return {f"{own}ffn_gate_up_exps.weight": tensor}
        gate, up = tensor.chunk(2, dim=1)
        return {f"{own}ffn_gate_exps.weight": gate, f"{own}ffn_up_exps.weight": up}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"{own}ffn_gate_shexp.weight": gate, f"{own}ffn_up_shexp.weight": up}
    if name.endswith("conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if last in ("A_log", "D"):
        return {name: (-tensor.exp() if last == "A_log" else tensor)[:, None]}
    if name.endswith("mixer.norm.weight"):
        return {name: tensor.unflatten(0, (config.n_groups, -1))}
    return {name: tensor}


def add_gemma(writer: gguf.GGUFWriter, config: Any) -> list[torch.Tensor]:
    """Fields of Gemma 4; its table of divisors."""
    config.allow_global_per_layer_attribute_access = True
    ropes, layers = config.rope_parameters, config.num_hidden_layers
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    full = next(iter(config.to_dict()["per_layer_config"].values()))
    own = layers - config.num_kv_shared_layers
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    heads = config.num_key_value_heads
    more = full.get("num_key_value_heads", heads)
    writer.add_head_count_kv([heads if window else more for window in windowed] if more != heads else heads)
    width = config.intermediate_size
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([width * (1 + (i >= own)) for i in range(layers)])
    else:
        writer.add_feed_forward_length(width)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    pairs = full["head_dim"] // 2
    rotated = int(pairs * ropes["full_attention"]["partial_rotary_factor"])
    return [torch.tensor([1.0] * rotated + [1e30] * (pairs - rotated))]


def add_nemotron(writer: gguf.GGUFWriter, config: Any) -> list[torch.Tensor]:
    kinds = config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_rope_scaling_finetuned(False)
    return []


def add_others(writer: gguf.GGUFWriter, config: Any) -> list[torch.Tensor]:
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    return []


def write(path: Path, reference: Any, arch: str, encoding: Kind = Kind.F32, fuses: bool = False) -> None:
    """`fuses`: gate and up of all experts are one tensor."""
    config, kind = reference.config, next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps)
    for table in {"gemma4": add_gemma, "nemotron_h": add_nemotron, "nemotron_h_moe": add_nemotron}.get(
        arch, add_others
    )(writer, config):
        writer.add_tensor("rope_freqs.weight", table.numpy())
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint_tensors(reference).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for made, part in stored(config, name, tensor).items():
            own = made if made.startswith("blk.") else place(names, made)
            assert own is not None, made
            tensors[own] = part
    for gate in [name for name in tensors if fuses and name.endswith("ffn_gate_exps.weight")]:
        parts = tensors.pop(gate), tensors.pop(gate.replace("gate", "up"))
        tensors[gate.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
    for own, part in tensors.items():
        values = part.detach().float().contiguous().numpy()
        is_packed = encoding != Kind.F32 and values.ndim > 1 and values.shape[-1] % 32 == 0 and "ssm_" not in own
        writer.add_tensor(
            own, gguf.quantize(values, encoding) if is_packed else values, raw_dtype=encoding if is_packed else None
        )
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
    write(path, reference, FAMILIES[name][0])
    assert_same(in_chunks(loaded(path), TOKENS, lambda i: (2, 3, 1, 17)[i % 4]), reference_logits(reference, TOKENS))


@pytest.mark.parametrize(
    ("name", "sizes", "stays"),
    [
        ("gemma-4-mixture", {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}, 4 * 6),
        ("minimax-m2", {"hidden_size": 64, "intermediate_size": 32}, 2 * 4),
        ("nemotron-h", {"hidden_size": 64, "intermediate_size": 64}, 5),
    ],
)
def test_packed_matrices_give_the_logits_of_the_dequantized_ones(
    name: str, sizes: dict[str, int], stays: int, tmp_path: Path
) -> None:
    """Also experts whose gate and up are one tensor."""
    path = tmp_path / "model.gguf"
    write(path, reference_of(name, **sizes), FAMILIES[name][0], Kind.Q8_0, fuses=True)
    models = [loaded(path, scheme) for scheme in (GGUFScheme(GGUFCheckpoint(path)), None)]
    assert len(quantized_weights(models[0])) >= stays
    packed, plain = (in_chunks(model, TOKENS, lambda i: 11) for model in models)
    assert_same(packed, plain)


def test_another_table_of_divisors_than_gemma_4s_is_refused(tmp_path: Path) -> None:
    path, reference = tmp_path / "model.gguf", reference_of("gemma-4")
    write(path, reference, "gemma4")
    found = GGUFCheckpoint(path).header.tensors["rope_freqs.weight"]
    content = bytearray(path.read_bytes())
    content[found.start : found.start + 4] = np.float32(2.5).tobytes()
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        read_model_config(local_files("m", path))
