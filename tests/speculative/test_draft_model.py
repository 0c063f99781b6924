"""Drafts of a draft model are what it would generate itself, computed by transformers over all tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
)

from quire.errors import QuireError
from quire.kernels.philox import uniform
from quire.speculative.config import PROBABILISTIC
from quire.speculative.draft_checkpoint import DraftCheckpoint
from quire.speculative.draft_model import DraftModelProposer
from tests.models.harness import checkpoint_tensors, loaded_model, random_reference
from tests.speculative.paged import Chunk, DraftRun
from tests.speculative.test_mtp import LATENT, MIXTURE, SHAPE, VOCAB

DRAFTS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=36, n_layer=2, n_head=3, n_positions=64),
    "windows": Gemma2Config(**SHAPE, head_dim=16, sliding_window=5),
    "shared caches": Gemma4TextConfig(
        **SHAPE, head_dim=16, global_head_dim=32, num_kv_shared_layers=1, hidden_size_per_layer_input=0,
        sliding_window=5, layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "latent": DeepseekV3Config(**{**SHAPE, **MIXTURE, **LATENT}),
}  # fmt: skip


def save(folder: Path, reference: Any, drop: str = "") -> str:
    folder.mkdir(exist_ok=True)
    raw = reference.config.to_dict() | {"architectures": [type(reference).__name__]}
    (folder / "config.json").write_text(json.dumps(raw))
    tied = {"lm_head.weight"} if reference.config.tie_word_embeddings else set()
    tensors = {k: v.clone().contiguous() for k, v in checkpoint_tensors(reference).items() if k not in tied | {drop}}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def proposer(folder: str, model: Any, method: str = "greedy") -> DraftModelProposer:
    made = DraftModelProposer(DraftCheckpoint.open(folder), model.build, method)
    made.load()
    return made


@torch.no_grad()
def continued(reference: Any, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        tokens = [*tokens, int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())]
    return tokens[-count:]


@pytest.fixture(scope="module")
def target() -> Any:
    return loaded_model(random_reference(LlamaConfig(**SHAPE | {"num_hidden_layers": 2}), seed=9))


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_are_what_the_draft_would_generate(kind: str, target: Any, tmp_path: Path) -> None:
    """Chunked prompts beside decodes, of which some accept drafts; the draft's cache is of another shape."""
    reference = random_reference(DRAFTS[kind])
    run = DraftRun(target, proposer(save(tmp_path / "draft", reference), target))
    assert len(run.groups) == 1 and run.groups[0].kind == "full"
    a, b = (torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (20, 14))
    run.step([Chunk(0, a[:7], next=a[7])], 3)
    found = run.step([Chunk(0, a[7:10], [a[10]]), Chunk(1, b[:5], next=b[5])], 3)
    assert found == {0: continued(reference, a[:11], 3)}
    found = run.step([Chunk(0, [a[10], a[11], 3], a[11:13], is_decode=True), Chunk(1, b[5:9], [b[9]])], 4)
    assert found == {0: continued(reference, a[:13], 4), 1: continued(reference, b[:10], 4)}


@pytest.mark.parametrize("top", [{}, {"top_k": 4.0}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_probabilistic_drafts_are_drawn_as_the_target_draws(top: dict[str, float], target: Any, tmp_path: Path) -> None:
    """With the random number of the position, from the draft's own distribution, walking through the vocabulary."""
    reference = random_reference(DRAFTS["llama"])
    made = proposer(save(tmp_path / "draft", reference), target, PROBABILISTIC)
    run = DraftRun(target, made, scalars={"temperature": 0.7, **top})
    tokens = list(range(3, 12))
    (found,) = run.step([Chunk(0, tokens[:-1], tokens[-1:])], 3).values()
    expected = []
    for number in range(3):
        with torch.no_grad():
            logits = reference(torch.tensor([[*tokens, *expected]]), use_cache=False).logits[0, -1].double() / 0.7
        chances, order = logits.softmax(-1).sort(descending=True)
        kept = torch.ones(VOCAB, dtype=torch.bool)
        if "top_k" in top:
            kept[int(top["top_k"]) :] = False
        if "top_p" in top:
            kept &= chances.cumsum(-1) - chances < top["top_p"]
        if "min_p" in top:
            kept &= chances >= top["min_p"] * chances[0]
        chances = torch.zeros(VOCAB, dtype=torch.float64).index_add(0, order[kept], chances[kept])
        # The prompt has 8 tokens, and one was drawn: drafts are draws 1, 2, ...
        number_drawn = float(uniform(torch.tensor(7), torch.tensor(1 + number), torch.tensor(0)))
        expected.append(int(torch.searchsorted(chances.cumsum(-1), number_drawn * float(chances.sum()), right=True)))
    assert found == expected


def test_what_does_not_fit_is_refused(target: Any, tmp_path: Path) -> None:
    other = random_reference(LlamaConfig(**SHAPE | {"vocab_size": 128}))
    with pytest.raises(QuireError, match="vocabulary is 128, the model's is 97"):
        proposer(save(tmp_path / "other", other), target)
    whole = random_reference(DRAFTS["llama"])
    with pytest.raises(QuireError, match=r"missing from the checkpoint:\n  - model.norm.weight"):
        proposer(save(tmp_path / "part", whole, drop="model.norm.weight"), target)
    recurrent = Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=1
    )
    folder = tmp_path / "mamba"
    folder.mkdir()
    raw = recurrent.to_dict() | {"architectures": ["Mamba2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(QuireError, match="Mamba2ForCausalLM.*has recurrent layers"):
        proposer(str(folder), target)
