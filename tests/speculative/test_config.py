"""`speculative_config`: vLLM's keys are understood, without effect and named, or refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.api.compat import engine_arguments
from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError, ValidationError
from quire.messages.plan import MAX_WIDTH
from quire.speculative.config import MAX_DRAFTS, SpeculativeConfig
from quire.speculative.registry import is_on_host, make_host_proposer
from quire.speculative.resolve_draft import method_of, resolve_draft


class Mine:
    """A user's proposer on the host."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def start(self, key: Any, tokens: Any, tenant: str) -> None: ...
    def extend(self, key: Any, tokens: Any) -> None: ...
    def propose(self, key: Any, most: int) -> list[int]:
        return []

    def leave(self, key: Any, has_ended: bool) -> None: ...


class OnDevice:
    """A user's proposer on the device."""

    def propose(self, step: Any) -> None: ...


HERE = __name__


@pytest.mark.parametrize(
    "given, method, drafts",
    [
        ({"method": "ngram"}, "ngram", 7),
        ({"method": "[ngram]", "num_speculative_tokens": 4}, "ngram", 4),
        ({"model": "ngram", "num_speculative_tokens": 4}, "ngram", 4),
        ({"method": "ngram_gpu", "model": "ngram_gpu"}, "ngram", 7),
        ({"method": "suffix", "num_speculative_tokens": 32}, "suffix", 7),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp", 1),
        ({"method": "qwen3_next_mtp"}, "mtp", 3),
        ({"method": "eagle3", "model": "a/b"}, "eagle3", 3),
        ({"model": "a/b", "num_speculative_tokens": 2}, None, 2),
        ({"method": "custom_class", "model": f"{HERE}.Mine"}, f"{HERE}.Mine", 7),
        ({"model": f"{HERE}.Mine"}, f"{HERE}.Mine", 7),
        ('{"method": "ngram", "prompt_lookup_max": null}', "ngram", 7),
    ],
    ids=str,
)
def test_methods(given: Any, method: str | None, drafts: int) -> None:
    config = SpeculativeConfig.parse(given)
    assert (config.method, config.most_drafts) == (method, drafts)
    assert SpeculativeConfig.parse(config.to_dict()) == config
    assert SpeculativeConfig.parse(json.dumps(config.to_dict())) == config


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "needs a method"),
        ({"method": "medusa"}, "'medusa' is not supported: use an EAGLE-3 head"),
        ({"method": "frob"}, "'frob' is unknown; known: ngram, suffix"),
        ({"method": "ngram", "prompt_lookup_maxx": 3}, "did you mean prompt_lookup_max.*known: .*tune"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens 0 must be an integer of at least 1"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "prompt_lookup_min 6 exceeds"),
        ({"method": "ngram", "model": "a/b"}, "of no use to ngram"),
        ({"method": "draft_model"}, "draft_model needs model"),
        ({"method": "eagle3", "model": "a", "parallel_drafting": True}, "parallel_drafting True is not supported"),
        ({"method": "draft_model", "model": "a", "use_heterogeneous_vocab": True}, "target's vocabulary"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"min_token_prob 1.5 must be in \[0, 1\]"),
        ({"method": "ngram", "rejection_sample_method": "block"}, "must be one of exact, rejection, synthetic"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "one of them"),
        ({"method": "ngram", "synthetic_acceptance_rates": [0.5]}, "needs rejection_sample_method 'synthetic'"),
        ({"method": "ngram", "tune": 1}, "tune 1 must be true or false"),
        ("[1]", "must map names to values"),
        ("{", "is not JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(speculative_config=given)


def synthetic(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": "ngram", "rejection_sample_method": "synthetic", **keys})


def test_synthetic_rates_are_given_as_products_and_used_one_by_one() -> None:
    assert synthetic(synthetic_acceptance_rates=[0.8, 0.4, 0.4, 0.0]).acceptance_rates == (0.8, 0.5, 1.0, 0.0)
    for length in (1.0, 2.5, 3.0, 4.0):
        rates = synthetic(num_speculative_tokens=3, synthetic_acceptance_length=length).acceptance_rates
        assert rates is not None
        assert 1 + sum(_products(rates)) == pytest.approx(length)
    for keys in ({"synthetic_acceptance_rates": [0.4, 0.8]}, {"synthetic_acceptance_rates": [2.0]},
                 {"num_speculative_tokens": 3, "synthetic_acceptance_length": 4.5},
                 {"num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.5]}):  # fmt: skip
        with pytest.raises(ConfigError, match="synthetic_acceptance"):
            synthetic(**keys)
    assert SpeculativeConfig.parse({"method": "ngram"}).acceptance_rates is None


def _products(rates: tuple[float, ...]) -> list[float]:
    found, product = [], 1.0
    for rate in rates:
        product *= rate
        found.append(product)
    return found


def test_keys_without_effect_are_named_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = EngineConfig(speculative_config={"method": "ngram", "draft_tensor_parallel_size": 1})
    assert "draft_tensor_parallel_size has no effect" in caplog.text
    caplog.clear()
    again = EngineConfig(speculative_config=config.speculative_config)
    assert not caplog.text
    assert again.speculative_config == {"method": "ngram"}


def test_the_standard_rule_is_the_rejection_rule() -> None:
    given = {"method": "ngram", "rejection_sample_method": "standard"}
    assert SpeculativeConfig.parse(given).rejection_sample_method == "rejection"


def test_vllms_other_spelling() -> None:
    assert engine_arguments({"spec_method": "ngram", "spec_tokens": 3}) == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
    }


def test_drafts_fit_a_decode() -> None:
    assert MAX_DRAFTS == MAX_WIDTH - 1


def test_where_proposers_run() -> None:
    def parse(method: str) -> SpeculativeConfig:
        return SpeculativeConfig.parse({"method": method})

    assert is_on_host(parse("suffix"))
    assert not is_on_host(parse("ngram"))
    assert is_on_host(parse("ngram"), stages=2)
    assert isinstance(make_host_proposer(parse(f"{HERE}.Mine")), Mine)
    assert make_host_proposer(parse(f"{HERE}.OnDevice")) is None
    assert make_host_proposer(None) is None
    with pytest.raises(ConfigError, match=r"OnDevice runs on the device.*pipeline_parallel_size is 2"):
        make_host_proposer(parse(f"{HERE}.OnDevice"), stages=2)
    with pytest.raises(ValidationError, match=r"no\.such\.Thing"):
        make_host_proposer(parse("no.such.Thing"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2: use ngram or suffix"):
        EngineConfig(pipeline_parallel_size=2, speculative_config={"method": "mtp"})


@pytest.mark.parametrize(
    "raw, wanted, name, method",
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None, "small", "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, None, "a/head", "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle", "a/head", "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, None, "a/EAGLE3-LLaMA3.1-8B", "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle3", "a/head", "eagle3"),
        ({"speculators_model_type": "eagle3"}, None, "a/head", "eagle3"),
        ({"speculators_model_type": "mtp"}, None, "a/head", "mtp"),
        ({"model_type": "qwen3_next_mtp"}, None, "a/head", "mtp"),
    ],
    ids=str,
)
def test_the_method_of_a_checkpoint(raw: dict[str, Any], wanted: str | None, name: str, method: str) -> None:
    assert method_of(raw, wanted, name) == method


@pytest.mark.parametrize(
    "raw, wanted, name, words",
    [
        ({"architectures": ["LlamaForCausalLM"]}, None, "a/EAGLE-LLaMA3-8B", "only EAGLE-3 heads"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle", "a/EAGLE-LLaMA3-8B", "only EAGLE-3 heads"),
        ({"speculators_model_type": "dflash"}, None, "a/b", "dflash checkpoint: use an EAGLE-3 head"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, None, "a/b", "dflash"),
        ({"model_type": "medusa"}, "eagle3", "a/b", "medusa"),
        ({"speculators_model_type": "eagle3"}, "mtp", "a/b", "is a eagle3 checkpoint, but .* 'mtp'"),
        ({"speculators_model_type": "frob"}, None, "a/b", "'frob'; known: eagle3, mtp"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_kind_is_refused(
    raw: dict[str, Any], wanted: str | None, name: str, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        method_of(raw, wanted, name)


def test_a_drafts_config_fills_in_what_is_not_given(tmp_path: Path) -> None:
    written = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = resolve_draft(EngineConfig(speculative_config={"model": str(tmp_path)})).speculation
    assert found is not None
    assert (found.method, found.num_speculative_tokens, found.model) == ("eagle3", 5, str(tmp_path))
    given = EngineConfig(speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2})
    assert resolve_draft(given).speculative_config == {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
    }
    plain = EngineConfig(speculative_config={"method": "ngram"})
    assert resolve_draft(plain) is plain
