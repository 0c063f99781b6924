"""Embedding and classification requests: checks and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.api.text_encoding import check_truncation
from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.api.inputs import InputInfo


class PoolingInputs:
    """Checks and completes requests for vectors."""

    def __init__(self, info: InputInfo, tokenizer: Any | None, pooling: str) -> None:
        """`pooling`: the default method."""
        self._info = info
        self._default = pooling
        self._closing = frozenset(() if tokenizer is None else tokenizer.all_special_ids)

    def make(self, request_id: str, tokens: list[int], params: PoolingParams, salt: str) -> NewRequest:
        """The request. Its limit is one token more than its prompt: the step that yields the vector."""
        params = params.clone()  # checks again: its fields may have been changed since
        params.pooling = params.pooling or self._default
        self._set_task(params)
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

    def _set_task(self, params: PoolingParams) -> None:
        """A classifier's vectors are for its classes, and those of other models are embeddings."""
        head, name = self._info.model.class_head, self._info.model.architecture
        task = "embed" if head is None else "classify"
        if params.task not in (None, task):
            why = "has no head for classes, and embeds" if head is None else "classifies, and does not embed"
            raise ValidationError(f"task {params.task!r} is not supported: {name} {why}", "task", params.task)
        params.task = task
        params.activation = "unit" if head is None else head.activation

    def _truncate(self, tokens: list[int], keep: int | None) -> list[int]:
        """The first `keep` tokens (-1: as many as fit); a special token that ends the text stays the last."""
        check_truncation(keep, self._info.max_model_len)
        keep = min(self._info.max_model_len, self._info.cache_tokens) if keep == -1 else keep
        if keep is None or len(tokens) <= keep:
            return tokens
        return [*tokens[: keep - 1], tokens[-1]] if tokens[-1] in self._closing else tokens[:keep]

    def _check_length(self, tokens: list[int]) -> None:
        longest = self._info.max_model_len
        if len(tokens) > longest:
            raise ValidationError(
                f"the prompt has {len(tokens)} tokens; the model's maximum context length is {longest} "
                "(max_model_len). Shorten it, or set truncate_prompt_tokens",
                "prompt",
                len(tokens),
            )
        if len(tokens) > self._info.cache_tokens:
            raise CacheTooSmallError(
                f"the prompt's {len(tokens)} tokens do not fit the KV cache of {self._info.cache_tokens} tokens"
            )

    def _check_dimensions(self, dimensions: int | None) -> None:
        """Only Matryoshka models put the important numbers first: a prefix of other vectors means little."""
        if dimensions is None:
            return
        model = self._info.model
        if model.class_head is not None:
            raise ValidationError("dimensions are of embeddings, and the model classifies", "dimensions", dimensions)
        allowed = model.raw.get("matryoshka_dimensions")
        allowed = allowed if isinstance(allowed, (list, tuple)) else ()
        if not (allowed or model.raw.get("is_matryoshka")):
            raise ValidationError(
                "dimensions cannot be chosen: the model's config.json does not declare Matryoshka embeddings. If the "
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
