"""Makes a checked request of a user's prompt and parameters. A bad one raises here and never reaches the loop."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypedDict, TypeVar, Union

import msgspec

from quire import vllm_arguments
from quire.api.embeds_parts import EmbedsPart, join_embeds
from quire.api.fill_in_middle import FillInMiddle
from quire.api.media_inputs import MediaInputs, map_ahead, sources_of
from quire.api.pooling import PoolingInputs
from quire.api.prompt_embeds import check_embeds_are_on, embeds_prompt, prepare_embeds, sent_embeds
from quire.api.text_encoding import TextEncoder, check_truncation, encode_text
from quire.config import EngineConfig
from quire.errors import CacheTooSmallError, ValidationError
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.media.loading import MediaSource
from quire.messages.adapter_use import AdapterUse, kv_identity
from quire.messages.beams import BeamSearchParams
from quire.messages.media import KeySpan, MediaItem
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import FROM_GENERATION_CONFIG, RequestOutputKind, SamplingParams
from quire.scheduler.beam_search import num_candidates
from quire.speculative.prediction import MAX_PREDICTED_TOKENS
from quire.vision.processor import Prepared
from quire.vllm_arguments import check_argument

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 1024
CACHED_BAD_WORDS = 1024
"""Words whose tokens are cached: requests often have the same ones."""

T = TypeVar("T")
AnyParams = SamplingParams | PoolingParams | BeamSearchParams


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    suffix: str
    """Text after what is generated, for models that can fill in the middle."""
    prediction: str | list[int]
    """The output as it is expected to be, text or token ids: with speculative decoding it comes faster then."""
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    """Images and videos, as {"image": image or list of images, "video": …}: PIL images, arrays, bytes, paths, URLs. The
    prompt has a placeholder for each, as the model's chat template writes it."""
    mm_processor_kwargs: Mapping[str, Any]
    """Settings of the model's image processor for this prompt."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: str
    suffix: str
    prediction: str | list[int]
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    prepared: Prepared
    """The images, prepared already; the token ids have theirs."""


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings; with `enable_prompt_embeds` only."""

    prompt_embeds: Any
    """[tokens, hidden size]: a tensor or an array of floating-point numbers."""
    cache_salt: str


PromptType = Union[str, Sequence[int], TextPrompt, TokensPrompt, EmbedsPrompt]
_PROMPT_FIELDS = {
    "prompt", "prompt_token_ids", "suffix", "prediction", "cache_salt", "multi_modal_data", "mm_processor_kwargs",
    "multi_modal_uuids", "prompt_embeds", "prepared",
}  # fmt: skip


class InputInfo(Protocol):
    """What requests are checked against; the engine may run in another process."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def files(self) -> ModelFiles: ...
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
        config: EngineConfig,
        info: InputInfo,
        tokenizer: Any | None,
        generation_config: Mapping[str, Any],
        *,
        computes_keys: bool = False,
    ) -> None:
        """`computes_keys`: content keys are computed here; otherwise the loop computes them at admission, while the
        device works."""
        self.tokenizer = tokenizer
        self.fill_in_middle = FillInMiddle(tokenizer, config.model)
        self._default_pooling = config.pooling
        self.media = MediaInputs(config, info.model, info.files, tokenizer)
        """Loads and prepares images and videos."""
        self.use(info)
        self._generation_config = generation_config
        self._max_logprobs = info.model.vocab_size if config.max_logprobs < 0 else config.max_logprobs
        self._seeds = random.Random(config.seed)
        self.eos_ids = self._end_tokens()
        """Tokens that end an answer."""
        self._isolates_tenants = config.isolate_tenants
        self._takes_embeds = config.enable_prompt_embeds
        self._word_tokens = lru_cache(CACHED_BAD_WORDS)(self._encode_word)
        self._computes_keys = computes_keys
        self._is_json_dense = config.disable_any_whitespace
        self._uses_predictions = config.speculative_config is not None

    def use(self, info: InputInfo) -> None:
        """Check requests against this engine from now on."""
        self._info = info
        self.texts = None if self.tokenizer is None else TextEncoder(self.tokenizer, info.max_model_len)
        """For texts of strangers, which may be of any length; None without a tokenizer."""
        self._pooling = PoolingInputs(info, self.tokenizer, self._default_pooling)

    def make(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
        arrival: float,
        priority: int = 0,
        tenant: str = "",
        adapters: Sequence[AdapterUse] = (),
    ) -> tuple[NewRequest, str | None]:
        """The request, and the text of its prompt if it has one."""
        if isinstance(params, BeamSearchParams):
            search = params.clone()
            request, text = self.make(request_id, prompt, _beam_params(search), arrival, priority, tenant, adapters)
            return _as_beam_search(request, search, self._info.model.vocab_size), text
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            prompt = embeds_prompt(prompt, self._info.model.hidden_size, self._takes_embeds)  # type: ignore[assignment]
        media = self._read_media(prompt)
        text, tokens, salt, suffix = self._read_prompt(prompt) if media is None else self._prepared(prompt, media)
        if media is None:
            self.media.check_text(tokens)
        if not isinstance(tenant, str):
            raise ValidationError(f"a tenant is a string, got {tenant!r}", "tenant", tenant)
        if not isinstance(priority, int) or priority.bit_length() > 63:
            raise ValidationError(f"a priority is an integer of 64 bits, got {priority!r}", "priority", priority)
        salt = self.salt_of(tenant, salt)
        if isinstance(params, PoolingParams):
            if suffix:
                raise ValidationError("suffix is for generation: pooling reads one text", "suffix")
            if media is not None:
                raise ValidationError("images are for generation: pooling reads text", "multi_modal_data")
            pooled = self._pooling.make(request_id, tokens, params, salt)
            self.check_vocabulary(pooled.prompt)
            pooled.keys = self._keys_of(pooled.prompt, salt, adapters)
            pooled.priority, pooled.tenant, pooled.arrival = priority, tenant, arrival
            pooled.adapters = list(adapters)
            return pooled, text
        self._check_generates()
        self._check_params(params)
        params = params.clone()  # checks again: its fields may have been changed since
        if self._is_json_dense and (form := params.structured_outputs) is not None:
            params.structured_outputs = msgspec.structs.replace(form, disable_any_whitespace=True)
        keep = self._kept_tokens(params)
        if media is not None and keep is not None and keep < len(tokens):
            raise ValidationError(
                f"truncate_prompt_tokens is {keep}, and a prompt with images, of {len(tokens)} tokens, is not cut",
                "truncate_prompt_tokens",
                keep,
            )
        if suffix:
            tokens = self.fill_in_middle.prompt(tokens, suffix, lambda text: self.encode(text, False), keep)
            self.end_middle(params)
        elif keep is not None:
            tokens = tokens[-keep:]
        self._check_tokens(tokens)
        request = NewRequest(
            id=request_id,
            prompt=tokens,
            params=params,
            limit=self._limit(len(tokens), params),
            eos_ids=self.eos_ids,
            bad_words=self._bad_words(params),
            salt=salt,
            reads_cache=params.prompt_logprobs is None,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            tenant=tenant,
            arrival=arrival,
            prediction=self._read_prediction(prompt),
            adapters=list(adapters),
        )
        if media is not None:
            request.media, request.spans = media.items, media.spans
            request.positions, request.position_delta = media.positions, media.position_delta
        request.keys = self._keys_of(tokens, salt, adapters, request.key_spans)
        return request, text

    def _keys_of(
        self, tokens: list[int], salt: str, adapters: Sequence[AdapterUse], spans: Sequence[KeySpan] = ()
    ) -> list[bytes]:
        if not self._computes_keys:
            return []
        return self._info.keys.of(tokens, salt, spans, kv_identity(adapters, tokens))

    def prepare_ahead(self, prompts: Sequence[PromptType]) -> Iterator[PromptType]:
        """The prompts in order, their images prepared, several at once in threads."""
        if sum(isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data")) for prompt in prompts) < 2:
            return iter(prompts)
        return map_ahead(self._with_media, prompts)

    def _with_media(self, prompt: PromptType) -> PromptType:
        media = self._read_media(prompt)
        if media is None:
            return prompt
        fields: Any = {name: value for name, value in dict(prompt).items() if name != "multi_modal_data"}  # type: ignore[arg-type]
        return {**fields, "prepared": media}

    def _read_media(self, prompt: PromptType) -> Prepared | None:
        """The prompt's images and videos, prepared; None if it has none."""
        if not isinstance(prompt, Mapping):
            return None
        fields: Mapping[str, Any] = prompt
        if (ready := fields.get("prepared")) is not None:
            return ready
        if not fields.get("multi_modal_data"):
            return None
        sources = sources_of(fields["multi_modal_data"])
        given = fields.get("prompt_token_ids")
        whole: Any = fields.get("prompt") if given is None else self.token_ids(given)
        if not sources:
            return None
        if not isinstance(whole, (str, list)):
            raise ValidationError(f"a prompt with images is text or token ids; got {type(whole).__name__}", "prompt")
        if fields.get("suffix"):
            raise ValidationError("a prompt with images has no suffix", "suffix")
        kwargs = fields.get("mm_processor_kwargs")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValidationError(
                f"mm_processor_kwargs is an object, not a {type(kwargs).__name__}", "mm_processor_kwargs"
            )
        return self.media.prepare(whole, sources, kwargs, self.encode, self._info.max_model_len)

    def _prepared(self, prompt: PromptType, media: Prepared) -> tuple[str | None, list[int], str, str]:
        """As `_read_prompt`, for a prompt whose images have been prepared."""
        fields: Any = {name: value for name, value in dict(prompt).items() if name != "suffix"}  # type: ignore[arg-type]
        return self._read_prompt({**fields, "prompt_token_ids": media.tokens})

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, from its generation_config.json."""
        given = {
            name: value for name in FROM_GENERATION_CONFIG if (value := self._generation_config.get(name)) is not None
        }
        if self._generation_config.get("max_new_tokens"):
            given["max_tokens"] = self._generation_config["max_new_tokens"]
        return SamplingParams(**given)

    def _end_tokens(self) -> list[int]:
        """Tokens that end an answer: the model's, its generation config's, the tokenizer's."""
        ids = list(self._info.model.eos_token_ids)
        extra = self._generation_config.get("eos_token_id")
        ids += extra if isinstance(extra, list) else [] if extra is None else [extra]
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return list(dict.fromkeys(ids))

    def _read_prompt(self, prompt: PromptType) -> tuple[str | None, list[int], str, str]:
        """The prompt's text (None if only token ids were given), its token ids, its cache salt, and its suffix."""
        salt, text, suffix = "", None, ""
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            unknown = set(prompt) - _PROMPT_FIELDS
            for name in unknown & vllm_arguments.PROMPT.keys():
                check_argument(vllm_arguments.PROMPT[name], fields[name])
                unknown.discard(name)
            if unknown:
                raise ValidationError(
                    f"a prompt takes {sorted(_PROMPT_FIELDS)}, not {sorted(unknown)}", "prompt", sorted(unknown)
                )
            salt = str(fields.get("cache_salt") or "")
            text = fields.get("prompt")
            suffix = fields.get("suffix") or ""
            if not isinstance(suffix, str):
                raise ValidationError(f"a suffix is text, got {type(suffix).__name__}", "suffix")
            given = fields.get("prompt_token_ids")
            prompt = text if given is None else given  # type: ignore[assignment]  # None is refused below
        if isinstance(prompt, str):
            return prompt, self.encode(prompt, add_special_tokens=not suffix), salt, suffix
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return text, self.token_ids(prompt), salt, suffix
        raise ValidationError(
            f"a prompt is text, token ids, or a dict of them; got {type(prompt).__name__}", "prompt", prompt
        )

    def _read_prediction(self, prompt: PromptType) -> list[int]:
        """The tokens that are predicted; none if they would not be used."""
        given: Any = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        if not given or not self._uses_predictions:
            return []
        tokens = self.encode(given, add_special_tokens=False) if isinstance(given, str) else self.token_ids(given)
        tokens = tokens[:MAX_PREDICTED_TOKENS]
        return tokens if tokens and min(tokens) >= 0 and max(tokens) < self._info.model.vocab_size else []

    def salt_of(self, tenant: str, salt: str = "") -> str:
        """What separates a tenant's cached blocks from those of others."""
        return tenant_salt(tenant, salt) if self._isolates_tenants else salt

    def token_ids(self, given: Sequence[Any]) -> list[int]:
        """A sequence of integers of any kind (numpy's too) as a list of Python's; anything else raises."""
        if isinstance(given, bytes) or not (isinstance(given, Sequence) or hasattr(given, "__array__")):
            raise ValidationError(f"token ids are a list of integers; got {type(given).__name__}", "prompt_token_ids")
        if set(map(type, given)) <= {int}:
            return list(given)
        return [_token_id(token) for token in given]

    def first_text(self, text: str) -> list[int]:
        """Text at the start of a sequence: with the tokens the tokenizer puts in front, without those it appends."""
        plain = self.encode_bounded(text, add_special_tokens=False)
        ids = self.encode(text)
        starts = range(len(ids) - len(plain) + 1)
        start = next((start for start in starts if ids[start : start + len(plain)] == plain), None)
        return ids if start is None else ids[: start + len(plain)]

    def first_tokens(self, prompts: Sequence[PromptType], most: int) -> list[PromptType]:
        """The prompts, each text of them cut after `most` tokens; 0: as they are."""
        if not most or self.tokenizer is None:
            return list(prompts)
        return [
            self.tokenizer.decode(self.encode(each, add_special_tokens=False)[:most]) if isinstance(each, str) else each
            for each in prompts
        ]

    def check_room(self, length: int, parameter: str = "input") -> None:
        """Raise if a session of `length` tokens leaves no room to generate one."""
        longest = self._info.max_model_len
        if length >= longest:
            raise ValidationError(
                f"the session has {length} tokens; with max_model_len {longest} it may have {longest - 1}, so that one "
                "can be generated. Fork it at fewer tokens, start another, or set a larger max_model_len",
                parameter,
                length,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text as token ids."""
        if self.tokenizer is None:
            raise ValidationError(
                "text prompts need a tokenizer, and skip_tokenizer_init is set: give prompt_token_ids", "prompt"
            )
        return encode_text(self.tokenizer, text, "prompt", add_special_tokens)

    def encode_chat(self, text: str) -> list[int]:
        """The output of a chat template, which has the special tokens already, as token ids."""
        return encode_text(self.tokenizer, text, "messages", add_special_tokens=False)

    def prepare_chat(
        self,
        text: str,
        sources: Sequence[MediaSource],
        kwargs: Mapping[str, Any] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> Prepared:
        """The same with the images of the chat; `encode`: tokenizes instead."""
        return self.media.prepare(text, sources, kwargs, encode or self.encode_chat, self._info.max_model_len)

    def sent_embeds(self, given: str) -> Prepared:
        """A prompt of embeddings in base64, as a stranger sent it."""
        check_embeds_are_on(self._takes_embeds)
        return sent_embeds(given, self._info.max_model_len, self._info.model.hidden_size)

    def join_embeds(
        self, text: str, parts: Sequence[EmbedsPart], has_media: bool, encode: Callable[[str], list[int]] | None = None
    ) -> tuple[str, Prepared]:
        """A chat with embeddings among its parts: its text without their marks, and its tokens with them. `has_media`:
        it has images or videos; `encode`: tokenizes instead."""
        check_embeds_are_on(self._takes_embeds)
        if has_media:
            raise ValidationError("a chat with prompt_embeds and images or videos is not implemented", "messages")
        return join_embeds(text, parts, encode or self.encode_chat, self._read_embeds, self._info.max_model_len)

    def _read_embeds(self, data: Any) -> Prepared:
        if isinstance(data, str):
            return self.sent_embeds(data)
        return prepare_embeds(data, self._info.model.hidden_size)

    def session_prompt(self, tokens: list[int], items: Sequence[MediaItem]) -> PromptType:
        """The prompt of a session's turn: the engine knows where its images are. `items`: those whose pixels are
        held."""
        if self.media.processor is None:
            return tokens
        return {"prompt_token_ids": tokens, "prepared": Prepared(tokens, list(items))}

    def encode_bounded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The same; raises early for a text that cannot fit the model."""
        if self.texts is None:
            return self.encode(text)
        return self.texts.encode(text, "prompt", add_special_tokens)

    def _kept_tokens(self, params: SamplingParams) -> int | None:
        """How many tokens of a prompt are kept, if it is truncated."""
        keep = params.truncate_prompt_tokens
        check_truncation(keep, self._info.max_model_len)
        return self._info.max_model_len - 1 if keep == -1 else keep

    def end_middle(self, params: SamplingParams) -> None:
        """End an output at the tokens that end a middle, too, as at the model's own end."""
        ends = [token for token in self.fill_in_middle.ends if token not in self.eos_ids]
        if ends and not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or []), *ends]))

    def check_vocabulary(self, tokens: list[int]) -> None:
        """Raise unless there is at least one token, and all are in the vocabulary."""
        if not tokens:
            raise ValidationError("the prompt is empty: at least one token is needed", "prompt", tokens)
        vocab = self._info.model.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise ValidationError(f"token id {bad} is outside the vocabulary of {vocab}", "prompt_token_ids", bad)

    def _check_tokens(self, tokens: list[int]) -> None:
        self.check_vocabulary(tokens)
        longest = self._info.max_model_len
        if len(tokens) >= longest:
            raise ValidationError(
                f"the prompt has {len(tokens)} tokens; the maximum context length is {longest} tokens with one that is "
                f"generated (max_model_len {longest}). Shorten it, or set truncate_prompt_tokens",
                "prompt",
                len(tokens),
            )

    def _check_generates(self) -> None:
        model = self._info.model
        if model.class_head is not None:
            raise ValidationError(
                f"{model.architecture} classifies, and has no head for tokens: it does not generate", "model"
            )

    def _check_params(self, params: SamplingParams) -> None:
        check_params(params, SamplingParams, "sampling_params")
        for name in ("logprobs", "prompt_logprobs"):
            count = None if name == "logprobs" and params.logprob_token_ids else getattr(params, name)
            wanted = self._info.model.vocab_size if count == -1 else count
            if wanted is not None and wanted > self._max_logprobs:
                raise ValidationError(f"{name} is {count}; at most {self._max_logprobs} (max_logprobs)", name, count)
        vocab = self._info.model.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            bad = [token for token in getattr(params, name) or () if token >= vocab]
            if bad:
                raise ValidationError(f"{name} holds {bad[0]}, outside the vocabulary of {vocab}", name, bad[0])
        if params.bad_words and self.tokenizer is None:
            raise ValidationError("bad_words need a tokenizer, and skip_tokenizer_init is set", "bad_words")
        if params.stop and self.tokenizer is None:
            raise ValidationError("stop strings need a tokenizer, and skip_tokenizer_init is set", "stop", params.stop)

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        """Most tokens of the request, with its prompt: by max_tokens, max_model_len, or the size of the cache."""
        longest = self._info.max_model_len
        capacity = self._info.cache_tokens + 1  # the last token has no KV
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
        """Check counts and lengths before tokenizing, which is slow: the caller may be an event loop."""
        if len(words) > MAX_BAD_WORDS:
            raise ValidationError(f"bad_words holds {len(words)} words; at most {MAX_BAD_WORDS}", "bad_words")
        longest = max(map(len, words), default=0)
        if longest > MAX_BAD_WORD_CHARACTERS:
            raise ValidationError(
                f"bad_words holds a word of {longest} characters; at most {MAX_BAD_WORD_CHARACTERS}",
                "bad_words",
                longest,
            )


def tenant_salt(tenant: str, salt: str) -> str:
    """Separates a tenant's cached prefixes from all others', whatever salts they choose. Requests with neither a tenant
    nor a salt share one cache."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def check_params(params: object, kind: type[AnyParams], name: str, hint: str = "") -> None:
    """Raise unless parameters are of the kind that a call takes."""
    if not isinstance(params, kind):
        raise ValidationError(f"{name} must be {kind.__name__}, got {type(params).__name__}{hint}", name, params)


def as_prompts(prompts: PromptType | Sequence[PromptType] | None) -> list[PromptType]:
    """One prompt or many, as a list: a string, a dict, or a list of token ids is one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValidationError(
            f"prompts are text, token ids, dicts of them, or a list of those; got {type(prompts).__name__}",
            "prompts",
            prompts,
        )
    listed = list(prompts)
    return [listed] if listed and hasattr(listed[0], "__index__") else listed  # type: ignore[list-item,return-value]


def one_each(name: str, value: T | Sequence[T], count: int, plural: str = "") -> list[T]:
    """One value for each of `count` prompts: the same for all, or a sequence of that length."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValidationError(f"{count} prompts, but {len(value)} {plural or name}", name, len(value))
    return list(value)


def _beam_params(search: BeamSearchParams) -> SamplingParams:
    """The search's limits as sampling parameters, to be checked like any other request's."""
    return SamplingParams(
        temperature=0,
        max_tokens=search.max_tokens,
        ignore_eos=search.ignore_eos,
        stop_token_ids=search.stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _as_beam_search(request: NewRequest, search: BeamSearchParams, vocab_size: int) -> NewRequest:
    """Make the request a beam search: its rows report the likeliest tokens, and none of them stops by itself."""
    request.beams = search
    request.params.logprobs = min(num_candidates(search, len(request.stop_ids)), vocab_size)
    request.params.ignore_eos, request.params.stop_token_ids = True, None
    return request


def _token_id(token: object) -> int:
    """An integer of any kind (numpy's too), but no bool and no float."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise ValidationError(f"token ids must be integers, got {token!r}", "prompt_token_ids", token)
    return operator.index(token)
