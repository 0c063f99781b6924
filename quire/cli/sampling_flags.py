"""Sampling flags, from the fields of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from quire.cli.engine_flags import flag
from quire.cli.values import json_object, token_biases
from quire.messages.sampling import HELP, SCALARS, SamplingParams

_KINDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N"},
    **{scalar.name: {"type": scalar.kind, "metavar": "N" if scalar.kind is int else "X"} for scalar in SCALARS},
    "n": {"type": int, "metavar": "N"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "include_stop_str_in_output": {"action": argparse.BooleanOptionalAction},
    "ignore_eos": {"action": argparse.BooleanOptionalAction},
    "min_tokens": {"type": int, "metavar": "N"},
    "bad_words": {"action": "append", "metavar": "WORD"},
    "logit_bias": {"type": token_biases, "metavar": "JSON"},
    "allowed_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "logprobs": {"type": int, "metavar": "N"},
    "prompt_logprobs": {"type": int, "metavar": "N"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction},
    "truncate_prompt_tokens": {"type": int, "metavar": "N"},
    "extra_args": {"type": json_object, "metavar": "JSON"},
}
"""Fields that have a flag. `seed` is an engine flag: it makes every request repeatable."""

ONLY_FOR_BATCHES = ("n", "logprobs", "prompt_logprobs")


def add_sampling_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = (), note: str = "") -> None:
    """A flag for each field; fields not given have the model's defaults."""
    group = parser.add_argument_group("sampling", f"Flags not given have the model's defaults.\n{note}")
    for name, how in _KINDS.items():
        if name not in without:
            several = "; may be given several times" if how.get("action") == "append" else ""
            help_text = (HELP[name].replace("None", "-1") + several).replace("%", "%%")
            group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=help_text, **how)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields given on the command line."""
    return {name: getattr(args, name) for name in _KINDS if hasattr(args, name)}


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """The flags over `changes` over `defaults`."""
    given = given_sampling(args)
    if given.get("max_tokens") == -1:
        given["max_tokens"] = None
    return SamplingParams(**{**msgspec.structs.asdict(defaults), **changes, **given})
