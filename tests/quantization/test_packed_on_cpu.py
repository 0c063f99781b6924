"""`cpu_weights` "packed": matrices in few bits stay packed on a CPU, with activations in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.engine.tiers import kv_fingerprint
from quire.errors import ConfigError
from quire.kernels.cpu.build import library
from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.strips import StripWeight
from quire.layers.build_context import collect_targets
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.quantization.find import find_scheme, resolve_cpu_weights
from quire.quantization.formats.gguf import GGUFFormat
from quire.quantization.schemes.gguf import GGUFScheme
from quire.worker.paths import TapeDecodePath
from tests.models.harness import empty_model, in_chunks
from tests.quantization.checkpoints import write
from tests.quantization.test_gguf_models import MIXED, TOKENS, weights_of, write_model


def load(path: Path, packed: bool, ranks: Ranks | None = None) -> Any:
    files = local_files("m", path)
    scheme = GGUFScheme(GGUFCheckpoint(path), interleaved=True) if packed else None
    model = empty_model(read_model_config(files), ranks, scheme=scheme)
    load_weights(collect_targets(model), model.ignores, open_checkpoint(files), progress=False)
    return model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "dense.gguf", "llama", MIXED, "Q4_K")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "mixture.gguf", "qwen3moe", MIXED, "Q4_K")


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp_rank=1, tp_size=2)], ids=str)
def test_every_matrix_of_a_rank_is_the_files(dense: Path, ranks: Ranks) -> None:
    """Bit by bit, packed once: the head is the embedding's matrix."""
    held, plain = weights_of(load(dense, True, ranks)), weights_of(load(dense, False, ranks))
    assert held.keys() == plain.keys()
    for name, weight in held.items():
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(values, plain[name]), name
    fused = held["model.layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(fused, SplitWeight) and all(isinstance(part, InterleavedWeight) for part in fused.parts)
    assert isinstance(held["model.embed_tokens.weight"], InterleavedWeight)
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]


def test_experts_stay_packed(mixture: Path) -> None:
    held, plain = weights_of(load(mixture, True)), weights_of(load(mixture, False))
    for name in ("gate_up", "down"):
        weight = held[f"model.layers.0.mlp.{name}"]
        assert isinstance(weight, InterleavedWeight)
        assert torch.equal(weight.dequantize(), plain[f"model.layers.0.mlp.{name}"])
    assert isinstance(held["model.layers.0.self_attn.o_proj.weight"], InterleavedWeight)


def test_logits_are_those_of_the_dequantized_model_within_8_bits(dense: Path, mixture: Path) -> None:
    for path in (dense, mixture):
        plain, packed = (in_chunks(load(path, how), TOKENS, 3) for how in (False, True))
        assert (packed - plain).std() < 0.03 * plain.std()
        assert not torch.equal(packed, plain)


PROMPTS = [[5, 17, 80, 3, 64, 11, 2, 9] * 3, [7, 8, 9], list(range(40))]


def test_tokens_do_not_depend_on_batch_chunks_cache_drafts_or_the_tape(
    dense: Path, make_llm: Callable[..., LLM]
) -> None:
    def generate(prompts: list[list[int]], **settings: Any) -> list[tuple[list[int], float]]:
        llm = make_llm(dense, skip_tokenizer_init=True, max_model_len=128, cpu_weights="packed", **settings)
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts * 2], params, use_tqdm=False)
        return [(list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob or 0.0) for each in results]

    together = generate(PROMPTS)
    assert together[:3] == together[3:]
    assert generate(PROMPTS, max_num_batched_tokens=16, enable_prefix_caching=False) == together
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    assert generate(PROMPTS, speculative_config=drafts, max_num_seqs=2) == together
    for prompt, expected in zip(PROMPTS, together, strict=False):
        assert generate([prompt])[0] == expected


def test_a_decode_of_packed_weights_is_recorded(dense: Path, make_llm: Callable[..., LLM]) -> None:
    """The tape takes native calls only: embedding, fused matrices of several kinds and the head are such."""
    if library() is None:
        pytest.skip("no C++ compiler on this machine")
    recorded = []
    original = TapeDecodePath._record

    def record(self: TapeDecodePath, shape: Any, step: Any) -> torch.Tensor:
        hidden = original(self, shape, step)
        recorded.append(shape in self._passes)
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TapeDecodePath, "_record", record)
        llm = make_llm(dense, skip_tokenizer_init=True, max_model_len=128, cpu_weights="packed")
        params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    assert recorded == [True]


@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_one(dense: Path, make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)
    found = []
    for size in (1, 2):
        settings = {"tensor_parallel_size": size, "cpu_weights": "packed", "max_model_len": 128}
        llm = make_llm(dense, skip_tokenizer_init=True, **settings)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        found.append([list(each.outputs[0].token_ids) for each in results])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"quantization": "int8"}, "quantization is 'int8'"), ({"load_format": "safetensors"}, "is a GGUF file")],
)
def test_what_it_does_not_apply_to_is_refused(dense: Path, settings: dict[str, str], reason: str) -> None:
    config = EngineConfig(model=str(dense), cpu_weights="packed", **settings)  # type: ignore[arg-type]
    files = local_files("m", dense)
    with pytest.raises(ConfigError, match=f"cpu_weights is 'packed', but .*{reason}") as caught:
        find_scheme(config, files, read_model_config(files), on_cpu=True)
    assert caught.value.parameter == "cpu_weights"


def test_a_gpu_and_a_model_without_packed_matrices_are_refused(dense: Path, tiny_model: Path) -> None:
    config = EngineConfig(cpu_weights="packed")
    files = local_files("m", dense)
    with pytest.raises(ConfigError, match="the device is not a CPU"):
        find_scheme(config, files, read_model_config(files), on_cpu=False)
    with pytest.raises(ConfigError, match="are not in few bits"):
        LLM(str(tiny_model), device="cpu", cpu_weights="packed")
    with pytest.raises(ConfigError, match="cpu_weights must be one of auto, dense, packed"):
        EngineConfig(cpu_weights="sparse")


def test_kept_kv_of_dense_weights_is_not_used(dense: Path) -> None:
    """Their numbers differ, and so do the keys of blocks on disk."""
    files = local_files("m", dense)
    model = read_model_config(files)
    keys = [kv_fingerprint(EngineConfig(cpu_weights=how), files, model, "float32") for how in ("dense", "packed")]
    assert keys[0] != keys[1]


def resolved(path: Path, on_cpu: bool = True, **settings: Any) -> str:
    files = local_files("m", path)
    config = EngineConfig(model=str(path), **settings)
    return resolve_cpu_weights(config, files, read_model_config(files), on_cpu).cpu_weights


def test_auto_packs_what_there_are_kernels_for(dense: Path, tiny_model: Path, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C++ compiler on this machine")
    checkpoints = {name: tmp_path / name / "model" for name in ("awq", "int8", "fp8")}
    for name, folder in checkpoints.items():
        write(folder, name)
    assert [resolved(path) for path in (dense, checkpoints["awq"], checkpoints["int8"])] == ["packed"] * 3
    assert [resolved(path) for path in (tiny_model, checkpoints["fp8"])] == ["dense"] * 2
    assert resolved(dense, on_cpu=False) == resolved(dense, quantization="int8") == "dense"
    assert resolved(dense, quantization="gguf") == "dense"  # packed as on a GPU
    assert resolved(dense, cpu_weights="dense") == "dense"


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "int8"])
def test_integer_checkpoints_give_the_logits_of_their_values_within_8_bits(name: str, tmp_path: Path) -> None:
    """And the integers of the checkpoint bit by bit."""
    means = write(tmp_path / "model", name)
    files = local_files("m", tmp_path / "model")
    config, logits = read_model_config(files), {}
    for how in ("dense", "packed"):
        scheme = find_scheme(EngineConfig(cpu_weights=how), files, config, on_cpu=True)
        model = empty_model(config, scheme=scheme)
        load_weights(collect_targets(model), model.ignores, open_checkpoint(files), progress=False)
        logits[how] = in_chunks(model, TOKENS, 3)
    held = weights_of(model)
    weight = held["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(weight, StripWeight)
    assert torch.equal(weight.dequantize(), means["model.layers.1.mlp.down_proj.weight"])
    if name == "int8":  # activations are in 8 bits in both
        torch.testing.assert_close(logits["packed"], logits["dense"], rtol=1e-3, atol=1e-3)
        return
    assert (logits["packed"] - logits["dense"]).std() < 0.04 * logits["dense"].std()
    assert not torch.equal(logits["packed"], logits["dense"])


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_are_the_packages(name: str) -> None:
    raw = gguf.quantize(np.random.default_rng(1).standard_normal((20, 768)).astype(np.float32), Kind[name])
    found = GGUFFormat(name, interleaved=True)
    weight = found.allocate((20, 768), torch.float32, lambda size, kind: torch.zeros(size, dtype=kind))
    found.place({"weight": torch.from_numpy(raw)}, weight, slice(0, 20))
    assert isinstance(weight, StripWeight) and weight.bits == 2
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.dequantize(raw, Kind[name])))


def test_a_ternary_file_runs_packed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "ternary.gguf", "llama", MIXED | {"ffn_down": "TQ2_0", "attn_q": "TQ1_0"}, "Q4_K")
    plain, packed = (in_chunks(load(path, how), TOKENS, 3) for how in (False, True))
    held = weights_of(load(path, True))
    assert isinstance(held["model.layers.0.mlp.down_proj.weight"], StripWeight)
    assert (packed - plain).std() < 0.03 * plain.std()
