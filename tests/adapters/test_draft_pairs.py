"""Adapters beside draft models and heads: drafts are the base's, and the tokens are PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.beside_peft import Base, check
from tests.adapters.zoo import INVOCATION, PROMPTS, SHAPE, Zoo
from tests.conftest import assert_idle
from tests.speculative.scripted import Tally
from tests.speculative.test_eagle3 import PLAIN, head_weights, save
from tests.speculative.test_mtp import Target


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_by_models(method: str, tmp_path: Path) -> None:
    base = Zoo(tmp_path / "zoo").base("llama")
    model, vocab, hidden = base.path, SHAPE["vocab_size"], SHAPE["hidden_size"]
    if method == "eagle3":
        config = {
            **PLAIN, "vocab_size": vocab, "draft_vocab_size": vocab, "hidden_size": hidden,
            "target_hidden_size": hidden, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        }  # fmt: skip
        model = save(tmp_path / "head", config, head_weights(config, vocab=vocab, target=hidden))
    drafts = {"method": method, "model": model, "num_speculative_tokens": 3, "tune": False}
    with base.llm(max_loras=2, speculative_config=drafts) as llm:
        tally = Tally(llm)
        for _ in range(2):
            check(base, llm, ["narrow", None, "dora", "activated", "saved"], [*PROMPTS, [7, *INVOCATION, 5]], 12)
        assert tally.verified > 40 and (tally.accepted > 0 or method == "eagle3")  # a random head is never right
        assert_idle(llm)


@pytest.mark.parametrize("form", ["glm", "qwen3.5"])
def test_layers_that_predict(form: str, tmp_path: Path) -> None:
    """Drafts by multi-token prediction; those that are rejected leave nothing behind in the states of a hybrid."""
    target = Target(form)
    target.save(tmp_path / "base")
    base = Base.of(tmp_path, target.model)
    base.adapter("attention", target_modules=["q_proj", "v_proj", "o_proj"])
    base.adapter("mlp", rank=2, target_modules=["o_proj", "down_proj"] if form == "qwen3.5" else ["k_proj", "o_proj"])
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "tune": False}
    prompts = [[token % 60 for token in prompt] for prompt in PROMPTS]
    with base.llm(max_loras=2, speculative_config=drafts) as llm:
        tally = Tally(llm)
        for _ in range(2):
            check(base, llm, ["attention", None, "mlp"], prompts, 12)
        assert tally.verified > 40
        assert_idle(llm)
