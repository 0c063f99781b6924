"""`speculative_config`: the keys of vLLM's, and one of our own (`tune`).

A key is understood, or has no effect here and is dropped with a warning, or is refused by name. Never reaches torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_DRAFTS = 7
"""Most drafts that a decode verifies: `MAX_WIDTH` less one. `messages/plan.py` needs numpy, which settings do not."""
DEFAULT_MODEL_DRAFTS = 3
"""Drafts of a draft model or head whose configuration does not say how many it makes."""

NGRAM, SUFFIX, DRAFT_MODEL, EAGLE3, MTP = "ngram", "suffix", "draft_model", "eagle3", "mtp"
EAGLE = "eagle"
"""Only with a checkpoint that has the form of EAGLE-3, which is found out when it is read."""
GRAMMAR = "grammar"
"""No proposer: only the tokens that structured outputs leave no choice about, which every method verifies."""
METHODS = (NGRAM, SUFFIX, DRAFT_MODEL, EAGLE3, MTP, GRAMMAR)

MTP_FAMILIES = (
    "deepseek", "dots3_note", "mimo", "mimo_v2", "glm4_moe", "glm4_moe_lite", "glm_ocr", "ernie", "nemotron_h",
    "exaone_moe", "exaone4_5", "qwen3_next", "qwen4_exp", "qwen3_5", "longcat_flash", "bailing_hybrid_v3", "minimax_m3",
    "bailing_hybrid", "kimi_k3", "pangu_ultra_moe", "step3p5", "hy_v3", "hy_v4", "gemma4", "inkling", "glm5_next",
)  # fmt: skip
"""Families that vLLM names a method `<family>_mtp` after; whether the model at hand has such layers, it says itself."""
ALIASES = {
    "[ngram]": NGRAM,
    "ngram_gpu": NGRAM,
    **{f"{family}_mtp": MTP for family in MTP_FAMILIES},
}
REFUSED_METHODS = {
    "medusa": "use an EAGLE-3 head",
    "mlp_speculator": "use an EAGLE-3 head",
    "gumiho": "use an EAGLE-3 head",
    "dflash": "use an EAGLE-3 head",
    "dspark": "use an EAGLE-3 head",
    "peagle": "use an EAGLE-3 head without parallel positions",
    "extract_hidden_states": "it makes no drafts",
}
"""Methods of others, and what to use instead."""

EXACT, REJECTION, SYNTHETIC = "exact", "rejection", "synthetic"
GREEDY, PROBABILISTIC = "greedy", "probabilistic"

_WITHOUT_EFFECT = {
    "draft_tensor_parallel_size": "a draft is split over the target's ranks",
    "tensor_parallel_size": "a draft is split over the target's ranks",
    "enforce_eager": "a draft runs as the target does",
    "moe_backend": "kernels are chosen by the weights",
    "attention_backend": "a draft uses the target's",
    "kv_cache_dtype": "a draft's cache is stored as the target's",
    "draft_load_config": "a draft is loaded as the target is",
    "code_revision": "no code of a draft's repository is run",
    "disable_padded_drafter_batch": "rows of a step have widths of their own",
    "disable_eagle_block_drop": "no cached block is dropped",
    "use_local_argmax_reduction": "the reduction is chosen by the engine",
    "num_speculative_tokens_per_batch_size": "the engine tunes the number of drafts by the rows of a step",
    "enable_adaptive_verification": "the engine tunes the number of drafts by request",
    "disable_mqa_scorer": "it belongs to vLLM's first engine",
    "disable_logprobs": "logprobs are those without drafts",
    "disable_log_stats": "use the engine's own disable_log_stats",
}
"""Keys that change nothing about the tokens, and why they have no effect."""
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "parallel_drafting": ((None, False), "drafts are made one after the other; use an EAGLE-3 head or a draft model"),
    "use_heterogeneous_vocab": ((None, False), "a draft model needs the target's vocabulary"),
    "index_share_for_mtp_iteration": ((None,), "the checkpoint says how its MTP layers work"),
    "dspark_draft_topk": ((None,), "DSpark is not implemented; use an EAGLE-3 head"),
    "acceptance_method": ((None, "rejection_sampler"), "use rejection_sample_method"),
    "posterior_threshold": ((None,), "typical acceptance changes the distribution; use rejection_sample_method"),
    "posterior_alpha": ((None,), "typical acceptance changes the distribution; use rejection_sample_method"),
}
"""Keys that would change the computation: values that do not, and what to use instead of others."""


def _key(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and verified: validated when created, immutable afterwards."""

    method: str | None = _key(
        None,
        "ngram, suffix, draft_model, eagle3, mtp, grammar (structured outputs only), or a dotted path to a proposer; "
        "unset: by the draft's config",
    )
    model: str | None = _key(None, "The draft: Hub id or folder. mtp: unset, the layers are in the target's checkpoint")
    revision: str | None = _key(None, "Branch, tag or commit of the draft on the Hub")
    quantization: str | None = _key(None, "Weights of the draft in few bits, as the engine's setting of this name")
    max_model_len: int | None = _key(None, "Sequences of this many tokens or more get no drafts")
    num_speculative_tokens: int | None = _key(
        None,
        f"Most drafts a step verifies for a request, at most {MAX_DRAFTS}; unset: {MAX_DRAFTS} for ngram and suffix, "
        f"what the draft's config says, or {DEFAULT_MODEL_DRAFTS}",
    )
    tune: bool = _key(
        True, "Choose the number of drafts (0 included) by measured acceptance and step times; off: always the most"
    )
    disable_by_batch_size: int | None = _key(None, "No drafts in steps with more requests than this")
    prompt_lookup_max: int | None = _key(None, "ngram: longest run of tokens to look up; unset: prompt_lookup_min or 5")
    prompt_lookup_min: int | None = _key(None, "ngram: shortest run to look up; unset: prompt_lookup_max or 3")
    suffix_decoding_max_tree_depth: int = _key(
        24, "suffix: most of the latest tokens that are compared with earlier ones"
    )
    suffix_decoding_max_cached_requests: int = _key(
        10000, "suffix: most finished requests remembered, of each tenant; 0: a request only sees its own tokens"
    )
    suffix_decoding_max_spec_factor: float = _key(1.0, "suffix: most drafts as a multiple of the length of the match")
    suffix_decoding_min_token_prob: float = _key(
        0.1, "suffix: least share of earlier continuations that went on with a draft"
    )
    rejection_sample_method: str = _key(
        EXACT,
        "exact: a draft is accepted iff it is the token drawn without drafts; rejection (standard): by the ratio of "
        "both probabilities; synthetic: by given rates, to measure speed with random weights",
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = _key(
        None, "synthetic: for each draft the probability that it and all before it are accepted"
    )
    synthetic_acceptance_length: float | None = _key(
        None, "synthetic: instead of rates, the mean tokens of a step, the drawn one included"
    )
    draft_sample_method: str = _key(
        GREEDY, "greedy: a draft is the most likely token; probabilistic: drawn, with the random number of its position"
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str) -> SpeculativeConfig:
        """The configuration in a mapping or in JSON."""
        keys = _known_keys(_as_mapping(given))
        method, model = keys.get("method"), keys.get("model")
        for name, value in (("method", method), ("model", model)):
            if value is not None and not isinstance(value, str):
                raise _wrong(name, value, "must be a name")
        if method == "custom_class" or (method is None and model is not None and _is_dotted(model)):
            if model is None or not _is_dotted(model):
                raise _wrong("model", model, "must be the dotted path of a proposer (my_pkg.mod.Proposer)")
            method = keys["method"] = model
            keys.pop("model")
        elif method is None and model in ("[ngram]", NGRAM, SUFFIX):
            method = keys["method"] = model
        if method in ALIASES:
            keys["method"] = ALIASES[method]
        if keys.get("method") in (NGRAM, SUFFIX) and model in ("[ngram]", "ngram_gpu", NGRAM, SUFFIX):
            keys.pop("model")
        if keys.get("rejection_sample_method") == "standard":
            keys["rejection_sample_method"] = REJECTION
        if isinstance(rates := keys.get("synthetic_acceptance_rates"), list):
            keys["synthetic_acceptance_rates"] = tuple(rates)
        if isinstance(count := keys.get("num_speculative_tokens"), int) and count > MAX_DRAFTS:
            logger.warning(
                "speculative_config: num_speculative_tokens is %d; a step verifies at most %d drafts", count, MAX_DRAFTS
            )
            keys["num_speculative_tokens"] = MAX_DRAFTS
        return cls(**keys)

    def __post_init__(self) -> None:
        self._check_method()
        for name, least in (
            ("num_speculative_tokens", 1), ("max_model_len", 1), ("disable_by_batch_size", 0), ("prompt_lookup_max", 1),
            ("prompt_lookup_min", 1), ("suffix_decoding_max_tree_depth", 1), ("suffix_decoding_max_cached_requests", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise _wrong(name, value, f"must be an integer of at least {least}")
        if not isinstance(self.tune, bool):
            raise _wrong("tune", self.tune, "must be true or false")
        if self.shortest_ngram > self.longest_ngram:
            raise _wrong("prompt_lookup_min", self.prompt_lookup_min, f"exceeds prompt_lookup_max {self.longest_ngram}")
        if not _is_number(self.suffix_decoding_max_spec_factor, 0, math.inf):
            raise _wrong("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, "must be at least 0")
        if not _is_number(self.suffix_decoding_min_token_prob, 0, 1):
            raise _wrong("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, "must be in [0, 1]")
        for name, choices in (
            ("rejection_sample_method", (EXACT, REJECTION, SYNTHETIC)),
            ("draft_sample_method", (GREEDY, PROBABILISTIC)),
        ):
            if (value := getattr(self, name)) not in choices:
                raise _wrong(name, value, f"must be one of {', '.join(choices)}")
        self._check_synthetic()

    def _check_method(self) -> None:
        method = self.method
        if method is None:
            if self.model is None:
                raise ConfigError(
                    f"speculative_config needs a method ({', '.join(METHODS)}, or a dotted path) or a model, the draft",
                    "speculative_config",
                    None,
                )
            return
        if method in REFUSED_METHODS:
            raise _wrong("method", method, f"is not supported: {REFUSED_METHODS[method]}")
        if method not in (*METHODS, EAGLE) and not _is_dotted(method):
            raise _wrong(
                "method", method, f"is unknown; known: {', '.join(METHODS)}; or give a dotted path (my_pkg.mod.Thing)"
            )
        if method in (NGRAM, SUFFIX, GRAMMAR) and self.model is not None:
            raise _wrong("model", self.model, f"is of no use to {method}, which has no weights: leave it out")
        if method in (DRAFT_MODEL, EAGLE3, EAGLE) and self.model is None:
            raise ConfigError(f"speculative_config: {method} needs model, the draft's Hub id or folder", "model", None)

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != SYNTHETIC:
            for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
                if (value := getattr(self, name)) is not None:
                    raise _wrong(name, value, "needs rejection_sample_method 'synthetic'")
            return
        if (rates is None) == (length is None):
            raise ConfigError(
                "speculative_config: rejection_sample_method 'synthetic' needs synthetic_acceptance_rates or "
                "synthetic_acceptance_length, one of them",
                "synthetic_acceptance_rates",
                rates,
            )
        most = self.num_speculative_tokens
        if rates is not None:
            if not isinstance(rates, tuple) or not all(_is_number(rate, 0, 1) for rate in rates):
                raise _wrong("synthetic_acceptance_rates", rates, "must be numbers in [0, 1]")
            if len(rates) != (most or len(rates)) or not 1 <= len(rates) <= MAX_DRAFTS:
                raise _wrong(
                    "synthetic_acceptance_rates",
                    rates,
                    f"must have a rate for each of {most or f'1 to {MAX_DRAFTS}'} drafts",
                )
            if any(later > rate for rate, later in itertools.pairwise(rates)):
                raise _wrong("synthetic_acceptance_rates", rates, "must not increase: each includes those before it")
        elif not _is_number(length, 1, (most or MAX_DRAFTS) + 1):
            raise _wrong("synthetic_acceptance_length", length, f"must be in [1, {(most or MAX_DRAFTS) + 1}]")

    def to_dict(self) -> dict[str, Any]:
        """The keys whose values are not the defaults, as plain data: `parse` reads it."""
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        found = {name: value for name, (value, default) in fields.items() if value != default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @property
    def most_drafts(self) -> int:
        """Most drafts that a step verifies for a request."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return len(self.synthetic_acceptance_rates)
        return DEFAULT_MODEL_DRAFTS if self.has_model else MAX_DRAFTS

    @property
    def has_model(self) -> bool:
        """Whether drafts are computed by layers of their own, on the device."""
        return self.method in (None, DRAFT_MODEL, EAGLE, EAGLE3, MTP)

    @property
    def is_custom(self) -> bool:
        """Whether the method is the dotted path of a user's proposer."""
        return self.method is not None and self.method not in (*METHODS, EAGLE)

    @property
    def longest_ngram(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @property
    def shortest_ngram(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or 3

    @property
    def acceptance_rates(self) -> tuple[float, ...] | None:
        """With synthetic acceptance: for each draft the probability that it is accepted if all before it are; None:
        drafts are accepted by their tokens."""
        if self.rejection_sample_method != SYNTHETIC:
            return None
        rates = self.synthetic_acceptance_rates
        if rates is None:  # the given mean with the least variance: some drafts always, one sometimes, the rest never
            accepted = (self.synthetic_acceptance_length or 1.0) - 1
            rates = tuple(min(max(accepted - i, 0.0), 1.0) for i in range(self.most_drafts))
        return tuple(
            0.0 if rate == 0 else min(rate / before, 1.0) for rate, before in zip(rates, (1.0, *rates), strict=False)
        )


HELP: Mapping[str, str] = {field.name: field.metadata["help"] for field in dataclasses.fields(SpeculativeConfig)}
"""What each key means."""


def _as_mapping(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise _wrong(None, given, f"is not JSON: {error}") from None
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise _wrong(None, given, 'must map names to values, as {"method": "ngram"}')
    return given


def _known_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are understood; None selects the default."""
    keys: dict[str, Any] = {}
    for name, value in given.items():
        if name in HELP:
            if value is not None:
                keys[name] = value
        elif name in _WITHOUT_EFFECT:
            if value is not None:
                logger.warning("speculative_config: %s has no effect: %s", name, _WITHOUT_EFFECT[name])
        elif name in _REFUSED:
            harmless, remedy = _REFUSED[name]
            if value not in harmless:
                raise _wrong(name, value, f"is not supported: {remedy}")
        else:
            close = difflib.get_close_matches(name, HELP, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise _wrong(name, value, f"is unknown; {hint}known: {', '.join(sorted(HELP))}")
    return keys


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _wrong(name: str | None, value: Any, what: str) -> ConfigError:
    shown = "speculative_config" if name is None else f"speculative_config: {name}"
    return ConfigError(f"{shown} {value!r} {what}", name or "speculative_config", value)
