"""Host memory and disk that keep keys and values in 8 bits (`kv_tier_dtype`): what comes back is what transformers
computes with a cache that is rounded at the same point, and folders of one encoding are not read by another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.tiers import kv_fingerprint
from quire.errors import ConfigError
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from tests.conftest import TINY_VOCAB
from tests.engine.test_kv_formats import fake_quantized
from tests.models.harness import random_reference
from tests.models.test_hybrids import hybrid_reference
from tests.models.zoo import ZOO

ENCODED = "int8_per_token_head"
MakeLLM = Callable[..., LLM]
PROMPTS = [[(11 * i + 7 * j * j + 3) % TINY_VOCAB for j in range(30 + 17 * i)] for i in range(4)]
LOGPROB_BOUND = 0.25
"""Nats. The tiny model's weights are large: its logprobs change more than those of a trained model."""


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)


def answer_of(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs."""
    sample = output.outputs[0]
    tokens = list(sample.token_ids)
    return tokens, [float(entry[token].logprob) for token, entry in zip(tokens, sample.logprobs, strict=True)]


@torch.inference_mode()
def answer_from_rounded(folder: Path, tokens: list[int], count: int, rounds: bool) -> tuple[list[int], list[float]]:
    """What transformers yields after `tokens`, all but the last of which are in a cache that is rounded first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = DynamicCache()
    model(torch.tensor([tokens[:-1]]), past_key_values=cache, use_cache=True)
    for layer in cache.layers if rounds else ():
        layer.keys, layer.values = (fake_quantized(x, ENCODED, 1.0) for x in (layer.keys, layer.values))
    given, found, logprobs = tokens[-1], [], []
    for _ in range(count):
        logits = model(torch.tensor([[given]]), past_key_values=cache, use_cache=True).logits[0, -1]
        given = int(logits.argmax())
        found.append(given)
        logprobs.append(float(logits.log_softmax(-1)[given]))
    return found, logprobs


def distance(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


TIERS = {
    "host": {"swap_space": 0.01},
    "disk": {"kv_disk_size": 0.01},
    "host and disk": {"swap_space": 0.001, "kv_disk_size": 0.01},
    "two ranks": {"swap_space": 0.001, "kv_disk_size": 0.01, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    "tiers", ["host", "disk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("host and disk", "two ranks"))]
)
def test_a_session_wakes_with_its_keys_and_values_rounded(
    make_llm: MakeLLM, tiny_model: Path, tmp_path: Path, tiers: str
) -> None:
    """From the disk in another engine; exactly if the switch is off."""
    settings: dict[str, Any] = TIERS[tiers] | {"kv_tier_dtype": ENCODED}
    if "kv_disk_size" in settings:
        settings["kv_disk"] = str(tmp_path)
    llm = make_llm(**settings)
    session = llm.sessions.create("s", PROMPTS[2])
    first, _ = answer_of(session.generate(greedy(3)))
    session.suspend()
    llm.reset_prefix_cache()
    if "kv_disk" in settings:
        llm.shutdown()
        llm = make_llm(**settings)
    output = llm.sessions.resume("s").generate(greedy(8))
    assert output.num_cached_tokens == len(PROMPTS[2]) + 2
    found, logprobs = answer_of(output)
    expected, rounded = answer_from_rounded(tiny_model, PROMPTS[2] + first, 8, True)
    same, exact = answer_from_rounded(tiny_model, PROMPTS[2] + first, 8, False)
    assert found == expected == same and distance(logprobs, rounded) < 1e-4
    assert 1e-3 < distance(rounded, exact) < LOGPROB_BOUND


@pytest.mark.parametrize("encoding", ["auto", ENCODED])
def test_an_engine_that_was_shut_down_frees_its_pages(make_llm: MakeLLM, encoding: str) -> None:
    llm = make_llm(swap_space=0.001, kv_tier_dtype=encoding)
    executor = llm.llm_engine.core._executor
    pages = weakref.ref(executor._worker._runner.batch.kv.data)  # type: ignore[attr-defined]
    llm.shutdown()
    gc.collect()
    assert pages() is None


@pytest.fixture
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than any link."""
    monkeypatch.setattr("quire.scheduler.swapping.LEAST_SWAP", 1)
    for choice in ("swapping_pays", "loading_pays"):
        monkeypatch.setattr(f"quire.kvcache.offload.costs.Costs.{choice}", lambda *_: True)


@pytest.mark.usefixtures("cheap_copies")
def test_rows_that_are_swapped_stay_close(make_llm: MakeLLM) -> None:
    """Until a token differs, which takes two of nearly the same probability, each has its logprob within the bound."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    exact = make_llm().generate(prompts, greedy(24), use_tqdm=False)
    llm = make_llm(num_gpu_blocks_override=48, block_size=4, swap_space=0.01, kv_tier_dtype=ENCODED, pipeline_depth=1)
    found = llm.generate(prompts, greedy(24), use_tqdm=False)
    scheduler = llm.llm_engine.core.scheduler
    assert scheduler.stats.swaps and scheduler.tiers is not None and scheduler.tiers.loaded
    distances, compared = [0.0], 0
    for one, other in zip(found, exact, strict=True):
        for (token, logprob), (true, true_logprob) in zip(
            zip(*answer_of(one), strict=True), zip(*answer_of(other), strict=True), strict=True
        ):
            distances.append(abs(logprob - true_logprob))
            if token != true:
                break
            compared += 1
    assert 1e-4 < max(distances) < LOGPROB_BOUND, "rounded, and not by more"
    assert compared >= 72


@pytest.mark.usefixtures("cheap_copies")
def test_folders_of_one_encoding_are_not_read_by_another(make_llm: MakeLLM, tmp_path: Path) -> None:
    for encoding, finds in ((ENCODED, None), ("auto", False), (ENCODED, True), ("auto", True)):
        llm = make_llm(kv_disk=str(tmp_path), kv_disk_size=1.0, kv_tier_dtype=encoding)
        output = llm.generate([{"prompt_token_ids": PROMPTS[3]}], greedy(1), use_tqdm=False)[0]
        assert finds is None or ((output.num_cached_tokens or 0) > 0) == finds
        if not finds:
            session = llm.sessions.create(encoding, PROMPTS[3])
            session.generate(greedy(1))
            session.suspend()
        llm.shutdown()


def test_nothing_changes_while_it_is_off(tiny_model: Path) -> None:
    files = local_files("m", tiny_model)
    model = read_model_config(files)
    plain, encoded = (
        kv_fingerprint(EngineConfig(swap_space=1.0, kv_tier_dtype=name), files, model, "float32")
        for name in ("auto", ENCODED)
    )
    assert encoded.startswith(plain) and encoded != plain
    assert plain.endswith(b"|float32|16|1"), "folders that were written before are found"


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2048 + 2 * 128), ("float32", 2048 + 4 * 128)])
def test_host_memory_holds_more_blocks(make_llm: MakeLLM, dtype: str, size: int) -> None:
    """A block has 2 layers of keys and values of 2 heads of 16 tokens of 16 numbers: 128 vectors, 2,048 numbers."""
    llm = make_llm(dtype=dtype, swap_space=0.001, kv_tier_dtype=ENCODED)
    tiers = llm.llm_engine.core.scheduler.tiers
    assert tiers is not None and tiers.costs.block_bytes == size
    assert tiers.host.num_slots == int(0.001 * 2**30) // size


def test_refusals(make_llm: MakeLLM, tmp_path: Path) -> None:
    for settings, why in [
        ({}, "kv_tier_dtype='int8_per_token_head' needs swap_space or kv_disk"),
        ({"swap_space": 1.0, "batch_invariant": True}, "kv_tier_dtype int8_per_token_head rounds .* batch_invariant"),
    ]:
        with pytest.raises(ConfigError, match=why):
            EngineConfig(kv_tier_dtype=ENCODED, **settings)
    with pytest.raises(ConfigError, match="kv_tier_dtype must be one of auto, int8_per_token_head; got 'fp8'"):
        EngineConfig(kv_tier_dtype="fp8", swap_space=1.0)
    with pytest.raises(ConfigError, match="cannot be used .* in 8 bits already \\(fp8\\)"):
        make_llm(kv_cache_dtype="fp8", swap_space=0.001, kv_tier_dtype=ENCODED)


@pytest.mark.parametrize("why", ["latent attention .* stay exact", "recurrent states stay exact"])
def test_what_must_stay_exact_is_refused(make_llm: MakeLLM, tmp_path: Path, why: str) -> None:
    is_latent = why.startswith("latent")
    reference = random_reference(ZOO["deepseek-v2-lite"]) if is_latent else hybrid_reference("qwen3.5-moe")
    reference.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"kv_tier_dtype int8_per_token_head cannot be used with this model: {why}"):
        make_llm(tmp_path, skip_tokenizer_init=True, swap_space=0.001, kv_tier_dtype=ENCODED)
