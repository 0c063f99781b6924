"""From what a user gives to a validated request. A bad one raises here and never reaches the loop."""

from __future__ import annotations

import operator
import random
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypedDict, Union

from quire.api.beams import as_search, row_params
from quire.api.pooling import PoolingInputs
from quire.api.text import encoded
from quire.errors import CacheTooSmallError, ValidationError
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.model_config import ModelConfig
from quire.messages.beams import BeamSearchParams
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import FROM_GENERATION_CONFIG, SamplingParams

MAX_BAD_WORDS = 128
LONGEST_BAD_WORD = 1024
"""Characters."""
KNOWN_BAD_WORDS = 1024
"""Whose tokens are kept: requests often have the same."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


PromptType = Union[str, Sequence[int], TextPrompt, TokensPrompt]
_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}


class InputFacts(Protocol):
    """What requests are checked against; the engine may be in another process."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def cache_tokens(self) -> int: ...
    @property
    def keys(self) -> ContentKeys: ...


class InputProcessor:
    """Tokenizes, checks and completes requests."""

    def __init__(
        self,
        facts: InputFacts,
        tokenizer: Any | None,
        generation_config: Mapping[str, Any],
        seed: int,
        max_logprobs: int,
        pooling: str = "last",
        isolate_tenants: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._facts = facts
        self._generation_config = generation_config
        self._max_logprobs = facts.model.vocab_size if max_logprobs < 0 else max_logprobs
        self._seeds = random.Random(seed)
        self.eos_ids = self._end_tokens()
        """Every token that ends an answer."""
        self._pooling = PoolingInputs(facts, tokenizer, pooling)
        self._isolate_tenants = isolate_tenants
        self._word_tokens = lru_cache(KNOWN_BAD_WORDS)(self._encode_word)
        self.hashes_ahead = False
        """Whether content keys are computed here, or by the loop when it admits the request: while the device works."""

    def make(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        arrival: float,
        priority: int = 0,
        tenant: str = "",
    ) -> tuple[NewRequest, str | None]:
        """The request, and its prompt as text where it has one."""
        if isinstance(params, BeamSearchParams):
            search = params.clone()
            request, text = self.make(request_id, prompt, row_params(search), arrival, priority, tenant)
            return as_search(request, search, self._facts.model.vocab_size), text
        text, tokens, salt = self._read_prompt(prompt)
        if not isinstance(tenant, str):
            raise ValidationError(f"a tenant is a string, got {tenant!r}", "tenant", tenant)
        if not isinstance(priority, int) or priority.bit_length() > 63:
            raise ValidationError(f"a priority is an integer of 64 bits, got {priority!r}", "priority", priority)
        salt = self.salt_of(tenant, salt)
        if isinstance(params, PoolingParams):
            pooled = self._pooling.make(request_id, tokens, params, salt)
            self.check_vocabulary(pooled.prompt)
            pooled.keys = self._facts.keys.of(pooled.prompt, salt) if self.hashes_ahead else []
            pooled.priority, pooled.tenant, pooled.arrival = priority, tenant, arrival
            return pooled, text
        self._check_params(params)
        params = params.clone()  # checks it again: it may have been changed since it was made
        tokens = self._truncate(tokens, params)
        self._check_tokens(tokens)
        request = NewRequest(
            id=request_id,
            prompt=tokens,
            params=params,
            limit=self._limit(len(tokens), params),
            eos_ids=self.eos_ids,
            bad_words=self._bad_words(params),
            keys=self._facts.keys.of(tokens, salt) if self.hashes_ahead else [],
            salt=salt,
            reads_cache=params.prompt_logprobs is None,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            tenant=tenant,
            arrival=arrival,
        )
        return request, text

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, from its generation_config.json."""
        given = {
            name: value for name in FROM_GENERATION_CONFIG if (value := self._generation_config.get(name)) is not None
        }
        if self._generation_config.get("max_new_tokens"):
            given["max_tokens"] = self._generation_config["max_new_tokens"]
        return SamplingParams(**given)

    def _end_tokens(self) -> list[int]:
        """Every token that ends an answer: the model's, its generation config's, the tokenizer's."""
        ids = list(self._facts.model.eos_token_ids)
        extra = self._generation_config.get("eos_token_id")
        ids += extra if isinstance(extra, list) else [] if extra is None else [extra]
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return list(dict.fromkeys(ids))

    def _read_prompt(self, prompt: PromptType) -> tuple[str | None, list[int], str]:
        salt, text = "", None
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            unknown = set(prompt) - _PROMPT_FIELDS
            if unknown:
                raise ValidationError(
                    f"a prompt takes {sorted(_PROMPT_FIELDS)}, not {sorted(unknown)}", "prompt", sorted(unknown)
                )
            salt = str(fields.get("cache_salt") or "")
            text = fields.get("prompt")
            prompt = fields.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            return prompt, self.encode(prompt), salt
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return text, self.token_ids(prompt), salt
        raise ValidationError(
            f"a prompt is text, token ids, or a dict of them; got {type(prompt).__name__}", "prompt", prompt
        )

    def salt_of(self, tenant: str, salt: str = "") -> str:
        """What keeps a tenant's blocks apart from others'."""
        return own_salt(tenant, salt) if self._isolate_tenants else salt

    def token_ids(self, given: Sequence[Any]) -> list[int]:
        """A list of integers of any kind as one of Python's; anything else raises."""
        if isinstance(given, bytes) or not (isinstance(given, Sequence) or hasattr(given, "__array__")):
            raise ValidationError(f"token ids are a list of integers; got {type(given).__name__}", "prompt_token_ids")
        if set(map(type, given)) <= {int}:
            return list(given)
        return [_token_id(token) for token in given]

    def first_text(self, text: str) -> list[int]:
        """Text as it begins a sequence: with what the tokenizer puts in front, and without what it puts at an end."""
        ids, plain = self.encode(text), self.encode(text, add_special_tokens=False)
        starts = range(len(ids) - len(plain) + 1)
        start = next((start for start in starts if ids[start : start + len(plain)] == plain), None)
        return ids if start is None else ids[: start + len(plain)]

    def check_room(self, length: int, parameter: str = "input") -> None:
        """Raise if a session of so many tokens leaves the model no room to add one."""
        longest = self._facts.max_model_len
        if length >= longest:
            raise ValidationError(
                f"the session comes to {length} tokens; with max_model_len {longest} it may have {longest - 1}, so "
                "that one can be generated. Fork it at fewer tokens, begin another, or set a larger max_model_len",
                parameter,
                length,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text as token ids."""
        if self.tokenizer is None:
            raise ValidationError(
                "text prompts need a tokenizer, and skip_tokenizer_init is set: give prompt_token_ids", "prompt"
            )
        return encoded(self.tokenizer, text, "prompt", add_special_tokens)

    def _truncate(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """Keep the last tokens, if asked to."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return tokens
        return tokens[-(self._facts.max_model_len - 1 if keep == -1 else keep) :]

    def check_vocabulary(self, tokens: list[int]) -> None:
        """Raise unless the model knows these tokens, and there are some."""
        if not tokens:
            raise ValidationError("the prompt is empty: at least one token is needed", "prompt", tokens)
        vocab = self._facts.model.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise ValidationError(f"token id {bad} is outside the vocabulary of {vocab}", "prompt_token_ids", bad)

    def _check_tokens(self, tokens: list[int]) -> None:
        self.check_vocabulary(tokens)
        longest = self._facts.max_model_len
        if len(tokens) >= longest:
            raise ValidationError(
                f"the prompt has {len(tokens)} tokens; with max_model_len {longest} it may have {longest - 1}, so that "
                "one can be generated. Shorten it, or set truncate_prompt_tokens",
                "prompt",
                len(tokens),
            )

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params", params
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            asked = self._facts.model.vocab_size if count == -1 else count
            if asked is not None and asked > self._max_logprobs:
                raise ValidationError(f"{name} is {count}; at most {self._max_logprobs} (max_logprobs)", name, count)
        vocab = self._facts.model.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = [token for token in getattr(params, name) or () if token >= vocab]
            if bad:
                raise ValidationError(f"{name} holds {bad[0]}, outside the vocabulary of {vocab}", name, bad[0])
        if params.bad_words and self.tokenizer is None:
            raise ValidationError("bad_words need a tokenizer, and skip_tokenizer_init is set", "bad_words")
        if params.stop and self.tokenizer is None:
            raise ValidationError("stop strings need a tokenizer, and skip_tokenizer_init is set", "stop", params.stop)

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        """Where the request ends at the latest: at max_tokens, at the model's length, or where the cache is full."""
        longest = self._facts.max_model_len
        capacity = self._facts.cache_tokens + 1  # the last token needs no place in the cache
        if params.max_tokens is None:
            if prompt_len >= capacity:
                raise CacheTooSmallError(
                    f"the prompt's {prompt_len} tokens do not fit the KV cache of {capacity - 1} tokens"
                )
            return min(longest, capacity)
        return min(longest, prompt_len + params.max_tokens)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is tokenized at the start of a text and after a space."""
        words = dict.fromkeys(word.lstrip() for word in params.bad_words or ())
        self._check_bad_words(words)
        texts = [text for word in words for text in (word, f" {word}")]
        sequences = [list(tokens) for tokens in dict.fromkeys(map(self._word_tokens, texts)) if tokens]
        if len(sequences) > MAX_BAD_WORDS:
            raise ValidationError(
                f"bad_words make {len(sequences)} token sequences; at most {MAX_BAD_WORDS}", "bad_words"
            )
        return sequences

    def _encode_word(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text, add_special_tokens=False))

    def _check_bad_words(self, words: Collection[str]) -> None:
        """Before any of them is tokenized: that takes its time, and the caller may be an event loop."""
        if len(words) > MAX_BAD_WORDS:
            raise ValidationError(f"bad_words holds {len(words)} words; at most {MAX_BAD_WORDS}", "bad_words")
        longest = max(map(len, words), default=0)
        if longest > LONGEST_BAD_WORD:
            raise ValidationError(
                f"bad_words holds a word of {longest} characters; at most {LONGEST_BAD_WORD}", "bad_words", longest
            )


def own_salt(tenant: str, salt: str) -> str:
    """What keeps a tenant's cached prefixes apart from all others', whatever salts they think of. Requests with neither
    a tenant nor a salt share one cache."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def _token_id(token: object) -> int:
    """An integer of any kind (numpy's too), but no bool and no float."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise ValidationError(f"token ids must be integers, got {token!r}", "prompt_token_ids", token)
    return operator.index(token)
