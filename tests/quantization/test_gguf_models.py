"""Models whose GGUF matrices stay packed: every weight is the dequantized one, and so are logits and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from quire import LLM, SamplingParams
from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.kernels.weights.superblock import SuperblockWeight
from quire.layers.build_context import collect_targets
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.quantization.schemes.gguf import GGUFScheme
from tests.kernels.gguf_blocks import random_blocks
from tests.models.harness import empty_model, in_chunks

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, EXPERTS, LAYERS = 256, 1024, 4, 2, 96, 4, 2
TOKENS = [5, 17, 80, 3, 64, 11, 2, 9]
# As llama.cpp mixes them in a Q4_K_M file, and some more.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_output": "Q5_1", "ffn_down_exps": "Q6_K"}


def write_model(path: Path, family: str, encodings: dict[str, str], default: str) -> Path:
    """A random model; the encoding of a matrix is by its GGUF name without the layer."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN)
    }  # fmt: skip
    if family == "llama":
        shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    else:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(512)
        writer.add_key_length(HIDDEN // HEADS)
        tall, wide = (EXPERTS, 512, HIDDEN), (EXPERTS, HIDDEN, 512)
        shapes |= {"ffn_gate_exps": tall, "ffn_up_exps": tall, "ffn_down_exps": wide}
    seed = 0

    def matrix(name: str, shape: tuple[int, ...]) -> None:
        nonlocal seed
        seed += 1
        encoding = encodings.get(name.split(".")[-2], default)
        raw = random_blocks(encoding, int(np.prod(shape[:-1])), shape[-1], seed, 2e-4 if encoding[-1] == "K" else 0.01)
        writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=Kind[encoding])

    matrix("token_embd.weight", (VOCAB, HIDDEN))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}.weight", shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        if family != "llama":
            router = np.random.default_rng(layer).standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
            for name in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN // HEADS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, packed: bool, ranks: Ranks | None = None, experts: ExpertRanks | None = None) -> Any:
    files = local_files("m", path)
    scheme = GGUFScheme(GGUFCheckpoint(path)) if packed else None
    model = empty_model(read_model_config(files), ranks, experts=experts, scheme=scheme)
    load_weights(collect_targets(model), model.ignores, open_checkpoint(files), progress=False)
    return model


def weights_of(model: nn.Module) -> dict[str, Any]:
    names = ("weight", "gate_up", "down", "router")
    held = {path: vars(module) | module._parameters for path, module in model.named_modules()}
    return {f"{path}.{name}": own[name] for path, own in held.items() for name in names if own.get(name) is not None}


def assert_same_weights(packed: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Bit by bit, in float32; returns the packed model's weights."""
    ours, expected = weights_of(packed), weights_of(plain)
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(values, expected[name]), name
    return ours


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "dense.gguf", "llama", MIXED, "Q4_K")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "mixture.gguf", "qwen3moe", MIXED, "Q4_K")


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp_rank=0, tp_size=2), Ranks(tp_rank=1, tp_size=2)], ids=str)
def test_every_weight_of_a_rank_is_the_dequantized_one(dense: Path, ranks: Ranks) -> None:
    packed, plain = load(dense, True, ranks), load(dense, False, ranks)
    held = assert_same_weights(packed, plain)
    fused = held["model.layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(fused, SplitWeight)  # V is in another encoding than Q and K
    assert [part.kind.name for part in fused.parts] == ["Q4_K", "Q6_K"]  # type: ignore[union-attr]
    assert isinstance(held["model.embed_tokens.weight"], SuperblockWeight)
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]  # tied


def test_logits_are_those_of_the_dequantized_model(dense: Path, mixture: Path) -> None:
    for path in (dense, mixture):
        plain = in_chunks(load(path, False), TOKENS, 3)
        torch.testing.assert_close(in_chunks(load(path, True), TOKENS, 3), plain, rtol=2e-4, atol=2e-4)
        assert plain.std() > 0.01


def test_experts_stay_packed_on_every_rank(mixture: Path) -> None:
    held = assert_same_weights(load(mixture, True), load(mixture, False))
    stack = held["model.layers.0.mlp.gate_up"]
    assert isinstance(stack, SuperblockWeight) and stack.shape == (EXPERTS, 2 * 512, HIDDEN)
    for rank in range(2):
        ranks = Ranks(tp_rank=rank, tp_size=2)
        assert_same_weights(load(mixture, True, ranks), load(mixture, False, ranks))
        some = ExpertRanks(rank, 2)
        assert_same_weights(load(mixture, True, experts=some), load(mixture, False, experts=some))


def test_a_cut_inside_a_block_is_refused_with_the_module_and_the_sizes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", {}, "Q5_K")
    with pytest.raises(ConfigError, match=r"o_proj .*Q5_K.* 2 tensor-parallel ranks: .*multiple of 256") as caught:
        load(path, True, Ranks(tp_rank=0, tp_size=2))
    assert caught.value.value == 2


@pytest.fixture
def generate() -> Iterator[Callable[..., tuple[list[int], Any]]]:
    made: list[LLM] = []

    def run(path: Path | None, prompt: list[int] | str, count: int, **settings: Any) -> tuple[list[int], Any]:
        name = () if path is None else (str(path),)
        made.append(
            LLM(*name, dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=128, **settings)
        )
        prompts = [{"prompt_token_ids": prompt}] if isinstance(prompt, list) else [prompt]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1, detokenize=path is None)
        (result,) = made[-1].generate(prompts, params, use_tqdm=False)
        return list(result.outputs[0].token_ids), result.outputs[0].cumulative_logprob

    yield run
    for llm in made:
        llm.shutdown()


def test_the_engine_generates_the_same_tokens(dense: Path, mixture: Path, generate: Callable[..., Any]) -> None:
    for path in (dense, mixture):
        tokens, _ = generate(path, TOKENS, 12, skip_tokenizer_init=True, cpu_weights="dense")
        assert generate(path, TOKENS, 12, skip_tokenizer_init=True, quantization="gguf")[0] == tokens


def test_the_default_model_writes_the_same_text(generate: Callable[..., Any]) -> None:
    prompt = "The three states of matter are"
    tokens, logprob = generate(None, prompt, 2, cpu_weights="dense")
    again, other = generate(None, prompt, 2, quantization="gguf")
    assert again == tokens and other == pytest.approx(logprob, abs=1e-3)
