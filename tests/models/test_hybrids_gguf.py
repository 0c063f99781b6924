"""gpt-oss, LFM2 and Qwen3.5 from GGUF files: names are the gguf package's, layouts those of llama.cpp's converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import MODEL_ARCH_NAMES

from quire import LLM, SamplingParams
from quire.kernels.weights.fp4 import Fp4Weight
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
    random_reference,
    reference_logits,
)
from tests.models.hybrid import in_chunks
from tests.models.test_hybrids import hybrid_reference
from tests.models.zoo import ZOO

TOKENS = [(7 * i + 3) % 90 for i in range(60)]
ARCHITECTURES = {
    "gpt-oss": "gpt-oss", "lfm2": "lfm2", "lfm2-moe": "lfm2moe", "qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe",
}  # fmt: skip


def reference_of(name: str) -> Any:
    if name == "gpt-oss":
        changes = {"hidden_size": 64, "intermediate_size": 32}
        reference = random_reference(type(ZOO[name])(**{**ZOO[name].to_dict(), **changes}))
        for parameter, values in reference.named_parameters():
            if parameter.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # as MXFP4 has them: [out, in]
                rounded = gguf.dequantize(gguf.quantize(values.data.mT.contiguous().numpy(), Kind.MXFP4), Kind.MXFP4)
                values.data = torch.from_numpy(rounded).mT.contiguous()
        return reference
    if name.startswith("qwen3.5"):
        kinds = ["linear_attention", "linear_attention", "full_attention"]  # every third is full
        more = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "layer_types": kinds, "num_hidden_layers": 3}
        return hybrid_reference(name, attention_bias=False, **more)
    return hybrid_reference(name, conv_bias=False)


def tiled(tensor: torch.Tensor, keys: int, dim: int, axis: int = 0) -> torch.Tensor:
    """Value heads of one key head after the other, as the first of each key head, then the second of each."""
    return tensor.unflatten(axis, (keys, -1, dim)).transpose(axis, axis + 1).flatten(axis, axis + 2)


def as_stored(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What llama.cpp's converters make of a tensor, by the names they look up."""
    if name.endswith((".experts.gate_up_proj", ".experts.gate_up_proj_bias")):
        stem, is_bias = name.partition(".gate_up_proj")[0], name.endswith("_bias")
        if config.model_type == "gpt_oss":
            rows = tensor if is_bias else tensor.mT
            halves = rows[:, 0::2], rows[:, 1::2]
        else:
            halves = tuple(tensor.chunk(2, dim=1))
        return {f"{stem}.{half}_proj.{'bias' if is_bias else 'weight'}": part.contiguous()
                for half, part in zip(("gate", "up"), halves, strict=True)}  # fmt: skip
    if name.endswith(".experts.down_proj"):
        return {f"{name}.weight": tensor.mT.contiguous() if config.model_type == "gpt_oss" else tensor}
    if name.endswith(".experts.down_proj_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith(".sinks"):
        return {f"{name}.weight": tensor}
    if name.endswith("expert_bias"):
        return {f"{name}.bias": tensor}
    if name.endswith("conv.conv.weight"):
        return {name: tensor.squeeze(1)}
    if "qwen3_5" in config.model_type:
        return as_stored_qwen(config, name, tensor)
    return {name: tensor}


def as_stored_qwen(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    kind = name.partition("linear_attn.")[2]
    if kind.startswith(("in_proj_qkv", "conv1d")):
        tensor = tensor.squeeze(1) if kind.startswith("conv1d") else tensor
        return {name: torch.cat((tensor[:before], tiled(tensor[before:], keys, dim)))}
    if kind.startswith("in_proj_z"):
        return {name: tiled(tensor, keys, dim)}
    if kind.startswith(("in_proj_a", "in_proj_b")):
        return {name: tiled(tensor, keys, 1)}
    if kind == "A_log":
        return {name: -tiled(tensor, keys, 1).exp()}
    if kind == "dt_bias":
        return {name.replace("dt_bias", "dt_proj.bias"): tiled(tensor, keys, 1)}
    if kind.startswith("out_proj"):
        return {name: tiled(tensor, keys, dim, axis=1)}
    return {name: tensor}


EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write(
    path: Path, reference: Any, arch: str, encoding: Kind = Kind.F32, experts: Kind | None = None, guesses: int = 0
) -> None:
    """`guesses`: layers for multi-token prediction behind the others."""
    config, kind = reference.config, next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers + guesses)
    for layer in range(layers, layers + guesses):
        writer.add_nextn_predict_layers(guesses)
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(4, np.float32))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch.startswith("lfm2"):
        kv_heads = config.num_key_value_heads
        writer.add_head_count_kv([kv_heads if each == "full_attention" else 0 for each in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        state = reference.state_dict()
        writer.add_feed_forward_length(state["model.layers.0.feed_forward.w1.weight"].shape[0])
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if arch != "qwen35moe":
            writer.add_feed_forward_length(config.intermediate_size)
    if arch in ("gpt-oss", "lfm2moe", "qwen35moe"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(width)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if arch == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if arch.startswith("qwen35"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        # A test's few layers are full where its config says so.
        full = config.layer_types.index("full_attention") + 1
        writer.add_full_attention_interval(full)
        assert [(each == "full_attention") for each in config.layer_types] == [
            (layer + 1) % full == 0 for layer in range(layers)
        ]
    names = gguf.get_tensor_name_map(kind, layers)
    for name, tensor in checkpoint_tensors(reference).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for made, part in as_stored(config, name, tensor).items():
            own = place(names, made)
            assert own is not None, made
            values = part.detach().float().contiguous().numpy()
            wanted = experts if experts is not None and "_exps.weight" in own else encoding
            is_packed = wanted != Kind.F32 and values.ndim > 1 and values.shape[-1] % 32 == 0
            is_packed = is_packed and "norm" not in own and "conv" not in own
            packed = gguf.quantize(values, wanted) if is_packed else values
            writer.add_tensor(own, packed, raw_dtype=wanted if is_packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def place(names: Any, made: str) -> str | None:
    """Where the file has a tensor. Experts are looked up by the name of the stack."""
    if ".experts." in made:
        layer, stack, suffix = made.split(".")[2], made.split(".")[-2], made.split(".")[-1]
        return f"blk.{layer}.ffn_{EXPERTS[stack]}_exps.{suffix}"
    if made.endswith(".A_log"):
        return names.get_name(made)
    return names.get_name(made, try_suffixes=(".weight", ".bias"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    reference, path = reference_of(name), tmp_path / "model.gguf"
    write(path, reference, ARCHITECTURES[name], guesses=int(name == "qwen3.5"))
    config = read_model_config(local_files("m", path))
    ours = empty_model(config, max_model_len=64)
    load_weights(collect_targets(ours), ours.ignores, GGUFCheckpoint(path), progress=False)
    for sizes in (lambda i: 60, lambda i: (2, 3, 1, 17)[i % 4]):
        assert_same(in_chunks(ours, TOKENS, sizes), reference_logits(reference, TOKENS))


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    reference, path = reference_of("gpt-oss"), tmp_path / "model.gguf"
    write(path, reference, "gpt-oss", experts=Kind.MXFP4)
    config = read_model_config(local_files("m", path))
    ours = empty_model(config, max_model_len=64, scheme=GGUFScheme(GGUFCheckpoint(path)))
    load_weights(collect_targets(ours), ours.ignores, GGUFCheckpoint(path), progress=False)
    assert sum(isinstance(weight, Fp4Weight) for weight in quantized_weights(ours)) == 2 * config.num_layers
    assert_same(in_chunks(ours, TOKENS, lambda i: 11), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "qwen3.5-moe"])
def test_packed_matrices_give_the_logits_of_the_dequantized_ones(name: str, tmp_path: Path) -> None:
    """Also those whose heads are in another order than the model needs."""
    path = tmp_path / "model.gguf"
    write(path, reference_of(name), ARCHITECTURES[name], Kind.Q8_0)
    config = read_model_config(local_files("m", path))
    models = [empty_model(config, scheme=scheme) for scheme in (GGUFScheme(GGUFCheckpoint(path)), None)]
    for model in models:
        load_weights(collect_targets(model), model.ignores, GGUFCheckpoint(path), progress=False)
    assert len(quantized_weights(models[0])) >= 3
    packed, plain = (in_chunks(model, TOKENS, lambda i: 11) for model in models)
    assert_same(packed, plain)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_an_engine_over_such_a_file(name: str, tmp_path: Path) -> None:
    reference, path = reference_of(name), tmp_path / "model.gguf"
    write(path, reference, ARCHITECTURES[name], experts=Kind.MXFP4)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(str(path), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=96) as llm:
        (output,) = llm.generate([{"prompt_token_ids": TOKENS[:40]}], params, use_tqdm=False)
    tokens = list(TOKENS[:40])
    for _ in range(8):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    assert list(output.outputs[0].token_ids) == tokens[40:]
