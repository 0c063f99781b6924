"""Hybrid models through the whole engine: the tokens of plain transformers, in chunks, batched, preempted, with prefix
hits, and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from tests.conftest import assert_idle
from tests.models.harness import random_reference
from tests.models.relatives import RELATIVES
from tests.models.test_hybrids import HYBRIDS, hybrid_reference
from tests.quantization.checkpoints import awq

PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (37, 21, 5)
]
LENGTH = 6
BLOCKS = {"qwen3.5-moe": 13, "nemotron-3": 13, "lfm2": 13, "bloom": 11, "jamba": 23}
"""Pages that are too few for all prompts at once."""
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@torch.no_grad()
def greedy(reference: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LENGTH):
        tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=["qwen3.5-moe", "nemotron-3", "mamba-2", "lfm2", "jamba", "bloom"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A random hybrid, or another model whose attention differs; and its tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    is_hybrid = request.param in HYBRIDS
    reference = hybrid_reference(request.param) if is_hybrid else random_reference(RELATIVES[request.param])
    reference.save_pretrained(folder)
    return folder, [greedy(reference, prompt) for prompt in PROMPTS]


def run(llm: LLM) -> tuple[list[list[int]], list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs], [each.num_cached_tokens for each in outputs]


def engine(folder: Path, **settings: Any) -> LLM:
    usual = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "block_size": 8, "skip_tokenizer_init": True}
    return LLM(str(folder), **(usual | settings))


def go_on(llm: LLM, prompt: list[int], tokens: list[int], cut: int) -> list[int]:
    """The tokens of a request that comes with the first `cut` of them, as after the death of its engine."""
    core, output = llm.llm_engine.core, tokens[:cut]
    request, _ = llm.llm_engine.inputs.make("a", {"prompt_token_ids": prompt}, GREEDY, 0.0)
    request.drawn = [tokens[:cut]]
    core.add(request)
    while core.has_work:
        output += core.step().tokens
    return output


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 8}, {"pipeline_depth": 1}], ids=["chunks", "overlapped"]
)
def test_tokens_and_prefix_hits(model: tuple[Path, list[list[int]]], settings: dict[str, Any]) -> None:
    folder, expected = model
    with engine(folder, **settings) as llm:
        assert run(llm) == (expected, [0, 0, 0])
        assert run(llm) == (expected, [32, 16, 0])
        assert go_on(llm, PROMPTS[0], expected[0], 2) == expected[0]
        assert_idle(llm)


def test_preempted(model: tuple[Path, list[list[int]]]) -> None:
    folder, expected = model
    if (name := folder.name[:-1]) not in BLOCKS:
        pytest.skip("a row of states alone does not grow")
    with engine(folder, num_gpu_blocks_override=BLOCKS[name]) as llm:
        assert run(llm)[0] == expected
        assert llm.llm_engine.core.scheduler.stats.preemptions
        assert_idle(llm)


def test_two_ranks(model: tuple[Path, list[list[int]]]) -> None:
    folder, expected = model
    if not folder.name.startswith("nemotron"):
        pytest.skip("once is enough here: tests/models has all of them on two ranks")
    with engine(folder, tensor_parallel_size=2) as llm:
        assert run(llm)[0] == expected


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_matrices_in_few_bits(name: str, tmp_path: Path) -> None:
    """Queries and gates of a head, and all of a key head, are adjacent rows; in few bits the outputs are reordered."""
    reference = hybrid_reference(name)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = ["mlp", "in_proj_b", "in_proj_a", "in_proj_ba", "lm_head"]
    for path, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in path for part in kept):
            stored, module.weight.data = awq(tensors.pop(f"{path}.weight"))
            tensors |= {f"{path}.{key}": tensor.contiguous() for key, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    config["quantization_config"] = described | {"modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(tmp_path, cpu_weights="dense") as llm:  # packed products round activations
        assert run(llm)[0] == [greedy(reference, prompt) for prompt in PROMPTS]
