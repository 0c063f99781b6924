"""Drafts of EAGLE-3 heads equal those of a plain computation over all tokens, without a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from quire.errors import QuireError
from quire.speculative.draft_checkpoint import DraftCheckpoint
from quire.speculative.eagle3 import Eagle3Proposer
from tests.models.harness import loaded_model, random_reference
from tests.speculative.paged import Chunk, DraftRun

VOCAB, HIDDEN, DRAFT_VOCAB = 96, 32, 40
PLAIN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "hidden_act": "silu",
}  # fmt: skip
WEIGHTS = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The target."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return random_reference(config)


def head_weights(config: Mapping[str, Any], seed: int = 1, vocab: int = VOCAB, target: int = HIDDEN) -> WEIGHTS:
    """A random head of this config: every tensor that FORMATS names for it."""
    layer = config.get("transformer_layer_config", config)
    size, heads, kv = layer["hidden_size"], layer["num_attention_heads"], layer["num_key_value_heads"]
    dim, width = layer.get("head_dim") or size // heads, layer["intermediate_size"]
    features = config.get("num_aux_hidden_states") or len(config.get("eagle_aux_hidden_state_layer_ids") or range(3))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, features * target), "norm.weight": (size,)}
    shapes["lm_head.weight"] = (config["draft_vocab_size"], size)
    for number in range(layer["num_hidden_layers"]):
        name = f"layers.{number}." if "transformer_layer_config" in config or number else "midlayer."
        taken = 2 * size if number == 0 else size
        shapes |= {
            f"{name}input_layernorm.weight": (size,), f"{name}post_attention_layernorm.weight": (size,),
            f"{name}self_attn.q_proj.weight": (heads * dim, taken), f"{name}self_attn.k_proj.weight": (kv * dim, taken),
            f"{name}self_attn.v_proj.weight": (kv * dim, taken), f"{name}self_attn.o_proj.weight": (size, heads * dim),
            f"{name}mlp.gate_proj.weight": (width, size), f"{name}mlp.up_proj.weight": (width, size),
            f"{name}mlp.down_proj.weight": (size, width),
        }  # fmt: skip
        if number == 0:
            shapes[f"{name}hidden_norm.weight"] = (size,)
        if layer.get("attention_bias"):
            for part, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim), ("o", size)):
                shapes[f"{name}self_attn.{part}_proj.bias"] = (rows,)
        if layer["model_type"] == "qwen3":
            shapes |= {f"{name}self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (features * target,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(features)}
    if size != target:
        shapes["embed_tokens.weight"] = (vocab, size)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = noise * min(shape) ** -0.5 * 1.5 if len(shape) > 1 else 0.3 * noise + name.endswith("weight")
    known = torch.randperm(vocab, generator=generator)[: config["draft_vocab_size"]].sort().values
    weights["d2t"] = known - torch.arange(len(known))
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)
    return weights


def save(folder: Path, config: Mapping[str, Any], weights: WEIGHTS) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if weights:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return str(folder)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Oracle:
    """The head in a few lines of torch, recomputed over the whole sequence for every draft."""

    def __init__(self, reference: Any, config: Mapping[str, Any], weights: WEIGHTS) -> None:
        self.reference, self.config, self.weights = reference, config, weights
        self.layer: Mapping[str, Any] = config.get("transformer_layer_config", config)

    def features(self, tokens: list[int]) -> torch.Tensor:
        states: list[torch.Tensor] = []
        layers = self.reference.model.layers
        hooks = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda _, given, out: states.append(out)))
        self.reference(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        wanted = self.config.get("eagle_aux_hidden_state_layer_ids") or (2, 3, 3)
        parts = [states[i][0] for i in wanted]
        if self.config.get("fc_norm"):
            parts = [norm(part, self.weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = norm(joined, self.weights["input_norm.weight"])
        return joined @ self.weights["fc.weight"].T

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weights, layer = self.weights, self.layer
        heads, kv = layer["num_attention_heads"], layer["num_key_value_heads"]

        def part(letter: str, count: int) -> torch.Tensor:
            found = x @ weights[f"{name}self_attn.{letter}_proj.weight"].T
            found = found + weights.get(f"{name}self_attn.{letter}_proj.bias", torch.zeros(()))
            found = found.view(len(x), count, -1)
            gain = weights.get(f"{name}self_attn.{letter}_norm.weight")
            found = found if gain is None else norm(found, gain)
            if letter == "v":
                return found
            half = found.shape[-1] // 2
            angles = torch.arange(len(x))[:, None] * layer["rope_theta"] ** (-torch.arange(half) / half)
            cos, sin, a, b = angles.cos()[:, None], angles.sin()[:, None], found[..., :half], found[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k, v = part("q", heads), part("k", kv), part("v", kv)
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
        out = out.transpose(0, 1).flatten(1) @ weights[f"{name}self_attn.o_proj.weight"].T
        return out + weights.get(f"{name}self_attn.o_proj.bias", torch.zeros(()))

    def head(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs before the final norm."""
        weights = self.weights
        for number in range(self.layer["num_hidden_layers"]):
            name = f"layers.{number}." if f"layers.{number}.mlp.up_proj.weight" in weights else "midlayer."
            x, stream = norm(hidden, weights[f"{name}input_layernorm.weight"]), hidden
            if number == 0:
                normed = norm(hidden, weights[f"{name}hidden_norm.weight"])
                x = torch.cat((norm(embeddings, weights[f"{name}input_layernorm.weight"]), normed), -1)
                stream = normed if self.config.get("norm_before_residual") else hidden
            stream = stream + self.attention(x, name)
            x = norm(stream, weights[f"{name}post_attention_layernorm.weight"])
            gate, up = (x @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            hidden = stream + (F.silu(gate) * up) @ weights[f"{name}mlp.down_proj.weight"].T
        return hidden

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """After these tokens, of which the target has computed all but the last."""
        table = self.weights.get("embed_tokens.weight", self.reference.get_input_embeddings().weight)
        hidden, tokens, made = self.features(tokens[:-1]), list(tokens), []
        for _ in range(count):
            out = self.head(table[torch.tensor(tokens[1:])], hidden)
            normed = norm(out[-1], self.weights["norm.weight"])
            best = int((normed @ self.weights["lm_head.weight"].T).argmax())
            made.append(best + int(self.weights["d2t"][best]))
            tokens.append(made[-1])
            hidden = torch.cat((hidden, (normed if self.config.get("norm_output") else out[-1])[None]))
        return made


def speculators(**more: Any) -> dict[str, Any]:
    layer = {**PLAIN, "model_type": "qwen3", "head_dim": 16}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": {k: v for k, v in layer.items() if k not in ("draft_vocab_size", "architectures")},
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}]}, **more,
    }  # fmt: skip


FORMS = {
    "plain": PLAIN,
    "biased": {**PLAIN, "attention_bias": True, "norm_output": True},
    "wide": {**PLAIN, "hidden_size": 48, "target_hidden_size": HIDDEN, "norm_before_fc": True},
    "two layers": {**PLAIN, "num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [1, 6]},
    "speculators": speculators(norm_before_residual=True, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 2, 5, 5]),
}


def proposer(folder: Path, config: Mapping[str, Any], model: Any, weights: WEIGHTS | None = None) -> Eagle3Proposer:
    weights = head_weights(config) if weights is None else weights
    made = Eagle3Proposer(DraftCheckpoint.open(save(folder, config, weights)), model, model.build)
    made.load()
    return made


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_a_plain_computation(form: str, reference: Any, tmp_path: Path) -> None:
    """Chunked prompts, a prompt beside decodes, decodes that accept some of their drafts, and garbage behind these."""
    config, count = FORMS[form], 4
    weights = head_weights(config)
    model = loaded_model(reference)
    oracle = Oracle(reference, config, weights)
    run = DraftRun(model, proposer(tmp_path / "head", config, model, weights))
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (20, 14))

    assert run.step([Chunk(0, a[:7], next=a[7])], count) == {}
    found = run.step([Chunk(0, a[7:10], [a[10]]), Chunk(1, b[:5], next=b[5])], count)
    assert found == {0: oracle.drafts(a[:11], count)}
    # Row 0 verifies three drafts, of which one is accepted; row 1 ends its prompt.
    found = run.step([Chunk(0, [a[10], a[11], 3, 4], a[11:13], is_decode=True), Chunk(1, b[5:9], [b[9]])], count)
    assert found == {0: oracle.drafts(a[:13], count), 1: oracle.drafts(b[:10], count)}
    # None is accepted; all are.
    found = run.step(
        [Chunk(0, [a[12], 5], [a[13]], is_decode=True), Chunk(1, b[9:12], b[10:13], is_decode=True)], count
    )
    assert found == {0: oracle.drafts(a[:14], count), 1: oracle.drafts(b[:13], count)}
    assert run.step([Chunk(0, [a[13]], [a[14]], is_decode=True)], 1) == {0: oracle.drafts(a[:15], 1)}


def test_drafts_follow_a_shared_prefix(reference: Any, tmp_path: Path) -> None:
    """A row that begins with another's blocks drafts as if it had computed them: they hold the head's cache too."""
    model = loaded_model(reference)
    weights = head_weights(PLAIN)
    run = DraftRun(model, proposer(tmp_path / "head", PLAIN, model, weights))
    tokens = torch.randint(VOCAB, (16,), generator=torch.Generator().manual_seed(4)).tolist()
    run.step([Chunk(0, tokens[:10], [tokens[10]])], 3)
    run.tables[0][1, :2] = run.tables[0][0, :2]
    run.computed[1] = 8
    found = run.step([Chunk(1, tokens[8:14], [tokens[14]])], 3)
    assert found == {1: Oracle(reference, PLAIN, weights).drafts(tokens[:15], 3)}


def test_random_weights_need_only_a_config(reference: Any, tmp_path: Path) -> None:
    model = loaded_model(reference)
    made = Eagle3Proposer(DraftCheckpoint.open(save(tmp_path / "head", PLAIN, {})), model, model.build)
    made.load("dummy")
    found = DraftRun(model, made).step([Chunk(0, [1, 2, 3], [4])], 3)
    assert len(found[0]) == 3 and max(found[0]) < DRAFT_VOCAB


@pytest.mark.parametrize(
    ("config", "drop", "message"),
    [
        ({**PLAIN, "vocab_size": 128}, (), "vocabulary is 128, the model's is 96"),
        ({**PLAIN, "hidden_size": 64}, (), "is 64, the model's is 32"),
        (PLAIN, ("midlayer.mlp.up_proj.weight",), r"missing from the checkpoint:\n  - midlayer.mlp.up_proj.weight"),
        (PLAIN, ("d2t",), "no tensor d2t.*: it has 40, the model has 96"),
        ({**PLAIN, "intermediate_size": 40}, (), r"\(48, 32\) in the checkpoint, \(40, 32\) in the model"),
        ({**PLAIN, "eagle_config": {"use_aux_hidden_state": False}}, (), "use_aux_hidden_state = False"),
        ({**PLAIN, "eagle_config": {"new_trick": 1}}, (), "new_trick"),
        ({**PLAIN, "model_type": "deepseek_v3"}, (), "deepseek_v3"),
        ({**PLAIN, "eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, (), r"\(2, 3, 9\); the model has 6"),
        ({**speculators(), "speculators_model_type": "dflash"}, (), "dflash"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: Mapping[str, Any], drop: tuple[str, ...], message: str, reference: Any, tmp_path: Path
) -> None:
    model = loaded_model(reference)
    weights = {name: tensor for name, tensor in head_weights(PLAIN).items() if name not in drop}
    with pytest.raises(QuireError, match=message):
        proposer(tmp_path / "head", config, model, weights)


def test_a_qwen3_target_gives_the_same_features(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    reference = random_reference(config)
    model = loaded_model(reference)
    weights = head_weights(PLAIN)
    tokens = list(range(5, 16))
    found = DraftRun(model, proposer(tmp_path / "head", PLAIN, model, weights)).step(
        [Chunk(0, tokens[:-1], tokens[-1:])], 3
    )
    assert found == {0: Oracle(reference, PLAIN, weights).drafts(tokens, 3)}
