"""Gemma in whole engines: names of checkpoints that also take images, windows that give pages back, shared caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.errors import UnsupportedModelError
from quire.loading.model_config import ModelConfig
from tests.models.harness import (
    checkpoint_tensors,
    empty_model,
    in_chunks,
    load,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.zoo import ZOO

PROMPTS = [[7, 30, 51, 9, 64, 80, 3, 21] * 3, [11, 90, 4], [60, 61, 62, 63, 64, 65, 66] * 2]


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
def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(reference(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "architecture", "prefix"),
    [
        ("gemma-2", "Gemma2ForCausalLM", "model."),
        ("gemma-3", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("gemma-3", "Gemma3ForConditionalGeneration", "model.language_model."),
        ("gemma-4-shared", "Gemma4ForCausalLM", "model."),
    ],
)
def test_tokens_are_those_of_transformers(name: str, architecture: str, prefix: str, tmp_path: Path) -> None:
    reference = random_reference(ZOO[name])
    write(tmp_path, reference, architecture, prefix)
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(
        str(tmp_path), dtype="float32", device="cpu", num_gpu_blocks_override=96, block_size=4,
        max_num_batched_tokens=16, max_num_seqs=3, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time from cached prefixes
            for prompt, result in zip(PROMPTS, llm.generate(asked, sampling), strict=True):
                assert list(result.outputs[0].token_ids) == greedy(reference, prompt, 12)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma-2", {"hidden_activation": "relu"}),
        ("gemma-3", {"use_bidirectional_attention": True}),
        ("gemma-4", {"use_bidirectional_attention": "all"}),
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
