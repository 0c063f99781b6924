"""Engines with drafts by models yield the tokens of the engine without any; a draft that is the target is always
right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import QuireError
from tests.conftest import TINY_VOCAB, write_tiny_model
from tests.speculative.scripted import Tally
from tests.speculative.test_eagle3 import PLAIN, head_weights, save
from tests.speculative.test_mtp import Target

MakeLLM = Callable[..., LLM]
PROMPTS = [list(range(5, 41)), [11, 12, 13], [9, 8] * 10, list(range(5, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, max_tokens=17, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=7, max_tokens=21, ignore_eos=True, n=2),
]


def generate(llm: LLM, params: Any = PARAMS) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(shared_tiny: LLM) -> list[list[list[int]]]:
    return generate(shared_tiny)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random head."""
    config = {
        **PLAIN, "vocab_size": TINY_VOCAB, "draft_vocab_size": TINY_VOCAB, "hidden_size": 64, "target_hidden_size": 64,
        "max_position_embeddings": 256, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    weights = head_weights(config, vocab=TINY_VOCAB, target=64)
    return save(tmp_path_factory.mktemp("head"), config, weights)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 14},
        {"enforce_eager": True},
    ],
    ids=["recorded", "small", "eager"],
)
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_tokens_are_those_without_drafts(
    method: str, settings: dict[str, Any], make_llm: MakeLLM, expected: Any, tiny_model: Path, head: str
) -> None:
    """Greedy and seeded; with prefix hits in the second round; over a cache so small that rows are preempted."""
    draft = {"method": method, "model": head if method == "eagle3" else str(tiny_model), "tune": False}
    llm = make_llm(speculative_config={**draft, "num_speculative_tokens": 3}, **settings)
    tally = Tally(llm)
    assert generate(llm) == expected
    assert generate(llm) == expected
    assert tally.verified > 40 and (tally.accepted > 0 or method == "eagle3")  # a random head is never right


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_target_as_its_own_draft_is_always_right(method: str, make_llm: MakeLLM, tiny_model: Path) -> None:
    """Every draft is accepted: of greedy rows, and of seeded ones if drafts are drawn with their random numbers."""
    draft = {"model": str(tiny_model), "method": "draft_model", "draft_sample_method": method, "tune": False}
    llm = make_llm(speculative_config={**draft, "num_speculative_tokens": 3})
    tally = Tally(llm)
    seeded = SamplingParams(temperature=0.9, top_k=20, seed=7, max_tokens=21, ignore_eos=True)
    generate(llm, GREEDY if method == "greedy" else [GREEDY, seeded, PARAMS[1], seeded])
    assert tally.accepted == tally.verified > 40


@pytest.mark.parametrize("form", ["deepseek", "glm", "qwen3.5"])
def test_layers_that_predict_change_no_token(form: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    """Latent, plain and hybrid caches; rejected drafts leave nothing behind in states."""
    target = Target(form)
    folder = target.save(tmp_path / "model")
    settings = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 64}
    plain = generate(make_llm(**settings), GREEDY)
    draft = {"method": "mtp", "num_speculative_tokens": 2, "tune": False}
    llm = make_llm(**settings, speculative_config=draft)
    tally = Tally(llm)
    assert generate(llm, GREEDY) == plain
    assert tally.verified > 40


def test_drafts_on_two_ranks(expected: Any, tiny_model: Path, head: str) -> None:
    """The head is split over the target's ranks, and both draft the same."""
    draft = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "tune": False}
    with LLM(
        str(tiny_model), dtype="float32", num_gpu_blocks_override=128, device="cpu", tensor_parallel_size=2,
        speculative_config=draft,
    ) as llm:  # fmt: skip
        assert generate(llm) == expected


def test_drafts_that_do_not_fit_are_refused(make_llm: MakeLLM, tiny_model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": TINY_VOCAB + 8}))
    with pytest.raises(QuireError, match=f"vocabulary is {TINY_VOCAB + 8}, the model's is {TINY_VOCAB}"):
        make_llm(speculative_config={"model": str(other)})
    with pytest.raises(QuireError, match="LlamaForCausalLM has no layers for multi-token prediction"):
        make_llm(speculative_config={"method": "mtp"})
    tensors = load_file(tiny_model / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuireError, match=r"missing from the checkpoint:\n  - model.layers.0.input_layernorm.weight"):
        make_llm(speculative_config={"model": str(other)})
