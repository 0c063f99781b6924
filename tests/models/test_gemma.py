"""Gemma in whole engines: names of checkpoints that also take images, windows that give pages back, shared caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PretrainedConfig,
)

from quire import LLM, SamplingParams
from quire.distributed.experts import ExpertRanks
from quire.errors import UnsupportedModelError
from quire.loading.model_config import ModelConfig
from quire.models.gemma4 import Gemma4Experts
from tests.conftest import assert_idle
from tests.models.harness import (
    assert_same,
    checkpoint_tensors,
    empty_model,
    in_chunks,
    load,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.zoo import ZOO
from tests.quantization.test_on_load import fake

PROMPTS = [[7, 30, 51, 9, 64, 80, 3, 21] * 3, [11, 90, 4], [60, 61, 62, 63, 64, 65, 66] * 2]
BLOCKS = {"gemma-3": 24, "gemma-4": 24, "gemma-4-shared": 24, "gemma-4-mixture": 24}
"""Pages that are too few for all prompts at once."""
HITS = [20, 0, 12]
"""Tokens of whole blocks of 4 before a prompt's last token."""
LENGTH = 12


def write(folder: Path, reference: Any, architecture: str, prefix: str) -> None:
    """A checkpoint of the reference, with a tensor of a vision tower; `prefix` is in place of `model.`."""
    raw = json.loads(json.dumps(reference.config.to_dict()))
    tensors = {"vision_tower.patch.weight": torch.zeros(3)} if prefix != "model." else {}
    for name, tensor in reference.state_dict().items():
        if name != "lm_head.weight":  # tied
            tensors[name.replace("model.", prefix, 1)] = tensor.contiguous()
    if prefix != "model.":
        raw = {"model_type": "gemma3", "text_config": raw, "vision_config": {"hidden_size": 3}}
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def greedy(reference: Any, prompt: list[int], count: int = LENGTH) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(reference(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(prompt) :]


def engine(folder: Path, **settings: Any) -> LLM:
    usual = {
        "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 96, "block_size": 4, "max_num_seqs": 3,
        "max_num_batched_tokens": 16, "skip_tokenizer_init": True,
    }  # fmt: skip
    return LLM(str(folder), **(usual | settings))


def run(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Tokens, and prompt tokens found in the cache."""
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs], [each.num_cached_tokens for each in outputs]


def window_groups(llm: LLM) -> list[int | None]:
    return [group.window for group in llm.llm_engine.core.scheduler.tables.groups if group.kind == "window"]


@pytest.mark.parametrize(
    ("name", "architecture", "prefix"),
    [
        ("gemma-2", "Gemma2ForCausalLM", "model."),
        ("gemma-3", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("gemma-3", "Gemma3ForConditionalGeneration", "model.language_model."),
    ],
)
def test_tokens_are_those_of_transformers(name: str, architecture: str, prefix: str, tmp_path: Path) -> None:
    reference = random_reference(ZOO[name])
    write(tmp_path, reference, architecture, prefix)
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    with engine(tmp_path) as llm:
        assert run(llm) == (expected, [0, 0, 0])
        assert run(llm) == (expected, HITS)


@pytest.mark.parametrize("name", ["gemma-3", "gemma-4", "gemma-4-shared", "gemma-4-mixture"])
def test_a_saved_checkpoint_in_too_few_pages(name: str, tmp_path: Path) -> None:
    """Saved by transformers, with tied embeddings; rows are preempted and give back pages behind their windows."""
    reference = random_reference(ZOO[name])
    reference.save_pretrained(tmp_path)
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    with engine(tmp_path) as llm:
        assert run(llm) == (expected, [0, 0, 0])
        assert run(llm) == (expected, HITS)
        assert set(window_groups(llm)) == {6}
    with engine(tmp_path, num_gpu_blocks_override=BLOCKS[name]) as llm:
        assert run(llm)[0] == expected
        assert llm.llm_engine.core.scheduler.stats.preemptions
        assert_idle(llm)


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8,
}  # fmt: skip
EMBEDDER = {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 8, "mm_posemb_size": 4, "output_proj_dims": 32}
UNIFIED = {"model_type": "gemma4_unified_text", "sliding_window": 6, "use_bidirectional_attention": "vision"}


def with_images() -> list[tuple[type, PretrainedConfig]]:
    text = ZOO["gemma-4"].to_dict()
    kept = ("layer_types", "rope_parameters", "per_layer_config", "attention_k_eq_v", "final_logit_softcapping")
    sizes = [key for key in text if key.endswith("_size") and "per_layer" not in key and "moe" not in key]
    sizes += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"]
    unified = {key: text[key] for key in (*kept, *sizes)} | UNIFIED
    return [
        (Gemma4ForConditionalGeneration, Gemma4Config(text_config=text, vision_config=VISION)),
        (
            Gemma4UnifiedForConditionalGeneration,
            Gemma4UnifiedConfig(text_config=unified, vision_config=EMBEDDER, audio_config={"audio_embed_dim": 8}),
        ),
    ]


@pytest.mark.parametrize(("kind", "config"), with_images())
def test_the_text_part_of_a_model_that_takes_images(kind: type, config: PretrainedConfig, tmp_path: Path) -> None:
    whole = kind(config).eval()
    reference = random_reference(config.text_config)
    whole.model.language_model.load_state_dict(reference.model.state_dict())
    whole.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        assert run(llm)[0] == [greedy(reference, prompt) for prompt in PROMPTS]


def changed(name: str, **changes: Any) -> PretrainedConfig:
    return type(ZOO[name])(**(ZOO[name].to_dict() | changes))


def many_heads() -> PretrainedConfig:
    """4 KV heads in layers with a window, 2 in the others."""
    own = {"head_dim": 16, "num_key_value_heads": 2}
    return changed("gemma-4", num_key_value_heads=4, per_layer_config={"2": own, "3": own})


def test_what_published_configs_say_and_leave_out() -> None:
    """Heads of full layers have keys of their own; layer types and ropes may be missing."""
    own = {"head_dim": 16, "num_key_value_heads": 1}
    config = changed("gemma-4", num_hidden_layers=7, layer_types=None, rope_parameters=None)
    config = changed("gemma-4", **(config.to_dict() | {"per_layer_config": {"5": own, "6": own}}))
    reference = random_reference(config)
    raw = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "per_layer_config")}
    raw |= {"architectures": ["Gemma4ForCausalLM"], "rope_parameters": None}
    ours = empty_model(ModelConfig.from_dict(raw | {"global_head_dim": 16, "num_global_key_value_heads": 1}))
    load(ours, checkpoint_tensors(reference))
    assert_same(in_chunks(ours, PROMPTS[0], 5), reference_logits(reference, PROMPTS[0]))


def test_ranks_with_whole_experts_sum_to_the_whole() -> None:
    reference = random_reference(ZOO["gemma-4-mixture"])
    parts: list[Gemma4Experts] = []
    for place in (None, ExpertRanks(0, 2, 1), ExpertRanks(1, 2, 1)):
        model = empty_model(model_config(reference), experts=place)
        load(model, checkpoint_tensors(reference))
        parts.append(next(each for each in model.modules() if isinstance(each, Gemma4Experts)))
    stream, normed = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(1))
    whole, *own = (part.mixed(stream, normed) for part in parts)
    torch.testing.assert_close(sum(own), whole)


def test_matrices_in_few_bits(tmp_path: Path) -> None:
    """Keys that are values too, and experts."""
    sizes = {"intermediate_size": 64, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    reference = random_reference(changed("gemma-4", **sizes, moe_intermediate_size=32))
    reference.save_pretrained(tmp_path)
    for name, weight in reference.named_parameters():
        if weight.dim() > 1 and "embed" not in name and "router" not in name:
            weight.data = torch.stack([fake(each, "int4") for each in weight.data.view(-1, *weight.shape[-2:])])
            weight.data = weight.data.squeeze(0)
    with engine(tmp_path, quantization="int4") as llm:
        assert run(llm)[0] == [greedy(reference, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("config", [many_heads(), ZOO["gemma-4-shared"]], ids=["heads", "shared"])
def test_scales_of_an_8_bit_cache_are_those_of_the_layer_that_writes_it(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    """A scale of each KV head, of which layers have different numbers; powers of 2 change no code's digits."""
    random_reference(config).save_pretrained(tmp_path)
    with engine(tmp_path, kv_cache_dtype="fp8") as llm:
        expected = run(llm)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("k_norm.weight")]:
        heads = tensors[key.replace("k_norm", "k_proj")].shape[0] // tensors[key].shape[0]
        tensors[key.replace("k_norm.weight", "k_scale")] = torch.full((heads, 1, 1), 0.25)
        tensors[key.replace("k_norm.weight", "v_scale")] = torch.full((heads, 1, 1), 0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    with engine(tmp_path, kv_cache_dtype="fp8") as llm:
        assert run(llm)[0] == expected


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma-2", {"hidden_activation": "relu"}),
        ("gemma-3", {"use_bidirectional_attention": True}),
        ("gemma-4", {"use_bidirectional_attention": "all"}),
        ("gemma-4", {"layer_types": ["chunked_attention"] * 4}),
        ("gemma-4", {"per_layer_config": {"1": {"sliding_window": 3}}}),
        ("gemma-4", {"num_kv_shared_layers": 4}),
    ],
)
def test_what_is_not_implemented_is_refused(name: str, change: dict[str, Any]) -> None:
    architecture = {"gemma-2": "Gemma2", "gemma-3": "Gemma3", "gemma-4": "Gemma4"}[name] + "ForCausalLM"
    raw = ZOO[name].to_dict() | {"architectures": [architecture]} | change
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        empty_model(ModelConfig.from_dict(raw))


def test_what_a_published_text_config_leaves_out() -> None:
    """gemma-3-4b-it's config names little of its text part."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = ModelConfig.from_dict(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.tie_embeddings
    assert (config.rope["rope_theta"], config.rope["rope_type"], config.rope["factor"]) == (1e6, "linear", 8.0)
    assert config.window_rope is not None
    assert (config.window_rope["rope_theta"], config.window_rope["rope_type"]) == (10000.0, "default")


@pytest.mark.parametrize("name", ["gpt-oss", "gemma-2", "gemma-3", "gemma-4-shared"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_shows(name: str, off: int) -> None:
    """One token more or less in the windows changes the logits by far more than rounding does."""
    reference = random_reference(ZOO[name])
    tokens = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(5)).tolist()
    theirs = reference_logits(reference, tokens)
    config = model_config(reference)
    raw = dict(config.raw) | {"sliding_window": config.raw["sliding_window"] + off}
    model = empty_model(ModelConfig.from_dict(raw))
    load(model, checkpoint_tensors(reference))
    ours = in_chunks(model, tokens, 7)
    first = config.raw["sliding_window"] + min(off, 0)  # the first token that sees another window
    torch.testing.assert_close(ours[:first], theirs[:first], rtol=0, atol=1e-4 * theirs.abs().max().item())
    assert (ours[first:] - theirs[first:]).abs().amax(-1).min() > 1e-2
