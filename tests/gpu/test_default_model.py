"""The default model's greedy text on the device equals the CPU's, and is sensible. The model is taken from quire's
cache (nothing is downloaded), or from QUIRE_TEST_MODEL."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import QuireError
from quire.loading.files import ModelFiles
from quire.loading.hub import DEFAULT_MODEL, resolve
from tests.conftest import assert_idle
from tests.gpu.near_ties import NearTies
from tests.gpu.target import DEVICE, MODEL, ON_A_GPU

pytestmark = [*ON_A_GPU, pytest.mark.timeout(900)]

LENGTH = 48
QUESTIONS = [
    "What is the capital of Japan?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
]
TEXTS = [
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
]
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve(MODEL or DEFAULT_MODEL, offline=True, progress=False)
    except QuireError as error:
        pytest.skip(f"the model is not on this machine: {error}")


def generate(files: ModelFiles, device: str, **settings: Any) -> list[RequestOutput]:
    settings = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 256, "max_num_seqs": 8} | settings
    with LLM(str(files.path), device=device, **settings) as llm:
        tokenizer = llm.get_tokenizer()
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for text in QUESTIONS
        ]
        outputs = llm.generate([*chats, *map(tokenizer.encode, TEXTS)], GREEDY, use_tqdm=False)
        assert_idle(llm)
    return outputs


@pytest.fixture(scope="module")
def on_the_cpu(files: ModelFiles) -> list[RequestOutput]:
    return generate(files, "cpu")


@cache
def reference_of(path: str) -> Any:
    from tests.engine.reference import transformers_model

    if not path.endswith(".gguf"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval()
    from pathlib import Path

    return transformers_model(Path(path)).to(DEVICE)


class LateReference:
    """Loaded only if a difference has to be judged."""

    def __init__(self, path: str) -> None:
        self._path = path

    def parameters(self) -> Any:
        return reference_of(self._path).parameters()

    def __call__(self, ids: torch.Tensor) -> Any:
        return reference_of(self._path)(ids)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True, "pipeline_depth": 0}], ids=["as usual", "eager"])
def test_float32_text_equals_the_cpus(
    files: ModelFiles, on_the_cpu: list[RequestOutput], settings: dict[str, Any]
) -> None:
    outputs = generate(files, DEVICE, **settings)
    ties = NearTies(LateReference(str(files.path)))
    for ours, theirs in zip(outputs, on_the_cpu, strict=True):
        ties.compare(ours.prompt_token_ids, ours.outputs[0].token_ids, theirs.outputs[0].token_ids)
        print(f"\n> {ours.prompt or theirs.prompt_token_ids[:6]}\n{ours.outputs[0].text}")
    ties.report("the default model", most=2)


def test_bfloat16_text_is_sensible(files: ModelFiles) -> None:
    outputs = generate(files, DEVICE, dtype="bfloat16")
    for output in outputs:
        print(f"\n{output.outputs[0].text}")
        assert len(set(output.outputs[0].token_ids)) > 8, "the same few tokens over and over"
    if "SmolLM2" in files.path.name:
        assert "Tokyo" in outputs[0].outputs[0].text
        assert "Paris" in outputs[len(QUESTIONS)].outputs[0].text
