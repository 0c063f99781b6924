"""Kinds of cache and formats of weights with what other tests of kinds leave out: grammars, predictions, replicas,
pipeline stages, beams over a cache in few bits. The tokens of transformers, or of the same engine without the pair."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.sampling import StructuredOutputsParams
from tests.conftest import assert_idle
from tests.engine.beam_reference import params_of
from tests.engine.test_cache_kinds import KINDS, PROMPTS, Case, greedy
from tests.models.test_hybrids import hybrid_reference

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "tune": False}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("hybrid", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("right", [0, 4, 10])
def test_predictions_of_a_hybrid(hybrid: Case, right: int) -> None:
    """The client's prediction is right for so many tokens; states are rolled back to the token where it is wrong."""
    with hybrid.open(speculative_config=NGRAM) as llm:
        prompts = []
        for prompt, expected in zip(PROMPTS, hybrid.tokens, strict=True):
            wrong = [(token + 1) % 90 for token in expected[right:]]
            prompts.append({"prompt_token_ids": prompt, "prediction": expected[:right] + wrong})
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == hybrid.tokens
        drafts = llm.llm_engine.core.scheduler.stats.drafts
        assert (drafts.accepted > 0) == (right > 0)
        assert_idle(llm)


def test_beams_over_a_cache_in_few_bits(hybrid: Case) -> None:
    """Forks and reordered rows copy codes and scales: the same beams with and without cached prompts."""
    found = []
    for caching in (True, False):
        with hybrid.open(kv_cache_dtype="int8_per_token_head", enable_prefix_caching=caching) as llm:
            for _ in range(2):
                (beams,) = llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], params_of(3, 6))
                found.append([list(beam.tokens) for beam in beams.sequences])
            assert_idle(llm)
    assert all(each == found[0] for each in found) and len(found[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 70}])
def test_grammars_of_a_hybrid(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Forms with and without drafts, in chunks and over a small cache: the same text each time."""
    from transformers import AutoTokenizer

    vocabulary = len(AutoTokenizer.from_pretrained(tiny_model))
    hybrid_reference("qwen3.5-moe", max_position_embeddings=256, vocab_size=vocabulary).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tiny_model / name).exists():
            shutil.copy(tiny_model / name, tmp_path / name)
    form = StructuredOutputsParams(regex=r"[a-d]{3} (the|world) [0-9]{2,12}z")
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=40, structured_outputs=form)
    texts = []
    common: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 4, "max_model_len": 256,
        "num_gpu_blocks_override": 600,
    }  # fmt: skip
    for more in ({}, {**settings, "speculative_config": NGRAM}, settings):
        with LLM(str(tmp_path), **{**common, **more}) as llm:
            outputs = llm.generate(["abcd the world", "in the sun", "hello 12"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            assert_idle(llm)
    assert texts[0] == texts[1] == texts[2]
    assert all(text[3] == " " and text.endswith("z") for text in texts[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_every_kind(kind: str, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    with case.open(data_parallel_size=2) as llm:
        case.check(llm)
        case.check(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "window"])  # gpt-oss has formats of its own
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_weights_in_few_bits_over_pipeline_stages(kind: str, format: str, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for stages in (1, 2):
        with case.open(quantization=format, pipeline_parallel_size=stages) as llm:
            outputs = llm.generate(prompts, greedy(), use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
