"""The head that is trained: its unrolled steps against a computation position by position, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.loading.files import local_files
from quire.loading.model_config import ModelConfig, read_model_config
from quire.platforms import choose
from quire.speculative.draft_checkpoint import DraftCheckpoint
from quire.speculative.eagle3 import Eagle3Proposer
from quire.training.head import DraftHead, HeadShape, read_head, write_head
from quire.training.store import TokenSequence
from quire.training.target import TargetModel
from quire.training.trainer import draft_index
from tests.models.harness import loaded_model, random_reference
from tests.speculative.paged import Chunk, DraftRun
from tests.training.conftest import write_target

HIDDEN, HEADS, KV_HEADS, SIZE = 32, 4, 2, 8
TOKENS = torch.tensor([1, 5, 6, 20, 21, 22, 60, 100, 101, 127])


def config_of(folder: Path) -> ModelConfig:
    return read_model_config(local_files(str(folder), folder))


def made_head(folder: Path) -> DraftHead:
    shape = HeadShape.of_target(config_of(folder), len(TOKENS))
    head = DraftHead(shape, TOKENS)
    head.begin(torch.rand(3 * HIDDEN) + 0.5, None, torch.Generator().manual_seed(1))
    return head.double()


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Pairs (i, i + size / 2) as complex numbers."""
    angles = position * theta ** -(torch.arange(SIZE // 2, dtype=torch.float64) * 2 / SIZE)
    turned = torch.complex(x[..., : SIZE // 2], x[..., SIZE // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def one_by_one(head: DraftHead, features: torch.Tensor, vectors: torch.Tensor, start: int, steps: int) -> torch.Tensor:
    """Outputs of the draft steps from position `start`, as a server computes them: one position after another with a
    cache of keys. features [length, 3 * hidden]; vectors [tokens, hidden]: the embedding of each token of the text."""
    w, eps, theta = head.state_dict(), head.shape.norm_eps, head.shape.rope_theta
    layer = "midlayer."
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs = []
    state = torch.empty(0)
    for position in range(start + steps):
        if position <= start:
            state = (features[position] / head.scale) @ w["fc.weight"].T
        embedded = rms(vectors[position + 1], w[layer + "input_layernorm.weight"], eps)
        x = torch.cat([embedded, rms(state, w[layer + "hidden_norm.weight"], eps)])
        q, k, v = ((x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(-1, SIZE) for name in ("q", "k", "v"))
        keys.append(rotated(k, position, theta))
        values.append(v)
        mixed = []
        for number, query in enumerate(rotated(q, position, theta)):
            own = number * KV_HEADS // HEADS
            scores = torch.stack([key[own] for key in keys]) @ query / SIZE**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[own] for value in values]))
        stream = state + torch.cat(mixed) @ w[layer + "self_attn.o_proj.weight"].T
        normed = rms(stream, w[layer + "post_attention_layernorm.weight"], eps)
        gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        state = stream + (F.silu(normed @ gate) * (normed @ up)) @ down
        if position >= start:
            outputs.append(state)
    return torch.stack(outputs)


def test_unrolled_steps_are_those_of_a_server(target):
    head, steps = made_head(target), 4
    features = torch.randn(2, 7, 3 * HIDDEN, dtype=torch.float64)
    vectors = torch.randn(128, HIDDEN, dtype=torch.float64)
    tokens = torch.randint(0, 128, (2, 7 + steps))
    with torch.no_grad():
        found = head.unroll(features, tokens, lambda ids: F.embedding(ids, vectors), steps)
    for row, start in ((0, 0), (0, 3), (1, 6)):
        expected = one_by_one(head, features[row], vectors[tokens[row]], start, steps)
        torch.testing.assert_close(torch.stack([each[row, start] for each in found]), expected, rtol=1e-5, atol=1e-5)


def test_what_is_written(target, tmp_path):
    head, config = made_head(target), config_of(target)
    num_bytes = write_head(head.float(), config, tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in stored.items()}
    assert shapes == {
        "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (10, 32), "d2t": (10,), "t2d": (128,),
        "midlayer.input_layernorm.weight": (32,), "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,), "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64), "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32), "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32), "midlayer.mlp.down_proj.weight": (32, 64),
    }  # fmt: skip
    assert num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["d2t"] + torch.arange(10), TOKENS)  # an offset, not an id
    assert torch.equal(stored["t2d"].nonzero().squeeze(), TOKENS)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32, "target_hidden_size": 32,
        "draft_vocab_size": 10, "vocab_size": 128, "num_hidden_layers": 1, "head_dim": 8,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    }  # fmt: skip
    assert {name: written[name] for name in expected} == expected
    # The scale of the features is part of fc in the file.
    features, tokens = torch.randn(1, 5, 96), torch.randint(0, 128, (1, 7))
    vectors = torch.randn(128, 32)
    with torch.no_grad():
        outputs = [each.unroll(features, tokens, lambda ids: F.embedding(ids, vectors), 2)
                   for each in (head, read_head(tmp_path, config))]  # fmt: skip
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_places_in_the_draft_vocabulary(target):
    index = draft_index(made_head(target))
    assert index[TOKENS].tolist() == list(range(10))
    assert (index < 0).sum() == 118


def test_targets_that_are_refused(target, tmp_path):
    with pytest.raises(UnsupportedModelError, match="2 layers"):
        HeadShape.of_target(config_of(write_target(tmp_path, 2)), 10)
    with pytest.raises(UnsupportedModelError, match="0 to 3; got 1, 2, 4"):
        HeadShape.of_target(config_of(target), 10, (1, 2, 4))


def test_features_are_the_inputs_of_layers(target):
    """Of several sequences in one step, against transformers; and the likeliest tokens where they are learned."""
    random = np.random.default_rng(5)
    sequences = [
        TokenSequence(random.integers(0, 128, length).astype(np.int32), np.arange(length) >= 3)
        for length in (40, 9, 17)
    ]
    files = local_files(str(target), target)
    config = EngineConfig(model=str(target), device="cpu", dtype="float32")
    model = TargetModel(config, files, config_of(target), choose("cpu"), 40, (1, 2, 3), max_tokens=80)
    reference = LlamaForCausalLM.from_pretrained(target)
    try:
        (batch,) = model.batches(sequences)
        rows, vectors = model.read(batch), model.embeddings()
        head_rows = model.head_rows(TOKENS)
    finally:
        model.close()
    start = 0
    for sequence in sequences:
        with torch.no_grad():
            found = reference(torch.from_numpy(sequence.tokens).long()[None], output_hidden_states=True)
        part = slice(start, start + len(sequence))
        expected = torch.cat([found.hidden_states[layer][0] for layer in (1, 2, 3)], -1)
        torch.testing.assert_close(rows.features[part].float(), expected, rtol=0.01, atol=0.02)
        chances = found.logits[0].softmax(-1)
        assert not rows.probabilities[part][:2].any() and not rows.probabilities[part][-1].any()
        best = chances.topk(32, -1)
        for place in range(2, len(sequence) - 1):
            assert rows.ids[part][place][0] == best.indices[place][0]
            torch.testing.assert_close(
                rows.probabilities[part][place].float(), best.values[place], rtol=2e-3, atol=1e-4
            )
        start += len(sequence)
    torch.testing.assert_close(vectors, reference.model.embed_tokens.weight.detach())
    torch.testing.assert_close(head_rows, reference.lm_head.weight.detach()[TOKENS], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_engine_drafts_what_the_trained_head_says(tmp_path):
    """A head as it is trained, and its files in the engine's proposer over a paged cache."""
    reference = random_reference(
        LlamaConfig(
            vocab_size=96, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=9, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, max_position_embeddings=64,
        )
    )  # fmt: skip
    model = loaded_model(reference)
    head = DraftHead(HeadShape.of_target(model.build.config, 40), torch.arange(96)[::2][:40])
    head.begin(torch.rand(3 * HIDDEN) + 0.5, None, torch.Generator().manual_seed(2))
    write_head(head, model.build.config, tmp_path, torch.float32)
    proposer = Eagle3Proposer(DraftCheckpoint.open(str(tmp_path)), model, model.build)
    proposer.load()
    assert proposer.feature_layers == (2, 4, 6)
    tokens = torch.randint(96, (15,), generator=torch.Generator().manual_seed(3)).tolist()
    states = reference(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in proposer.feature_layers], -1)
    text = list(tokens)
    for step in range(1, 5):
        given = torch.tensor([text])
        outputs = head.unroll(features, given, reference.get_input_embeddings(), step)
        text.append(int(head.draft_tokens[head.logits(outputs[-1][0, -1]).argmax()]))
    run = DraftRun(model, proposer)
    assert run.step([Chunk(0, tokens[:6], next=tokens[6])], 4) == {}
    assert run.step([Chunk(0, tokens[6:-1], [tokens[-1]])], 4) == {0: text[len(tokens) :]}
