"""Mixtures of experts: every checkpoint layout, uneven routing, expert counts, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.engine.stats import expert_metrics
from quire.errors import CheckpointError, ValidationError
from quire.kernels.cpu.ops import CpuOps
from quire.layers.attention.cpu import CpuPagedAttention
from quire.layers.build_context import collect_targets
from quire.layers.moe import SparseMLP, active_parameters, expert_counts
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig, read_model_config
from tests.conftest import tiny_tokenizer
from tests.models.harness import (
    Target,
    assert_same,
    checkpoint_tensors,
    empty_model,
    in_chunks,
    load,
    loaded_model,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.test_against_transformers import PROMPTS, assert_rows_share_steps
from tests.models.zoo import ZOO

MIXTURES = [name for name in ZOO if "moe" in name or "mixtral" in name]
FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe"]
TOKENS = PROMPTS["long"]
ON_CPU = Target(ops=CpuOps, attention=CpuPagedAttention)


@cache
def reference_of(name: str) -> Any:
    return random_reference(ZOO[name])


def load_from(path: Path, ranks: Ranks | None = None, **settings: Any) -> Any:
    """Our model with the weights at `path`, read as the engine reads them."""
    files = local_files("m", path)
    model = empty_model(read_model_config(files), ranks, **settings)
    targets = collect_targets(model)
    load_weights(targets, model.ignores, open_checkpoint(files, targets=targets), progress=False)
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_the_cpu_kernels_equal_transformers(name: str) -> None:
    reference = reference_of(name)
    ours = loaded_model(reference, target=ON_CPU)
    assert_same(in_chunks(ours, TOKENS, 29), reference_logits(reference, TOKENS))
    assert_same(in_chunks(ours, TOKENS, 1), reference_logits(reference, TOKENS))
    assert_rows_share_steps(reference, ours)


# Checkpoints


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
def test_transformers_checkpoints_are_loaded(name: str, stacked: bool, tmp_path: Path) -> None:
    reference = reference_of(name)
    reference.save_pretrained(tmp_path, save_original_format=not stacked)
    names = set(load_file(tmp_path / "model.safetensors"))
    first = {"mixtral": "block_sparse_moe.experts.0.w1.weight"}.get(name, "mlp.experts.0.gate_proj.weight")
    assert f"model.layers.0.{'mlp.experts.gate_up_proj' if stacked else first}" in names, "another layout than meant"
    assert_same(in_chunks(load_from(tmp_path), TOKENS, 29), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bare_checkpoint_of_single_experts_is_loaded(name: str, tmp_path: Path) -> None:
    """Names without `model.` in front."""
    reference = reference_of(name)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k.removeprefix("model."): t for k, t in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(in_chunks(load_from(tmp_path), TOKENS, 29), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_read_their_features_of_every_expert_from_either_layout(name: str, stacked: bool, tmp_path: Path) -> None:
    reference_of(name).save_pretrained(tmp_path, save_original_format=not stacked)
    whole, *ranks = (load_from(tmp_path, Ranks(tp_rank=r, tp_size=s)) for r, s in ((0, 1), (0, 2), (1, 2)))
    for part, *parts in zip(*(sparse(model) for model in (whole, *ranks)), strict=True):
        gates, ups = zip(*(each.gate_up.chunk(2, dim=1) for each in parts), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], dim=1), part.gate_up)
        assert torch.equal(torch.cat([each.down for each in parts], dim=2), part.down)
        assert all(torch.equal(each.router, part.router) for each in parts)


@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
@pytest.mark.parametrize("ranks, spare", [(2, 0), (3, 0), (3, 4)])
def test_ranks_with_whole_experts_sum_to_the_whole(stacked: bool, ranks: int, spare: int, tmp_path: Path) -> None:
    reference_of("qwen3-moe").save_pretrained(tmp_path, save_original_format=not stacked)
    (whole, *_) = sparse(load_from(tmp_path))
    places = [ExpertRanks(rank, ranks, spare) for rank in range(ranks)]
    parts = [sparse(load_from(tmp_path, target=ON_CPU, experts=place))[0] for place in places]
    assert sum(len(part.gate_up) for part in parts) == 8 + spare
    for part in parts:
        for slot, expert in enumerate(part.share.experts):
            assert torch.equal(part.gate_up[slot], whole.gate_up[expert])
            assert torch.equal(part.down[slot], whole.down[expert])
    x = torch.randn(11, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sum(part.mix(x) for part in parts), whole.mix(x))


@pytest.mark.parametrize("tokens", [1, 40], ids=["pair by pair", "in tiles"])
def test_ranks_with_whole_experts_sum_to_the_whole_with_the_gpu_kernels(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton import ops

    monkeypatch.setattr(ops, "USE_OWN_GEMMS", True)
    reference = reference_of("qwen3-moe")
    (whole, *_) = sparse(loaded_model(reference))
    parts = []
    for rank in range(2):
        model = empty_model(model_config(reference), target=Target(ops=ops.TritonOps), experts=ExpertRanks(rank, 2, 1))
        load(model, checkpoint_tensors(reference))
        parts.append(sparse(model)[0])
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sum(part.mix(x) for part in parts), whole.mix(x))


def sparse(model: Any) -> list[SparseMLP]:
    return [module for module in model.modules() if isinstance(module, SparseMLP)]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    reference_of("qwen3-moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensor missing.*\n.*layers\.1\.mlp\.experts\.0\.up_proj\.weight"):
        load_from(tmp_path)


def test_experts_of_another_width_are_named_with_both_shapes(tmp_path: Path) -> None:
    reference_of("qwen3-moe").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"moe_intermediate_size": 20', '"moe_intermediate_size": 24'))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight: \(20, 32\) in the checkpoint, \(24, 32\)"):
        load_from(tmp_path)


def test_a_checkpoint_of_more_experts_than_the_config_says_is_refused(tmp_path: Path) -> None:
    reference_of("mixtral").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_local_experts": 5', '"num_local_experts": 4'))
    with pytest.raises(CheckpointError, match=r"(?s)unknown to the model.*experts\.4\.w1.*gate\.weight: \(5, 32\)"):
        load_from(tmp_path)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Q and K as llama.cpp stores them for its `llama` family: rotary halves become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


def gguf_tensors(reference: Any, family: str, one_by_one: bool) -> dict[str, np.ndarray]:
    """As llama.cpp's converter names and arranges them."""
    config = reference.config
    found: dict[str, np.ndarray] = {}
    for name, tensor in reference.state_dict().items():
        array = tensor.numpy()
        if not name.startswith("model.layers."):
            plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found[f"{plain[name.removesuffix('.weight')]}.weight"] = array
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            stacks = {"gate": gate, "up": up}
        elif rest == "mlp.experts.down_proj":
            stacks = {"down": array}
        else:
            stem, _, suffix = rest.rpartition(".")
            if family == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
                array = permuted(array, heads)
            if stem == "mlp.shared_expert_gate":
                array = array[0]
            found[f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"] = array
            continue
        for kind, stack in stacks.items():
            if one_by_one:
                found |= {f"blk.{layer}.ffn_{kind}.{e}.weight": matrix for e, matrix in enumerate(stack)}
            else:
                found[f"blk.{layer}.ffn_{kind}_exps.weight"] = stack
    return found


@pytest.mark.parametrize(
    ("name", "family", "one_by_one"),
    [("mixtral", "llama", False), ("mixtral", "llama", True), ("qwen2-moe", "qwen2moe", False),
     ("qwen3-moe", "qwen3moe", False)],
)  # fmt: skip
def test_gguf_files_are_loaded(name: str, family: str, one_by_one: bool, tmp_path: Path) -> None:
    reference = reference_of(name)
    config = model_config(reference)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope["rope_theta"])
    writer.add_expert_count(sparse(empty_model(config))[0].routing.num_experts)
    writer.add_expert_used_count(config.raw["num_experts_per_tok"])
    if family != "llama":
        writer.add_expert_feed_forward_length(config.raw["moe_intermediate_size"])
    for tensor, array in gguf_tensors(reference, family, one_by_one).items():
        writer.add_tensor(tensor, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = load_from(tmp_path / "model.gguf")
    assert_same(in_chunks(whole, TOKENS, 29), reference_logits(reference, TOKENS))
    for rank in range(2):
        part = sparse(load_from(tmp_path / "model.gguf", experts=ExpertRanks(rank, 2, spare=1)))[0]
        assert torch.equal(part.gate_up, sparse(whole)[0].gate_up[list(part.share.experts)])
        assert torch.equal(part.down, sparse(whole)[0].down[list(part.share.experts)])


# Routing


@pytest.mark.parametrize("target", [Target(), ON_CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", FAMILIES)
def test_routing_everything_to_the_same_few_experts(name: str, target: Target) -> None:
    reference = random_reference(ZOO[name])
    config = model_config(reference)
    few = config.raw["num_experts_per_tok"]
    # Routers have no bias: a feature that is the same in every token, and that no layer changes, serves as one.
    reference.model.embed_tokens.weight.data[:, 0] = 10.0
    for layer in reference.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0.0
        layer.mlp.experts.down_proj.data[:, 0] = 0.0
        if name == "qwen2-moe":
            layer.mlp.shared_expert.down_proj.weight.data[0] = 0.0
        layer.post_attention_layernorm.weight.data[0] = 1.0
        layer.mlp.gate.weight.data[-few:, 0] = 300.0
        layer.mlp.gate.weight.data[:-few, 0] = -300.0
    model = loaded_model(reference, target=target)
    assert_same(in_chunks(model, TOKENS, 29), reference_logits(reference, TOKENS))
    for chosen in expert_counts(model).values():
        assert chosen[-few:] == [len(TOKENS)] * few and not any(chosen[:-few])


def count_by_hand(reference: Any, tokens: list[int]) -> dict[int, list[int]]:
    """How often transformers' routers choose each expert."""
    counts: dict[int, list[int]] = {}
    hooks = []
    for index, layer in enumerate(reference.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        total = layer.mlp.gate.weight.shape[0]

        def note(module: Any, args: Any, output: Any, index: int = index, total: int = total) -> None:
            counts[index] = torch.bincount(output[2].flatten(), minlength=total).tolist()

        hooks.append(layer.mlp.gate.register_forward_hook(note))
    reference_logits(reference, tokens)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("target", [Target(), ON_CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3-moe-dense-layers"])
def test_counts_equal_those_of_transformers_routers(name: str, target: Target) -> None:
    reference = reference_of(name)
    ours = loaded_model(reference, target=target)
    in_chunks(ours, TOKENS, 7)
    counts = expert_counts(ours)
    assert counts == count_by_hand(reference, TOKENS)
    config = model_config(reference)
    assert sum(map(sum, counts.values())) == len(TOKENS) * config.raw["num_experts_per_tok"] * len(counts)


def test_load_metrics() -> None:
    tokens, load = expert_metrics({0: [4, 4, 4, 4], 3: [0, 16, 0, 0]})
    assert (tokens.name, tokens.kind, tokens.value) == ("quire:expert_tokens", "counter", 32)
    assert dict(tokens.series)["3", "1"] == 16 and len(tokens.series) == 8
    assert load.value == 4 and dict(load.series) == {("0",): 1.0, ("3",): 4.0}
    assert expert_metrics({}) == []
    assert expert_metrics({1: [0, 0]})[1].value == 0


def test_active_parameters_leave_out_experts_not_chosen() -> None:
    model = empty_model(model_config(reference_of("qwen3-moe")))
    one = 3 * 20 * 32  # gate, up and down of an expert
    assert sum(p.numel() for p in model.parameters()) - active_parameters(model) == 2 * (8 - 3) * one
    dense = empty_model(model_config(random_reference(ZOO["llama"])))
    assert active_parameters(dense) == sum(p.numel() for p in dense.parameters())


# The whole engine


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture with a tokenizer."""
    config = type(ZOO[request.param])(
        **(ZOO[request.param].to_dict() | {"vocab_size": 128, "max_position_embeddings": 256})
    )
    path = tmp_path_factory.mktemp(request.param)
    random_reference(config).save_pretrained(path)
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
            best = logits.max(dim=-1).values
            assert (best - logits[range(12), ours] < 1e-3).all()  # the best, or one that ties with it
            assert (output.num_cached_tokens > 0) == (attempt > 0 and len(prompt) > 16)


def test_the_engine_counts_what_it_computes(folder: Path, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder)
    values = {metric.name: metric for metric in llm.get_metrics()}
    assert values["quire:expert_tokens"].value == 0, "warm-up steps are not counted"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(4, 24))}, {"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    values = {metric.name: metric for metric in llm.get_metrics()}
    config = llm.llm_engine.info.model
    top_k = config.raw["num_experts_per_tok"]
    by_layer: dict[str, float] = {}
    for (layer, _), count in values["quire:expert_tokens"].series:
        by_layer[layer] = by_layer.get(layer, 0) + count
    # Prompts, and of each output all but the last token; the last layer computes only a prompt's last token.
    assert by_layer["0"] == (20 + 3 + 2 * 5) * top_k
    assert by_layer["1"] in ((2 + 2 * 5) * top_k, by_layer["0"])
    assert 1 <= values["quire:expert_load_max_over_mean"].value <= sparse_total(config)


def sparse_total(config: ModelConfig) -> int:
    return sparse(empty_model(config))[0].routing.num_experts


def test_a_model_without_experts_has_no_expert_metrics(llm: LLM) -> None:
    assert not [metric.name for metric in llm.get_metrics() if "expert" in metric.name]


# Refusals


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, r"9 experts \(num_experts_per_tok\) and has 8"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0; a positive integer"),
        ("qwen3-moe", {"num_experts_per_tok": None}, "num_experts_per_tok = None; a positive integer"),
        ("qwen3-moe", {"num_local_experts": None}, "num_experts = None; a positive integer"),
        ("qwen2-moe", {"num_experts": -4}, "num_experts = -4; a positive integer"),
        ("mixtral", {"num_local_experts": "many"}, "num_experts = 'many'; a positive integer"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size = None; a positive integer"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0; a positive integer"),
        ("qwen3-moe", {"mlp_only_layers": "all"}, "mlp_only_layers = 'all'; a list of layer numbers"),
    ],
)
def test_an_invalid_config_is_refused_in_one_line(name: str, changes: dict[str, Any], said: str) -> None:
    raw = dict(model_config(reference_of(name)).raw) | changes
    with pytest.raises(ValidationError, match=said) as error:
        empty_model(ModelConfig.from_dict(raw))
    assert "\n" not in str(error.value)


def test_features_that_ranks_cannot_split_are_refused() -> None:
    with pytest.raises(ValueError, match="20 expert features cannot be split over 8"):
        config = model_config(reference_of("qwen3-moe"))
        raw = dict(config.raw) | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
        empty_model(ModelConfig.from_dict(raw), Ranks(tp_size=8))
