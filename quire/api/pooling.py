"""Requests for vectors: what they may ask of the model, and where they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.api.inputs import InputFacts


class PoolingInputs:
    """Checks and completes requests for vectors."""

    def __init__(self, facts: InputFacts, tokenizer: Any | None, pooling: str) -> None:
        """`pooling`: for requests that do not say how."""
        self._facts = facts
        self._default = pooling
        self._closing = frozenset(() if tokenizer is None else tokenizer.all_special_ids)

    def make(self, request_id: str, tokens: list[int], params: PoolingParams, salt: str) -> NewRequest:
        """The request. It counts one token more than its prompt: the place where the vector comes."""
        params = params.clone()  # checks it again: it may have been changed since it was made
        params.pooling = params.pooling or self._default
        self._check_dimensions(params.dimensions)
        tokens = self._truncate(tokens, params.truncate_prompt_tokens)
        self._check_length(tokens)
        return NewRequest(
            id=request_id,
            prompt=tokens,
            params=SamplingParams(
                temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            ),
            limit=len(tokens) + 1,
            salt=salt,
            reads_cache=params.pooling == "last",  # a mean needs the hidden states of all tokens
            pooling=params,
        )

    def _truncate(self, tokens: list[int], keep: int | None) -> list[int]:
        """The first tokens, as many as are asked for; one that closes the text stays its last."""
        keep = min(self._facts.max_model_len, self._facts.cache_tokens) if keep == -1 else keep
        if keep is None or len(tokens) <= keep:
            return tokens
        return [*tokens[: keep - 1], tokens[-1]] if tokens[-1] in self._closing else tokens[:keep]

    def _check_length(self, tokens: list[int]) -> None:
        longest = self._facts.max_model_len
        if len(tokens) > longest:
            raise ValidationError(
                f"the prompt has {len(tokens)} tokens; the model's maximum context length is {longest} "
                "(max_model_len). Shorten it, or set truncate_prompt_tokens",
                "prompt",
                len(tokens),
            )
        if len(tokens) > self._facts.cache_tokens:
            raise CacheTooSmallError(
                f"the prompt's {len(tokens)} tokens do not fit the KV cache of {self._facts.cache_tokens} tokens"
            )

    def _check_dimensions(self, dimensions: int | None) -> None:
        """Other models put what matters anywhere: the first so many numbers of theirs mean little."""
        if dimensions is None:
            return
        model = self._facts.model
        allowed = model.raw.get("matryoshka_dimensions")
        allowed = allowed if isinstance(allowed, (list, tuple)) else ()
        if not (allowed or model.raw.get("is_matryoshka")):
            raise ValidationError(
                "dimensions cannot be chosen: the model's config.json says nothing of Matryoshka embeddings. If the "
                'model was trained for them, set hf_overrides to {"is_matryoshka": true}',
                "dimensions",
                dimensions,
            )
        if allowed and dimensions not in allowed:
            raise ValidationError(
                f"dimensions must be one of {', '.join(map(str, allowed))}; got {dimensions}", "dimensions", dimensions
            )
        if dimensions > model.hidden_size:
            raise ValidationError(
                f"dimensions is {dimensions}; the model's vectors have {model.hidden_size}", "dimensions", dimensions
            )
