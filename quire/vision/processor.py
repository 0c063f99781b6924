"""Turns a prompt's tokens and its pictures into what the engine takes: the expanded tokens, items and spans.

Processors use numpy and Pillow alone, so that they run in the process that serves requests, on any thread. An item
holds resized 8-bit pixels; the encoder normalizes and cuts them into patches on its device: a quarter of the bytes
travel.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from blake3 import blake3
from PIL import Image

from quire.errors import CheckpointError, ValidationError, short_repr
from quire.loading.files import read_json
from quire.messages.media import MediaItem, Span
from quire.vision.registry import PROCESSORS

if TYPE_CHECKING:
    from quire.loading.model_config import ModelConfig


@dataclass(frozen=True)
class Video:
    """Frames of a video, those that the model is to see, in order and of one size."""

    frames: Sequence[Image.Image]
    fps: float = 2.0
    """Frames a second among `frames`."""
    seconds: Sequence[float] | None = None
    """The time of each frame; None: evenly spaced from 0 by `fps`."""

    @property
    def times(self) -> list[float]:
        """The time of each frame in seconds."""
        if self.seconds is not None:
            return list(self.seconds)
        return [index / self.fps for index in range(len(self.frames))]


@dataclass(frozen=True)
class Prepared:
    """A prompt whose placeholders are expanded to one token for each embedding."""

    tokens: list[int]
    items: list[MediaItem] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    positions: np.ndarray | None = None
    """int32 [3, tokens]: temporal, height and width position of each token; None: the model counts tokens."""
    position_delta: int = 0
    """The position of generated token n is n + this."""


class MediaProcessor(Protocol):
    """What a family does with images and videos. Made once per model; may be called from several threads at once."""

    pictures: PictureCache
    """Images that were resized already."""

    def prompt_text(self, text: str, videos: Sequence[Video] = ()) -> str:
        """The chat template's output with what the family writes as text around each picture; before tokenizing. A
        prompt that comes as tokens needs no such call: `prepare` adds what is missing."""
        ...

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of an image of this size, without its pixels."""
        ...

    def prepare(
        self,
        tokens: list[int],
        images: Sequence[Image.Image] = (),
        videos: Sequence[Video] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Expand placeholders and make items. `tokens`: with one placeholder for each picture, as the family's chat
        template writes it. `kwargs`: settings of the processor for this request (vLLM's `mm_processor_kwargs`)."""
        ...


def processor_for(config: ModelConfig, folder: Path | None, tokenizer: Any) -> MediaProcessor | None:
    """The processor of a model; None: the model takes text alone. `folder`: with `preprocessor_config.json`."""
    found = PROCESSORS.find(config.architecture)
    if found is None or not isinstance(config.raw.get("vision_config"), Mapping):
        return None
    return found(config, ProcessorFiles(folder), tokenizer)


class ProcessorFiles:
    """Settings in a model's folder: `preprocessor_config.json`, or the newer `processor_config.json` with a part for
    images and one for videos."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """A file's fields; none if it is not there."""
        path = None if self._folder is None else self._folder / name
        return {} if path is None or not path.is_file() else read_json(path)

    @property
    def processor(self) -> dict[str, Any]:
        """Settings of the whole processor."""
        return self.read("processor_config.json")

    @property
    def image(self) -> dict[str, Any]:
        """Settings for images."""
        return self._part("image_processor") or self.read("preprocessor_config.json")

    @property
    def video(self) -> dict[str, Any]:
        """Settings for videos; those for images if there are no others."""
        return self._part("video_processor") or self.read("video_preprocessor_config.json") or self.image

    def _part(self, name: str) -> dict[str, Any]:
        part = self.processor.get(name)
        if part is not None and not isinstance(part, Mapping):
            raise CheckpointError(f"processor_config.json has {name} = {short_repr(part)}; an object is needed")
        return dict(part or {})


@dataclass(frozen=True)
class Picture:
    """An item with the tokens that stand for it in the prompt."""

    item: MediaItem
    tokens: np.ndarray
    """What replaces the placeholder; the family's soft token at each embedding."""
    grid: tuple[int, int, int] = (1, 1, 1)
    """Embeddings as frames, rows and columns, where positions follow them."""
    interval: float = 1.0
    """Temporal positions between two frames."""


class PictureCache:
    """Images that were resized already, by digest; the least recently used leave."""

    def __init__(self, capacity: int = 0) -> None:
        """`capacity`: bytes of their arrays; 0: none is kept."""
        self.capacity = capacity
        self.used = 0
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes) -> Picture | None:
        """The picture, if it is there."""
        with self._lock:
            if (found := self._pictures.get(key)) is not None:
                self._pictures.move_to_end(key)
            return found

    def keep(self, key: bytes, picture: Picture) -> None:
        """Add a picture, unless it alone is too large."""
        with self._lock:
            if key in self._pictures or picture.item.nbytes > self.capacity:
                return
            self._pictures[key] = picture
            self.used += picture.item.nbytes
            while self.used > self.capacity:
                _, oldest = self._pictures.popitem(last=False)
                self.used -= oldest.item.nbytes


class PlaceholderProcessor:
    """What processors share: finds placeholders, replaces them, makes spans. A family says how an image is resized, and
    what stands for it among the tokens."""

    kwargs_known: ClassVar[tuple[str, ...]] = ()
    """Settings that a request may give."""
    takes_videos: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        self.config, self.files, self.tokenizer = config, files, tokenizer
        self.image_token = self.soft_token = token_id(config, tokenizer, "image_token_id", "image_token_index")
        """The placeholder of an image; and the token that stands for one embedding of it."""
        self.video_token: int | None = None
        self.pictures = PictureCache()

    def cached(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """`image`, from the cache if the same pixels came with the same settings."""
        if not self.pictures.capacity:
            return self.image(image, kwargs)
        digest = blake3(repr((image.size, sorted(kwargs.items()))).encode())
        digest.update(image.tobytes())
        key = digest.digest()
        if (found := self.pictures.find(key)) is None:
            found = self.image(image, kwargs)
            self.pictures.keep(key, found)
        return found

    def prompt_text(self, text: str, videos: Sequence[Video] = ()) -> str:
        """As it is."""
        return text

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of an image of this size."""
        raise NotImplementedError

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """An image (RGB) as an item, and its tokens."""
        raise NotImplementedError

    def video(self, video: Video, kwargs: Mapping[str, Any]) -> Picture:
        """A video as an item, and its tokens."""
        raise NotImplementedError

    def positions(self, tokens: np.ndarray, runs: Sequence[tuple[int, Picture]]) -> tuple[np.ndarray | None, int]:
        """(positions, delta) of the expanded prompt; `runs`: where each picture's tokens start."""
        return None, 0

    def prepare(
        self,
        tokens: list[int],
        images: Sequence[Image.Image] = (),
        videos: Sequence[Video] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """See `MediaProcessor`."""
        kwargs = self._checked(kwargs or {})
        if videos and not self.takes_videos:
            raise ValidationError(
                f"{self.config.architecture} takes no videos here; got {len(videos)}: give frames as images", "videos"
            )
        for index, video in enumerate(videos):
            check_video(video, index)
        tokens = self.mark(tokens, videos)
        given = np.asarray(tokens, np.int64)
        is_image = given == self.image_token
        is_video = given == self.video_token if self.video_token is not None else np.zeros(len(given), bool)
        self._check_count(int(is_image.sum()), len(images), "image")
        self._check_count(int(is_video.sum()), len(videos), "video")
        if not images and not videos:
            return Prepared(list(tokens))
        pictures = iter([self.cached(rgb(image), kwargs) for image in images])
        clips = iter([self.video(video, kwargs) for video in videos])
        parts: list[np.ndarray] = []
        items: list[MediaItem] = []
        spans: list[Span] = []
        runs: list[tuple[int, Picture]] = []
        done = length = 0
        for place in np.flatnonzero(is_image | is_video).tolist():
            picture = next(clips if is_video[place] else pictures)
            parts += [given[done:place], picture.tokens]
            start = length + place - done
            spans += make_spans(picture.tokens == self._soft(is_video[place]), start, len(items))
            runs.append((start, picture))
            items.append(picture.item)
            length, done = start + len(picture.tokens), place + 1
        parts.append(given[done:])
        expanded = np.concatenate(parts)
        positions, delta = self.positions(expanded, runs)
        return Prepared(expanded.tolist(), items, spans, positions, delta)

    def mark(self, tokens: list[int], videos: Sequence[Video]) -> list[int]:
        """The prompt with exactly one placeholder for each picture, where templates write several tokens."""
        return tokens

    def _soft(self, is_video: bool) -> int | None:
        return self.video_token if is_video else self.soft_token

    def _check_count(self, found: int, given: int, kind: str) -> None:
        if found == given:
            return
        token = self.image_token if kind == "image" else self.video_token
        name = self.tokenizer.convert_ids_to_tokens(token) if token is not None else "?"
        raise ValidationError(
            f"the prompt has {found} placeholder{'' if found == 1 else 's'} {name!r} and the request {given} "
            f"{kind}{'' if given == 1 else 's'}: there must be one placeholder for each (a chat template writes them; "
            "a raw prompt must have them)",
            f"{kind}s",
            given,
        )

    def _checked(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = [name for name in kwargs if name not in self.kwargs_known]
        if unknown:
            known = ", ".join(self.kwargs_known) or "none"
            raise ValidationError(
                f"mm_processor_kwargs has {unknown[0]!r}, which {self.config.architecture} does not take; it takes: "
                f"{known}",
                "mm_processor_kwargs",
                unknown[0],
            )
        return kwargs

    def item(
        self,
        kind: str,
        frames: Sequence[Image.Image],
        rows: int,
        arrays: dict[str, np.ndarray],
        settings: Sequence[Any],
    ) -> MediaItem:
        """An item whose digest covers the decoded pixels (RGB), their layout, the family and every setting."""
        layout = [(name, array.shape, array.tolist() if name != "pixels" else None) for name, array in arrays.items()]
        described = (self.config.architecture, kind, len(frames), frames[0].size, rows, layout, *settings)
        digest = blake3(repr(described).encode())
        for frame in frames:
            digest.update(frame.tobytes())
        return MediaItem(digest=digest.digest(), kind=kind, rows=rows, arrays=arrays)


def make_spans(is_soft: np.ndarray, start: int, item: int) -> list[Span]:
    """A span for each run of soft tokens; `start`: the place of the first of these tokens in the prompt."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_soft, [False])).astype(np.int8)))
    spans, offset = [], 0
    for first, end in edges.reshape(-1, 2).tolist():
        spans.append(Span(start=start + first, length=end - first, item=item, offset=offset))
        offset += end - first
    return spans


def rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent on white."""
    if not isinstance(image, Image.Image):
        raise ValidationError(f"an image must be a PIL image here, got {type(image).__name__}", "images")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def resized(image: Image.Image, width: int, height: int, resample: int) -> np.ndarray:
    """uint8 [height, width, 3]."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling(resample), reducing_gap=None)
    return np.array(image, np.uint8)


def norm_of(mean: Sequence[float], deviation: Sequence[float], rescale: float) -> np.ndarray:
    """float32 [2, 3]: mean and deviation in units of 8-bit pixels, as encoders take them."""
    return (np.asarray([mean, deviation], np.float64) / rescale).astype(np.float32)


def check_video(video: Video, index: int = 0) -> None:
    """Raise if frames, their sizes or their times cannot be those of a video."""
    if not video.frames:
        raise ValidationError(f"video {index} has no frames", "videos")
    sizes = {frame.size for frame in video.frames}
    if len(sizes) > 1:
        raise ValidationError(f"video {index} has frames of different sizes: {sorted(sizes)[:4]}", "videos")
    if not video.fps > 0:
        raise ValidationError(f"video {index} has fps = {video.fps}; a number above 0 is needed", "videos", video.fps)
    if video.seconds is not None and len(video.seconds) != len(video.frames):
        raise ValidationError(
            f"video {index} has {len(video.frames)} frames and {len(video.seconds)} times of frames", "videos"
        )


def token_id(config: ModelConfig, tokenizer: Any, *names: str, text: str | None = None) -> int:
    """A token that the config names, under the first of `names` that it has; else the token written `text`."""
    for name in names:
        if isinstance(value := config.raw.get(name), int):
            return value
    found = tokenizer.convert_tokens_to_ids(text) if text is not None and tokenizer is not None else None
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise CheckpointError(
            f"{config.architecture} needs {names[0] if names else text!r} in config.json, or the token {text!r}"
        )
    return int(found)


def positive(value: Any, name: str) -> int:
    """A setting that must be a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValidationError(f"{name} must be a positive integer, got {short_repr(value)}", name, value)
    return value
