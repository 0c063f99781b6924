"""Flags for how tokens are drawn, and the one place that says in words what each field of `SamplingParams` does."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from quire.cli.engine_flags import flag
from quire.cli.values import json_object, token_biases
from quire.messages.sampling import SamplingParams

MEANINGS = {
    "n": "Samples of one prompt. They share the prompt's computation and its cache blocks",
    "presence_penalty": "Lowers the logit of every token that is in the output already; from -2 to 2",
    "frequency_penalty": "The same, once for every time the token is there; from -2 to 2",
    "repetition_penalty": "Divides the logits of tokens seen in prompt or output (multiplies negative ones); 1 is off",
    "temperature": "0 takes the likeliest token; higher is more varied; at most 2",
    "top_p": "Draw from the likeliest tokens that together have this much probability",
    "top_k": "Draw from so many of the likeliest tokens; 0 or -1 is all",
    "min_p": "Draw from tokens at least so likely, relative to the likeliest",
    "seed": "Makes this request's draws repeatable, whatever else runs beside it",
    "stop": "Text that ends the output",
    "stop_token_ids": "Tokens that end the output",
    "ignore_eos": "Go on after the model's own end token",
    "max_tokens": "Longest output; None is up to the model's length",
    "min_tokens": "No end before so many tokens",
    "logprobs": "Report the drawn token's log-probability and those of so many of the likeliest; -1 is all",
    "prompt_logprobs": "The same for the prompt's tokens",
    "detokenize": "Turn tokens into text",
    "skip_special_tokens": "Leave special tokens out of the text",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text",
    "include_stop_str_in_output": "Keep the stop text at the end of the output",
    "bad_words": "Words that are never written",
    "logit_bias": "Added to the logits of tokens, by token id",
    "allowed_token_ids": "Draw from these tokens only",
    "truncate_prompt_tokens": "Keep so many of the prompt's last tokens; -1 is as many as fit",
    "output_kind": "What each output of a stream holds: everything so far, what is new, or nothing until the end",
    "extra_args": "Parameters of custom logits processors",
    "structured_outputs": "A form the output must have: a JSON schema, regex, choice or grammar",
}

_KINDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N"},
    "temperature": {"type": float, "metavar": "X"},
    "top_p": {"type": float, "metavar": "X"},
    "top_k": {"type": int, "metavar": "N"},
    "min_p": {"type": float, "metavar": "X"},
    "n": {"type": int, "metavar": "N"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "include_stop_str_in_output": {"action": argparse.BooleanOptionalAction},
    "ignore_eos": {"action": argparse.BooleanOptionalAction},
    "min_tokens": {"type": int, "metavar": "N"},
    "repetition_penalty": {"type": float, "metavar": "X"},
    "presence_penalty": {"type": float, "metavar": "X"},
    "frequency_penalty": {"type": float, "metavar": "X"},
    "bad_words": {"action": "append", "metavar": "WORD"},
    "logit_bias": {"type": token_biases, "metavar": "JSON"},
    "allowed_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "logprobs": {"type": int, "metavar": "N"},
    "prompt_logprobs": {"type": int, "metavar": "N"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction},
    "truncate_prompt_tokens": {"type": int, "metavar": "N"},
    "extra_args": {"type": json_object, "metavar": "JSON"},
}
"""What has a flag. `seed` is the engine's: it makes every request repeatable."""

ONLY_FOR_BATCHES = ("n", "logprobs", "prompt_logprobs")


def add_sampling_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = (), note: str = "") -> None:
    """One flag a field; those not given are the model's own defaults."""
    group = parser.add_argument_group("sampling", f"Where nothing is said, the model's own defaults hold.\n{note}")
    for name, how in _KINDS.items():
        if name not in without:
            several = "; may be given several times" if how.get("action") == "append" else ""
            help_text = (MEANINGS[name].replace("None", "-1") + several).replace("%", "%%")
            group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=help_text, **how)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields the user set."""
    return {name: getattr(args, name) for name in _KINDS if hasattr(args, name)}


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """The flags over `changes` over `defaults`."""
    given = given_sampling(args)
    if given.get("max_tokens") == -1:
        given["max_tokens"] = None
    return SamplingParams(**{**msgspec.structs.asdict(defaults), **changes, **given})
