"""Prompts given as embeddings: one span over the whole prompt, of an item whose rows are the user's own."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3

from quire.errors import ValidationError
from quire.loading.saved_tensor import OVERHEAD_BYTES, read_tensor
from quire.messages.media import EMBEDS, VALUES, MediaItem, Span
from quire.vision.processor import Prepared


def prepare_embeds(given: Any, hidden_size: int) -> Prepared:
    """A prompt of these embeddings [tokens, hidden size], a tensor or an array of floating-point numbers. Its token ids
    are all 0: none is looked up."""
    if hasattr(given, "detach"):
        if not given.is_floating_point():
            raise ValidationError(f"prompt_embeds are floating-point numbers, not {given.dtype}", "prompt_embeds")
        given = given.detach().to("cpu").float().numpy()
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f":
        kind = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
        raise ValidationError(
            f"prompt_embeds are a tensor or an array of floating-point numbers, not {kind}", "prompt_embeds"
        )
    if given.ndim != 2 or given.shape[1] != hidden_size or not len(given):
        raise ValidationError(
            f"prompt_embeds have the shape {tuple(given.shape)}; one row of {hidden_size} numbers for each token is "
            "needed",
            "prompt_embeds",
        )
    values = np.ascontiguousarray(given, dtype=np.float32)
    finite = np.isfinite(values).all(1)
    if not finite.all():
        raise ValidationError(
            f"prompt_embeds have a number that is NaN or infinite, for token {int(np.argmin(finite))}", "prompt_embeds"
        )
    digest = blake3(f"{EMBEDS} {values.shape}".encode() + values.tobytes()).digest()
    item = MediaItem(digest, EMBEDS, len(values), {VALUES: values})
    return Prepared([0] * len(values), [item], [Span(0, len(values), 0)])


def sent_embeds(given: str, max_model_len: int, hidden_size: int) -> Prepared:
    """The same of a tensor that torch.save wrote, in base64, from a stranger: bounded before it is decoded."""
    longest = longest_embeds(max_model_len, hidden_size)
    if len(given) * 3 // 4 > longest:
        raise ValidationError(
            f"prompt_embeds have {len(given)} characters of base64; a prompt of {max_model_len} tokens, the maximum "
            f"context length, has at most {longest * 4 // 3}",
            "prompt_embeds",
        )
    try:
        data = base64.b64decode(given, validate=True)
    except ValueError:  # also of characters that are not ASCII
        raise ValidationError("prompt_embeds are not valid base64", "prompt_embeds") from None
    return prepare_embeds(read_tensor(data, "prompt_embeds", max_model_len, hidden_size), hidden_size)


def longest_embeds(max_model_len: int, hidden_size: int) -> int:
    """Bytes of the largest prompt of embeddings."""
    return max_model_len * hidden_size * 4 + OVERHEAD_BYTES


def check_embeds_are_on(is_on: bool) -> None:
    """Raise unless prompts of embeddings are taken."""
    if not is_on:
        raise ValidationError(
            "prompt_embeds are off, because anything can be in them: start with enable_prompt_embeds "
            "(--enable-prompt-embeds)",
            "prompt_embeds",
        )


def embeds_prompt(prompt: Mapping[str, Any], hidden_size: int, is_on: bool) -> dict[str, Any]:
    """A prompt that is given as {"prompt_embeds": …}, as one of token ids with its embeddings prepared."""
    check_embeds_are_on(is_on)
    others = {name: value for name, value in prompt.items() if name != "prompt_embeds" and value is not None}
    unknown = set(others) - {"cache_salt", "prompt"}
    if unknown:
        raise ValidationError(f"a prompt with prompt_embeds has no {', '.join(sorted(unknown))}", "prompt")
    prepared = prepare_embeds(prompt["prompt_embeds"], hidden_size)
    return {**others, "prompt_token_ids": prepared.tokens, "prepared": prepared}
