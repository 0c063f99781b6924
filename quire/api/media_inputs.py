"""`MediaInputs`: the images and videos of prompts, from what names them to what the engine takes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from quire.api.work_pool import check_abandoned
from quire.config import EngineConfig
from quire.errors import CheckpointError, MediaError, UnsupportedModelError, ValidationError, short_repr
from quire.loading.model_config import ModelConfig
from quire.media.limits import MediaLimits
from quire.media.loading import DecodedMedia, Kind, MediaLoader, MediaSource
from quire.vision.processor import MediaProcessor, Prepared, Video, processor_for

if TYPE_CHECKING:
    from quire.loading.files import ModelFiles

logger = logging.getLogger(__name__)

DEFAULT_COUNTS: Mapping[str, int] = {"image": 64, "video": 8}
"""Most images and videos of one prompt, unless limit_mm_per_prompt says otherwise."""
MOST_THREADS = 16
"""In which the images of a call's prompts are prepared."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass
class MediaCounts:
    """What was decoded and refused so far."""

    items: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEFAULT_COUNTS, 0))
    """Images and videos that were decoded."""
    bytes: int = 0
    """Of their files."""
    pixels: int = 0
    seconds: float = 0.0
    """Spent on fetching, decoding and resizing them, over all threads."""
    refused: dict[str, int] = field(default_factory=dict)
    """Requests with an image that was refused, by reason."""

    def measure(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of one of the metrics `media_…`, by labels."""
        value = getattr(self, name.removeprefix("media_"))
        if isinstance(value, dict):
            return {(label,): float(count) for label, count in value.items() if count}
        return {(): float(value)}


class MediaInputs:
    """Loads the images and videos of prompts, and prepares them for the model. Any thread may call it."""

    def __init__(self, config: EngineConfig, model: ModelConfig, files: ModelFiles | None, tokenizer: Any) -> None:
        self._config = config
        self._model = model
        self._files = files
        self._tokenizer = tokenizer
        self._most = counts_per_prompt(config.limit_mm_per_prompt)
        self.counts = MediaCounts()
        self._lock = threading.Lock()

    @cached_property
    def processor(self) -> MediaProcessor | None:
        """The model's own; None: it takes text only."""
        if self._config.vision == "off":
            return None
        folder = None if self._files is None else self._files.folder
        try:
            processor = processor_for(self._model, folder, self._tokenizer)
            if processor is not None and not self._config.isolate_tenants:  # a hit is faster: others could tell
                processor.pictures.capacity = self._config.image_cache_bytes
            return processor
        except (CheckpointError, UnsupportedModelError) as error:
            logger.warning("the model is served without images: %s", error)
            return None

    @cached_property
    def loader(self) -> MediaLoader:
        """Fetches and decodes."""
        return MediaLoader(media_limits(self._config))

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the model reads."""
        if self.processor is None:
            return ("text",)
        return ("text", "image", "video") if getattr(self.processor, "takes_videos", False) else ("text", "image")

    @cached_property
    def placeholders(self) -> dict[str, str]:
        """Text that stands for an image or a video where a chat template takes text only."""
        found = {}
        for kind in ("image", "video"):
            token = getattr(self.processor, f"{kind}_token", None)
            text = getattr(self.processor, f"{kind}_text", None)
            if text is None and token is not None and self._tokenizer is not None:
                text = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(text, str):
                found[kind] = text
        return found

    @property
    def image_token(self) -> int | None:
        """The placeholder of an image in a prompt of token ids; None: there is none."""
        return getattr(self.processor, "image_token", None)

    @cached_property
    def soft_tokens(self) -> frozenset[int]:
        """Tokens that stand for embeddings of images and videos."""
        names = ("image_token", "soft_token", "video_token")
        tokens = (getattr(self.processor, name, None) for name in names)
        return frozenset(token for token in tokens if token is not None)

    def check_text(self, tokens: Sequence[int]) -> None:
        """Raise for a prompt without images that has tokens of them: what they mean is not known."""
        if self.processor is None:
            return
        found = next((token for token in self.soft_tokens if token in tokens), None)
        if found is not None:
            text = self._tokenizer.convert_ids_to_tokens(found) if self._tokenizer is not None else found
            raise ValidationError(
                f"the prompt has {short_repr(text)}, which stands for an image, and no image: give the images with it "
                "(multi_modal_data, or parts of a message), or leave it out",
                "prompt",
            )

    def check_kind(self, kind: Kind, where: str) -> None:
        """Raise for what the model does not read."""
        if kind not in self.modalities:
            reads = "text parts only" if self.processor is None else " and ".join(self.modalities)
            message = f"{where} is {_article(kind)}; the model {self._config.model} takes {reads}"
            raise self._refused(MediaError(message, where, reason="model"))

    def _check_counts(self, sources: Sequence[MediaSource]) -> None:
        for source in sources:
            self.check_kind(source.kind, source.where)
        for kind, most in self._most.items():
            if (count := sum(source.kind == kind for source in sources)) > most:
                message = f"the prompt has {count} {kind}s; at most {most} (limit_mm_per_prompt)"
                raise MediaError(message, kind, reason="count")

    def prepare(
        self,
        prompt: str | list[int],
        sources: Sequence[MediaSource],
        kwargs: Mapping[str, Any] | None,
        encode: Callable[[str], list[int]],
        max_model_len: int,
    ) -> Prepared:
        """The prompt's tokens with those of its images, and the images as the encoder takes them. `encode`: tokenizes,
        if the prompt is text."""
        begin = time.monotonic()
        try:
            self._check_counts(sources)
            assert self.processor is not None
            with self.loader.decoded(sources, check_abandoned) as media:
                check_abandoned()
                videos = [Video(frames, fps) for frames, fps in zip(media.videos, media.fps, strict=True)]
                tokens = encode(self.processor.prompt_text(prompt, videos)) if isinstance(prompt, str) else prompt
                self._check_length(len(tokens), media, max_model_len)
                settings = {**(self._config.mm_processor_kwargs or {}), **(kwargs or {})}
                prepared = self.processor.prepare(tokens, media.images, videos, settings)
        except MediaError as error:
            raise self._refused(error) from None
        with self._lock:
            counts = self.counts
            for source in sources:
                counts.items[source.kind] += 1
            counts.bytes += media.num_bytes
            counts.pixels += media.num_pixels
            counts.seconds += time.monotonic() - begin
        return prepared

    def _check_length(self, tokens: int, media: DecodedMedia, longest: int) -> None:
        """Raise before images are resized, if their tokens do not fit the model."""
        assert self.processor is not None
        rows = sum(self.processor.rows_of(*image.size) for image in media.images)
        if not self._config.mm_processor_kwargs and tokens + rows >= longest:
            raise MediaError(
                f"This model's maximum context length is {longest} tokens. However, the prompt has {tokens} tokens and "
                f"{len(media.images)} images of {rows}. Send fewer or smaller images",
                "messages",
                reason="length",
            )

    def _refused(self, error: MediaError) -> MediaError:
        with self._lock:
            self.counts.refused[error.reason] = self.counts.refused.get(error.reason, 0) + 1
        return error


def map_ahead(function: Callable[[A], B], items: Sequence[A]) -> Iterator[B]:
    """The results in order, a few computed ahead of the caller in threads: reading and resizing images is most of the
    work, and releases the interpreter."""
    workers = min(MOST_THREADS, os.cpu_count() or 1, len(items))
    if workers < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers, "quire-images")
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def media_limits(config: EngineConfig) -> MediaLimits:
    """The limits that a configuration sets."""
    return MediaLimits(
        max_pixels=config.max_image_pixels,
        max_bytes=config.max_image_bytes,
        max_frames=config.max_video_frames,
        allowed_hosts=tuple(config.allowed_media_hosts),
        local_path=config.allowed_local_media_path or None,
        timeout=config.media_timeout,
        decode_bytes=config.max_decode_bytes,
    )


def counts_per_prompt(given: Mapping[str, Any] | None) -> dict[str, int]:
    """Most images and videos of a prompt, by kind. A value may be an object with a `count`, as vLLM has it."""
    counts = dict(DEFAULT_COUNTS)
    for kind, value in (given or {}).items():
        counts[kind] = int(value["count"] if isinstance(value, Mapping) else value)
    return counts


def sources_of(data: Any) -> list[MediaSource]:
    """vLLM's `multi_modal_data`: images and videos by kind, one or a list."""
    if not isinstance(data, Mapping):
        raise ValidationError(
            f'multi_modal_data is an object such as {{"image": …}}, not a {type(data).__name__}', "multi_modal_data"
        )
    sources: list[MediaSource] = []
    for kind, given in data.items():
        if kind not in DEFAULT_COUNTS:
            raise ValidationError(
                f"multi_modal_data has {short_repr(kind)}; it takes image and video", "multi_modal_data", kind
            )
        if given is None:
            continue
        is_many = isinstance(given, (list, tuple)) and (kind == "image" or _holds_videos(given))
        for index, item in enumerate(given if is_many else [given]):
            where = f"multi_modal_data.{kind}" + (f"[{index}]" if is_many else "")
            sources.append(MediaSource(_kind(kind), item, where))
    return sources


def _kind(name: str) -> Kind:
    return "image" if name == "image" else "video"


def _holds_videos(given: Sequence[Any]) -> bool:
    """Whether a list holds videos, and not the frames of one."""
    first = given[0] if given else None
    return isinstance(first, (list, tuple, str, bytes)) or getattr(first, "ndim", 0) == 4


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
