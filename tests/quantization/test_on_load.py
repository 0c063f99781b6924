"""Matrices rounded while loading: bit by bit the rounding of the whole matrix, on any number of ranks; logits equal
those of transformers with the same numbers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig

from quire.config import EngineConfig
from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.kernels.reference import TorchOps
from quire.kernels.weights.base import QuantizedWeight
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.build_context import BuildContext, collect_targets, create_weights, quantized_weights
from quire.layers.moe import SparseMLP
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.models.registry import model_class
from quire.quantization.find import find_scheme
from quire.quantization.schemes.on_load import OnLoadScheme
from tests.models.harness import in_chunks, random_reference, reference_logits
from tests.models.zoo import ZOO

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ("fp8", "int8", "int4", "mxfp4")
TOKENS = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(3)).tolist()


@cache
def reference_of(name: str) -> Any:
    if name == "llama":
        return random_reference(LlamaConfig(**SHAPE))
    if name == "mixtral":
        return random_reference(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    return random_reference(ZOO[name])


# What each kind means, in a few plain lines.


def fake(matrix: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of a matrix [out, in] after rounding, in float32."""
    if kind == "fp8":
        scale = matrix.abs().amax(1, keepdim=True) / 448
        return (matrix / scale).to(torch.float8_e4m3fn).float() * scale
    if kind == "int8":
        scale = matrix.abs().amax(1, keepdim=True) / 127
        return (matrix / scale).round() * scale
    width = matrix.shape[1]
    if kind == "int4":
        groups = matrix.view(len(matrix), -1, next(size for size in (128, 64, 32) if width % size == 0))
        scale = groups.abs().amax(-1, keepdim=True) * (1 / 7.5)
        return ((groups / scale).round().clamp(-8, 7) * scale).view(matrix.shape)
    groups = matrix.view(len(matrix), -1, 32)
    scale = torch.exp2(groups.abs().amax(-1, keepdim=True).log2().floor() - 2)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([-numbers.flip(0), numbers])
    nearest = (groups.unsqueeze(-1) / scale.unsqueeze(-1) - numbers).abs().argmin(-1)
    return (numbers[nearest] * scale).view(matrix.shape)


def fake_input(x: torch.Tensor, kind: str) -> torch.Tensor:
    return fake(x.reshape(-1, x.shape[-1]), kind).view(x.shape) if kind in ("fp8", "int8") else x


@cache
def rounded_reference(name: str, kind: str) -> Any:
    """The transformers model with rounded matrices, and rounded inputs of these where the kind rounds them."""
    model = copy.deepcopy(reference_of(name))
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in path and not path.endswith("gate"):
            module.weight.data = fake(module.weight.data, kind)
            module.register_forward_pre_hook(lambda _, inputs: (fake_input(inputs[0], kind),))
    return model


def mix(self: Any, kind: str, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts, one token at a time."""
    out = torch.zeros_like(hidden)
    for token, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            x = fake_input(hidden[token : token + 1], kind)
            gate, up = (x @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            inner = fake_input(nn.functional.silu(gate) * up, kind)
            out[token] += share * (inner @ self.down_proj[expert].T)[0]
    return out


@cache
def rounded_mixture(kind: str) -> Any:
    model = rounded_reference("mixtral", kind)
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for stack in (module.gate_up_proj, module.down_proj):
                stack.data = torch.stack([fake(matrix, kind) for matrix in stack.data])
            module.forward = lambda *args, self=module, **named: mix(self, kind, *args, **named)
    return model


# Ours


def loaded(
    folder: Path, kind: Any, ranks: Ranks | None = None, experts: ExpertRanks | None = None, dtype: Any = torch.float32
) -> Any:
    """Our model of the folder, read as the engine reads it."""
    files = local_files("m", folder)
    config = read_model_config(files)
    build = BuildContext(
        config, ranks or Ranks(), dtype, torch.device("cpu"), TorchOps(), TorchPagedAttention(), 64, experts,
        OnLoadScheme(kind),
    )  # fmt: skip
    model = model_class(config.architecture)(build)
    create_weights(model, build)
    targets = collect_targets(model)
    load_weights(targets, model.ignores, open_checkpoint(files, targets=targets), progress=False)
    return model


def folder_of(name: str, folder: Path, **saving: Any) -> Path:
    reference_of(name).save_pretrained(folder, **saving)
    return folder


def values(model: Any, path: str) -> torch.Tensor:
    weight = model.get_submodule(path).weight
    assert isinstance(weight, QuantizedWeight)
    return weight.dequantize()


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_the_whole_matrix_rounded(kind: str, tmp_path: Path) -> None:
    reference, ours = reference_of("llama"), loaded(folder_of("llama", tmp_path), kind)
    for path, parts in [
        ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("self_attn.o_proj", ["self_attn.o_proj"]),
        ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp.down_proj", ["mlp.down_proj"]),
    ]:
        matrices = [reference.get_submodule(f"model.layers.1.{part}").weight.data for part in parts]
        assert torch.equal(values(ours, f"model.layers.1.{path}"), torch.cat([fake(m, kind) for m in matrices])), path
    assert torch.equal(ours.lm_head.weight, reference.lm_head.weight)
    assert torch.equal(ours.model.embed_tokens.weight, reference.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_with_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """Within 1e-4 of the largest logit where activations stay as they are. A rounded activation that lies between two
    codes may round either way, which moves a logit by up to a few percent."""
    ours = loaded(folder_of("llama", tmp_path), kind)
    expected = reference_logits(rounded_reference("llama", kind), TOKENS)
    bound = {"fp8": 0.03, "int8": 0.01}.get(kind, 1e-4)
    for size in (19, 5, 1):
        torch.testing.assert_close(in_chunks(ours, TOKENS, size), expected, rtol=0, atol=bound * expected.abs().max())
    unrounded = reference_logits(reference_of("llama"), TOKENS)
    assert (expected - unrounded).abs().max() > 0.01 * expected.abs().max(), "rounding changes nothing here"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
def test_experts_are_rounded_one_by_one_from_either_layout(kind: str, stacked: bool, tmp_path: Path) -> None:
    ours = loaded(folder_of("mixtral", tmp_path, save_original_format=not stacked), kind)
    reference = rounded_mixture(kind)
    for layer in range(2):
        experts = reference.model.layers[layer].mlp.experts
        mine = ours.model.layers[str(layer)].mlp
        assert torch.equal(mine.gate_up.dequantize(), experts.gate_up_proj)
        assert torch.equal(mine.down.dequantize(), experts.down_proj)
        assert torch.equal(mine.router, reference_of("mixtral").model.layers[layer].mlp.gate.weight)
    expected = reference_logits(reference, TOKENS)
    bound = {"fp8": 0.03, "int8": 0.01}.get(kind, 1e-4)
    torch.testing.assert_close(in_chunks(ours, TOKENS, 7), expected, rtol=0, atol=bound * expected.abs().max())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_what_one_rank_holds(kind: str, size: int, tmp_path: Path) -> None:
    """Scales are those of whole rows and groups: int4 over 2 ranks cuts groups of 64 to 32."""
    name = "llama" if size == 3 else "halves"
    if name == "halves":
        shape = SHAPE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        random_reference(LlamaConfig(**shape)).save_pretrained(tmp_path)
    else:
        folder_of("llama", tmp_path)
    whole = loaded(tmp_path, kind)
    parts = [loaded(tmp_path, kind, Ranks(rank, size)) for rank in range(size)]
    for layer in range(2):
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            cut = [values(part, f"model.layers.{layer}.{path}") for part in parts]
            assert torch.equal(torch.cat(cut, 1), values(whole, f"model.layers.{layer}.{path}")), path
        path = f"model.layers.{layer}.mlp.gate_up_proj"
        gates, ups = zip(*(values(part, path).chunk(2) for part in parts), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), values(whole, path))


def test_ranks_hold_their_part_of_every_expert(tmp_path: Path) -> None:
    folder_of("mixtral", tmp_path)
    whole = loaded(tmp_path, "int4")
    parts = [loaded(tmp_path, "int4", Ranks(rank, 3)) for rank in range(3)]
    apart = [loaded(tmp_path, "int4", experts=ExpertRanks(rank, 2, 0)) for rank in range(2)]
    for path, module in whole.named_modules():
        if isinstance(module, SparseMLP):
            cuts = [part.get_submodule(path) for part in parts]
            assert torch.equal(torch.cat([cut.down.dequantize() for cut in cuts], 2), module.down.dequantize())
            held = [part.get_submodule(path).gate_up.dequantize() for part in apart]
            assert torch.equal(torch.cat(held), module.gate_up.dequantize())


def test_a_cut_inside_a_group_is_refused_with_the_sizes_that_work(tmp_path: Path) -> None:
    shape = SHAPE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    random_reference(LlamaConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"down_proj .int4.*over 2 .*a multiple of 32 of the 96 inputs, not 48"):
        loaded(tmp_path, "int4", Ranks(0, 2))


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_matrices_stored_transposed_or_reordered_are_rounded_too(name: str, tmp_path: Path) -> None:
    reference = reference_of(name)
    ours = loaded(folder_of(name, tmp_path), "fp8")
    held = quantized_weights(ours)
    sources = [
        matrix.t() if name == "gpt2" else matrix
        for path, matrix in reference.state_dict().items()
        if matrix.dim() == 2 and ".bias" not in path and (".h." in path or ".layers." in path)
    ]
    assert len(held) == len(sources)
    mine = torch.cat([weight.dequantize().flatten() for weight in held]).sort().values
    theirs = torch.cat([fake(matrix, "fp8").flatten() for matrix in sources]).sort().values
    assert torch.equal(mine, theirs)  # heads are regrouped: the same values, in another order
    plain = reference_logits(reference, TOKENS)
    assert (in_chunks(ours, TOKENS, 19) - plain).abs().max() < 0.25 * plain.abs().max()


@pytest.mark.parametrize(("kind", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4), ("mxfp4", 4)])
def test_bytes_are_those_of_the_codes_and_scales(kind: str, bits: int, tmp_path: Path) -> None:
    ours = loaded(folder_of("llama", tmp_path), kind, dtype=torch.bfloat16)
    outputs = 96 + 2 * 48 + 96 + 2 * 192 + 96
    numbers = 96 * (96 + 2 * 48 + 96 + 2 * 192) + 192 * 96
    groups = {"int4": numbers // 32 - 192 * 96 // 64, "mxfp4": numbers // 32}.get(kind, 0)  # 96 is 3 * 32, 192 3 * 64
    scales = {"int4": 2 * groups, "mxfp4": groups}.get(kind, 4 * outputs)
    assert sum(weight.nbytes for weight in quantized_weights(ours)) == 2 * (numbers * bits // 8 + scales)


def test_a_gguf_file_is_dequantized_and_rounded(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(96)
    writer.add_block_count(1)
    writer.add_feed_forward_length(192)
    writer.add_head_count(6)
    writer.add_head_count_kv(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(97)
    model = reference_of("llama").model
    layer, mlp = model.layers[0], model.layers[0].mlp
    packed = gguf.quantize(mlp.down_proj.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
    plain = {
        "token_embd": model.embed_tokens, "output_norm": model.norm, "blk.0.attn_norm": layer.input_layernorm,
        "blk.0.ffn_norm": layer.post_attention_layernorm, "blk.0.attn_q": layer.self_attn.q_proj,
        "blk.0.attn_k": layer.self_attn.k_proj, "blk.0.attn_v": layer.self_attn.v_proj,
        "blk.0.attn_output": layer.self_attn.o_proj, "blk.0.ffn_gate": mlp.gate_proj, "blk.0.ffn_up": mlp.up_proj,
    }  # fmt: skip
    for name, module in plain.items():
        writer.add_tensor(f"{name}.weight", module.weight.detach().numpy())
    writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = loaded(tmp_path / "m.gguf", "int4")
    source = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(values(ours, "model.layers.0.mlp.down_proj"), fake(source, "int4"))


def test_modules_get_the_kind_that_a_table_gives_them(tmp_path: Path) -> None:
    table = {
        "model.layers.0.mlp.down_proj": "16bit",
        r".*\.down_proj": "int8",
        r".*\.[kv]_proj": "fp8",
        "lm_head": "int4",
    }
    ours = loaded(folder_of("llama", tmp_path), table)
    reference = reference_of("llama")
    assert isinstance(ours.model.layers["0"].mlp.down_proj.weight, torch.Tensor)
    down = reference.model.layers[1].mlp.down_proj.weight.data
    assert torch.equal(values(ours, "model.layers.1.mlp.down_proj"), fake(down, "int8"))
    attention = reference.model.layers[0].self_attn
    mixed = torch.cat(
        [attention.q_proj.weight, *(fake(m.weight.data, "fp8") for m in (attention.k_proj, attention.v_proj))]
    )
    assert torch.equal(values(ours, "model.layers.0.self_attn.qkv_proj"), mixed)
    assert torch.equal(values(ours, "lm_head"), fake(reference.lm_head.weight.data, "int4"))


# Settings


def found(folder: Path, wish: str | None) -> Any:
    files = local_files("m", folder)
    return find_scheme(EngineConfig(str(folder), quantization=wish), files, read_model_config(files))


def test_the_setting_must_agree_with_the_checkpoint(tmp_path: Path) -> None:
    folder_of("llama", tmp_path)
    assert found(tmp_path, None) is None and found(tmp_path, "None") is None
    assert found(tmp_path, "fp8").name == "on load"
    for wish, said in [
        ("awq", "quantization is 'awq', but m is not quantized"),
        ("gguf", "quantization is 'gguf', but m is not quantized"),
        ("int5", r"must be one of .*fp8.*int4.*, or a \.json file; got 'int5'"),
        ("missing.json", "there is no such file"),
        ('{"x": "int5"}', r"gives 'x' the kind 'int5'; known are .*16bit"),
        ('{"(": "int4"}', "neither a module's name nor a regex"),
        ("{", "not valid JSON"),
        ("{}", "by name or regex, as"),
    ]:
        with pytest.raises(ConfigError, match=said):
            found(tmp_path, wish)


def test_an_odd_width_or_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    reference = random_reference(LlamaConfig(**(SHAPE | {"intermediate_size": 100})))
    reference.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"96x100 cannot be quantized to int4: .* multiple of 32"):
        loaded(tmp_path, "int4")
    reference.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    reference.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj: weight has values that are not finite"):
        loaded(tmp_path, "fp8")
