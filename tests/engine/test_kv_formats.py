"""The engine with keys and values in 8 bits: the tokens of transformers with fake-quantized keys and values, in every
way that blocks are reused or moved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, ConfigError
from tests.conftest import TINY_VOCAB, write_tiny_model

FORMATS = ["fp8", "fp8_per_token_head", "int8_per_token_head"]
MakeLLM = Callable[..., LLM]
PROMPTS = [[(11 * i + 7 * j * j + 3) % TINY_VOCAB for j in range(9 + 17 * i)] for i in range(4)]
LENGTH = 10


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False} | changes)


def fake_quantized(x: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """What x [..., head_dim] becomes in the cache."""
    largest = 127.0 if name.startswith("int8") else 448.0
    by = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-10) if "per_token" in name else torch.tensor(scale)
    scaled = (x / by).clamp(-largest, largest)
    return (scaled.round() if name.startswith("int8") else scaled.to(torch.float8_e4m3fn).float()) * by


class QuantizedCache(DynamicCache):
    """Keys and values pass through the codes as they are stored."""

    def __init__(self, name: str, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__()
        self._quantize = name, scales

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        name, (key_scale, value_scale) = self._quantize
        keys = fake_quantized(key_states, name, key_scale)
        return super().update(keys, fake_quantized(value_states, name, value_scale), *rest, **more)


class Reference:
    """Greedy tokens of transformers, token by token."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def tokens(
        self, prompt: list[int], name: str, scales: tuple[float, float] = (1.0, 1.0), count: int = LENGTH
    ) -> Any:
        cache, given, found = QuantizedCache(name, scales), list(prompt), []
        for _ in range(count):
            logits = self.model(torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0, -1]
            given = [int(logits.argmax())]
            found += given
        return found


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, list[list[int]]]:
    found = {name: [reference.tokens(prompt, name) for prompt in PROMPTS] for name in FORMATS}
    assert len({str(tokens) for tokens in found.values()}) == len(FORMATS), "the formats differ"
    return found


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS, **changes: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, greedy(**changes), use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


SETTINGS = {
    "plain": {},
    "tiny chunks": {"max_num_batched_tokens": 6, "max_num_seqs": 3, "block_size": 4},
    "recomputed": {"num_gpu_blocks_override": 24, "block_size": 4, "enable_prefix_caching": False},
    "swapped": {"num_gpu_blocks_override": 24, "block_size": 4, "swap_space": 0.01, "pipeline_depth": 1},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", SETTINGS)
def test_tokens(make_llm: MakeLLM, expected: dict[str, list[list[int]]], name: str, way: str) -> None:
    llm = make_llm(kv_cache_dtype=name, **SETTINGS[way])
    assert tokens_of(llm) == expected[name]
    stats = llm.llm_engine.core.scheduler.stats
    assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in SETTINGS[way])
    if way == "plain":  # again, from cached blocks, and in several sequences
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPTS[3]}], greedy(n=3, temperature=1.0, top_k=1), use_tqdm=False
        )
        assert outputs[0].num_cached_tokens == 48
        assert [list(sample.token_ids) for sample in outputs[0].outputs] == [expected[name][3]] * 3


@pytest.mark.slow
def test_two_ranks(make_llm: MakeLLM, expected: dict[str, list[list[int]]]) -> None:
    name = "int8_per_token_head"
    llm = make_llm(kv_cache_dtype=name, tensor_parallel_size=2, swap_space=0.01)
    assert tokens_of(llm) == expected[name]


def test_sessions_wake_with_the_same_format_only(make_llm: MakeLLM, reference: Reference, tmp_path: Path) -> None:
    prompt = PROMPTS[3]
    truth: list[int] = list(prompt)
    for name, finds in itertools.chain([("fp8", None), ("fp8_e4m3", True), ("fp8_per_token_head", False)]):
        llm = make_llm(kv_cache_dtype=name, swap_space=0.001, kv_disk=str(tmp_path), kv_disk_size=0.001)
        if finds is None:
            llm.sessions.create("s", prompt)
        output = llm.sessions.get("s").generate(greedy(max_tokens=4))
        assert finds is None or (output.num_cached_tokens > 0) == finds
        assert list(output.outputs[0].token_ids) == reference.tokens(truth, name, count=4)
        truth = llm.sessions.get("s").tokens
        llm.sessions.get("s").suspend()
        llm.shutdown()


def test_capacity(make_llm: MakeLLM) -> None:
    blocks = {}
    for name in ("auto", "bfloat16", *FORMATS):
        llm = make_llm(
            kv_cache_dtype=name, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 17, dtype="bfloat16"
        )
        blocks[name] = llm.llm_engine.info.num_blocks
    # A token has 2 layers of 2 * 2 heads of 16 in two bytes or one, 4 bytes of id, and with scales 4 bytes a head.
    assert blocks == {
        "auto": (1 << 17) // (16 * 260) - 1, "bfloat16": (1 << 17) // (16 * 260) - 1,
        "fp8": (1 << 17) // (16 * 132) - 1,
        "fp8_per_token_head": (1 << 17) // (16 * 164) - 1, "int8_per_token_head": (1 << 17) // (16 * 164) - 1,
    }  # fmt: skip


def write_scaled(folder: Path, scales: dict[str, Any], **config: Any) -> Path:
    """The tiny model with tensors of scales in each layer's attention, and fields in its config."""
    write_tiny_model(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, (name, value) in itertools.product(range(2), scales.items()):
        tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value, dtype=torch.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


CALIBRATED = {
    "compressed-tensors": {"k_scale": [0.031], "v_scale": [0.007], "q_scale": [3.0]},
    "per head": {"k_scale": [[[0.031]], [[0.031]]], "v_scale": [[[0.007]], [[0.007]]], "k_zero_point": [0.0]},
    "older": {"k_proj.output_scale": 0.031, "v_proj.output_scale": 0.007, "prob_scale": 1.0},
    "ModelOpt": {"k_proj.k_scale": 0.031, "v_proj.v_scale": 0.007},
    "one for both": {"kv_scale": 0.031},
}


@pytest.mark.parametrize("kind", CALIBRATED)
def test_scales_of_the_checkpoint(make_llm: MakeLLM, reference: Reference, tmp_path: Path, kind: str) -> None:
    scales = CALIBRATED[kind]
    folder = write_scaled(tmp_path, scales)
    used = (0.031, 0.031 if kind == "one for both" else 0.007)
    expected = [reference.tokens(prompt, "fp8", used) for prompt in PROMPTS]
    assert expected != [reference.tokens(prompt, "fp8") for prompt in PROMPTS]
    assert tokens_of(make_llm(folder, kv_cache_dtype="fp8")) == expected
    plain = make_llm(folder)
    assert plain.llm_engine.info.num_blocks and tokens_of(plain) == tokens_of(make_llm())


@pytest.mark.parametrize(
    "described",
    [
        {"quantization_config": {"quant_method": "x", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
        {"quantization_config": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}},
        {},
    ],
    ids=["compressed-tensors", "ModelOpt", "ModelOpt, own file"],
)
def test_a_checkpoint_may_ask_for_fp8(
    described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.loading.files import local_files
    from quire.loading.model_config import read_model_config
    from quire.worker.building import choose_kv_format

    from quire.config import EngineConfig  # isort: skip

    write_scaled(tmp_path, {}, **described)
    if not described:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    files = local_files("m", tmp_path)
    model = read_model_config(files)
    for wanted, found in (("auto", "fp8"), ("bfloat16", "bfloat16"), ("int8_per_token_head", "int8_per_token_head")):
        assert choose_kv_format(EngineConfig(kv_cache_dtype=wanted), files, model, torch.bfloat16).name == found


def test_refusals(make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype.*fp8_e5m2"):
        make_llm(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="kv_cache_dtype is float16, but activations are float32"):
        make_llm(kv_cache_dtype="float16")
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.k_scale has shape \(3,\)"):
        make_llm(write_scaled(tmp_path / "a", {"k_scale": [1.0, 1.0, 1.0]}), kv_cache_dtype="fp8")
    with pytest.raises(CheckpointError, match="layers.0.self_attn.v_scale holds"):
        make_llm(write_scaled(tmp_path / "b", {"v_scale": [float("nan")]}), kv_cache_dtype="fp8")
    asks = {"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}}
    with pytest.raises(CheckpointError, match="only 8-bit floats"):
        make_llm(write_scaled(tmp_path / "c", {}, **asks))
