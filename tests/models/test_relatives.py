"""Relatives of Llama and other plain decoders compute what transformers computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from quire import LLM, SamplingParams
from quire.distributed.groups import Ranks
from quire.errors import UnsupportedModelError
from quire.layers.attention.base import LastTokens
from quire.layers.build_context import collect_targets
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig, read_model_config
from tests.models.harness import (
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
from tests.models.relatives import RELATIVES, SHAPE, longrope
from tests.models.test_against_transformers import PROMPTS, assert_rows_share_steps
from tests.models.test_names_and_ranks import assert_two_ranks_compute_the_whole


@cache
def reference(name: str) -> Any:
    return random_reference(RELATIVES[name])


@pytest.mark.parametrize("name", RELATIVES)
def test_alone_in_chunks_and_batched(name: str) -> None:
    theirs = reference(name)
    ours = loaded_model(theirs)
    expected = reference_logits(theirs, PROMPTS["long"])
    for size in (29, 3):
        assert_same(in_chunks(ours, PROMPTS["long"], size), expected)
    assert_rows_share_steps(theirs, ours)


@pytest.mark.parametrize("name", RELATIVES)
def test_two_ranks_together_compute_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_two_ranks_compute_the_whole(reference(name), monkeypatch)


def test_norms_over_all_heads_count_copies_of_kv_heads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = type(RELATIVES["olmo2"])(**(RELATIVES["olmo2"].to_dict() | {"num_key_value_heads": 1}))
    assert_two_ranks_compute_the_whole(random_reference(config), monkeypatch)


@pytest.mark.parametrize("name", ["bloom", "cohere", "falcon-7b", "granite", "olmo3", "opt", "phi4-mini"])
def test_consecutive_pipeline_stages_compute_the_whole_model(name: str) -> None:
    stages = [loaded_model(reference(name), Ranks(pp_rank=rank, pp_size=2)) for rank in range(2)]
    assert_same(in_chunks(stages, PROMPTS["long"], 11), reference_logits(reference(name), PROMPTS["long"]))


@pytest.mark.parametrize("length", [16, 29])
def test_longrope_is_short_up_to_the_original_length_and_long_past_it(length: int) -> None:
    theirs = random_reference(longrope())
    ours = loaded_model(theirs, max_model_len=length)
    tokens = PROMPTS["long"][:length]
    assert_same(in_chunks(ours, tokens, 5), reference_logits(theirs, tokens))


def test_longrope_with_an_attention_factor_and_an_old_name() -> None:
    theirs = random_reference(longrope(attention_factor=1.4))
    config = model_config(theirs)
    rope = dict(config.raw["rope_parameters"])
    rope["type"] = rope.pop("rope_type").replace("longrope", "su")
    old = ModelConfig.from_dict(
        {k: v for k, v in config.raw.items() if k != "rope_parameters"} | {"rope_scaling": rope}
    )
    ours = empty_model(old, max_model_len=16)
    load(ours, checkpoint_tensors(theirs))
    assert_same(in_chunks(ours, PROMPTS["middle"], 14), reference_logits(theirs, PROMPTS["middle"]))


def test_granite_mixtures_load_by_their_published_names() -> None:
    theirs = reference("granite-moe")
    names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    names["router.weight"] = "router.layer.weight"
    tensors = {}
    for name, tensor in checkpoint_tensors(theirs).items():
        stem, _, end = name.partition("block_sparse_moe.")
        tensors[f"{stem}block_sparse_moe.{names[end]}" if end else name] = tensor
    assert sum("input_linear" in name for name in tensors) == 2
    ours = empty_model(model_config(theirs))
    load(ours, tensors)
    assert_same(in_chunks(ours, PROMPTS["middle"], 14), reference_logits(theirs, PROMPTS["middle"]))


def test_olmo3_scales_only_layers_without_a_window_in_old_files() -> None:
    theirs = reference("olmo3")
    config = model_config(theirs)
    by_kind = config.raw["rope_parameters"]
    scaling = {key: value for key, value in by_kind["full_attention"].items() if key != "rope_theta"}
    raw = {key: value for key, value in config.raw.items() if key != "rope_parameters"}
    old = ModelConfig.from_dict(raw | {"rope_theta": 300.0, "rope_scaling": scaling})
    ours = empty_model(old)
    load(ours, checkpoint_tensors(theirs))
    assert_same(in_chunks(ours, PROMPTS["long"], 29), reference_logits(theirs, PROMPTS["long"]))


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_part_of_mistral3_as_published(kind: str, tmp_path: Path) -> None:
    text = SHAPE | {"model_type": kind, "head_dim": 8}
    if kind == "ministral3":
        text["rope_parameters"] = RELATIVES["ministral3"].rope_parameters
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    theirs = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel())).mul_(0.3)
    theirs.save_pretrained(tmp_path)
    files = local_files("m", tmp_path)
    config = read_model_config(files)
    ours = empty_model(config)
    load_weights(collect_targets(ours), ours.ignores, open_checkpoint(files, "auto"), False)
    assert_same(in_chunks(ours, PROMPTS["long"], 9), reference_logits(theirs, PROMPTS["long"]))


def test_minimax_m2_by_its_published_config_and_names() -> None:
    theirs = reference("minimax-m2")
    config = model_config(theirs)
    raw = {key: value for key, value in config.raw.items() if key != "rope_parameters"}
    ours = empty_model(ModelConfig.from_dict(raw | {"rope_theta": 500.0, "rotary_dim": 4}))
    tensors = {}
    for name, tensor in checkpoint_tensors(theirs).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem = name.rpartition("mlp.")[0] + "block_sparse_moe.experts"
            for number, expert in enumerate(tensor):
                parts = {"w1": expert[:48], "w3": expert[48:]} if "gate_up" in name else {"w2": expert}
                tensors |= {f"{stem}.{number}.{key}.weight": part for key, part in parts.items()}
        else:
            tensors[name.replace("mlp.gate", "block_sparse_moe.gate")] = tensor
    load(ours, tensors)
    assert_same(in_chunks(ours, PROMPTS["long"], 29), reference_logits(theirs, PROMPTS["long"]))


@pytest.mark.parametrize(
    ("family", "architecture", "tied", "position"),
    [("falcon", "FalconForCausalLM", True, 2048), ("olmo2", "Olmo2ForCausalLM", False, 64)],
)
def test_fields_that_equal_a_familys_default_may_be_missing(
    family: str, architecture: str, tied: bool, position: int
) -> None:
    raw = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings" or family != "falcon"}
    config = ModelConfig.from_dict(raw | {"model_type": family, "architectures": [architecture]})
    assert (config.tie_embeddings, config.max_position) == (tied, position)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("starcoder2", {"hidden_act": "xielu"}, "xielu"),
        ("cohere", {"hidden_act": "gelu"}, "gelu"),
        ("cohere2", {"layer_switch": 3}, "layer_switch"),
        ("falcon-7b", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("granite", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("ministral", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, "layer_types"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("minimax-m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "4 numbers as 'long_factor'"),
    ],
)
def test_features_that_are_not_implemented(name: str, changes: dict[str, Any], named: str) -> None:
    config = model_config(reference(name))
    with pytest.raises(UnsupportedModelError, match=named):
        empty_model(ModelConfig.from_dict(dict(config.raw) | changes | {"original_max_position_embeddings": 16}))


@pytest.mark.parametrize("name", ["olmo2", "cohere", "starcoder2"])
def test_plain_layers_can_end_with_the_last_tokens_alone(name: str) -> None:
    ours, logits = loaded_model(reference(name)), reference_logits(reference(name), PROMPTS["long"])
    forward = ours.forward

    def last_only(tokens: Any, positions: Any, kv: Any, inputs: Any, hidden: Any) -> torch.Tensor:
        last = torch.tensor([inputs.num_tokens - 1])
        one = replace(inputs, query_starts=torch.tensor([0, 1], dtype=torch.int32), num_tokens=1, max_query_len=1)
        return forward(tokens, positions, kv, replace(inputs, last=LastTokens(last, one)), hidden)

    ours.forward = last_only
    assert_same(in_chunks(ours, PROMPTS["long"], 29), logits[-1:])


@pytest.mark.parametrize("name", ["cohere2", "falcon-40b", "granite-moe", "olmo3", "phi3"])
def test_a_whole_engine_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    """In chunks, several rows at once, and the second time from cached prefixes; three of these have windows."""
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    prompts = [(PROMPTS["long"] * 2)[:40], [*PROMPTS["long"][:20], 3], PROMPTS["short"]]
    sampling = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4}
    with LLM(
        str(tmp_path),
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=80,
        skip_tokenizer_init=True,
        **settings,
    ) as llm:
        for round in range(2):
            results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
            for prompt, result in zip(prompts, results, strict=True):
                row = list(prompt)
                for token in result.outputs[0].token_ids:
                    assert token == int(reference_logits(theirs, row)[-1].argmax())
                    row.append(token)
            assert round == 0 or results[0].num_cached_tokens >= 32
