"""The residual streams that enter layers, which proposers read, are those of transformers' models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.harness import loaded_model, random_reference
from tests.models.relatives import RELATIVES
from tests.models.zoo import ZOO
from tests.speculative.paged import Chunk, DraftRun

# One for each loop over layers, and for each way in which layers hand on the stream.
KINDS = {
    name: {**ZOO, **RELATIVES}[name]
    for name in (
        "llama",
        "gpt2",
        "gpt-neox",
        "gemma-2",
        "gemma-4",
        "deepseek-v3",
        "opt",
        "falcon-7b",
        "cohere",
        "bloom",
    )
}


def streams(reference: Any, tokens: list[int]) -> list[torch.Tensor]:
    """What enters each layer, and what the last one returns."""
    found: list[torch.Tensor] = []
    layers: Any = next(m for m in reference.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: found.append((given or [named["hidden_states"]])[0]), with_kwargs=True
        )
    layers[-1].register_forward_hook(lambda _, given, out: found.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        reference(torch.tensor([tokens]), use_cache=False)
    return [stream[0] if stream.dim() == 3 else stream for stream in found]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_streams_that_enter_layers(kind: str) -> None:
    reference = random_reference(KINDS[kind])
    model = loaded_model(reference)
    last = model.build.config.num_layers
    wanted = (last, 0, 1, 1)
    seen: list[Any] = []
    proposer = SimpleNamespace(
        feature_layers=wanted, needs_hidden=True, caches=[], propose=lambda step: seen.append(step.features.clone())
    )
    run = DraftRun(model, proposer)
    tokens = list(range(3, 14))
    run.step([Chunk(0, tokens[:6], next=tokens[6])], 0)
    run.step([Chunk(0, tokens[6:], next=1)], 0)
    expected = torch.cat([streams(reference, tokens)[layer] for layer in wanted], dim=-1)
    torch.testing.assert_close(torch.cat(seen), expected, rtol=0, atol=2e-4 * expected.abs().max().item())
