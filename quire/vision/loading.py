"""Makes a model's encoder and fills it from the model's own checkpoint, at start or when the first picture comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.build_context import BuildContext, collect_targets
from quire.loading.files import ModelFiles
from quire.loading.load import Misfits, load_weights, open_checkpoint
from quire.loading.weights import AnyTarget, Checkpoint
from quire.messages.media import MediaItem
from quire.vision.base import VisionEncoder
from quire.vision.registry import ENCODERS

logger = logging.getLogger(__name__)


def make_encoder(build: BuildContext) -> VisionEncoder | None:
    """The model's encoder, weights unset; None: the model takes text alone, or has an encoder that is not known."""
    found = ENCODERS.find(build.config.architecture)
    if found is None or not isinstance(build.config.raw.get("vision_config"), Mapping):
        return None
    try:
        return found(build)
    except UnsupportedModelError as error:
        logger.warning("the model is served without images: %s", error)
        return None


def load_encoder(encoder: VisionEncoder, checkpoint: Checkpoint, progress: bool = False) -> None:
    """Fill the encoder; the checkpoint's other tensors are left alone."""
    targets = named_targets(encoder, (weight.name for weight in checkpoint))
    load_weights(targets, lambda name: True, checkpoint, progress)


def named_targets(encoder: Any, names: Iterable[str]) -> dict[str, Sequence[AnyTarget]]:
    """The encoder's targets under the checkpoint's own names, which differ between published layouts."""
    targets = collect_targets(encoder)
    found: dict[str, Sequence[AnyTarget]] = {
        name: targets[own] for name in names if (own := encoder.canonical(name)) in targets
    }
    present = {encoder.canonical(name) for name in found}
    missing = [f"{own} {tuple(each[0].shape)}" for own, each in targets.items() if own not in present]
    try:
        Misfits(missing=missing).raise_if_any()
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nThese are of the vision encoder: vision='off' serves text alone") from None
    return found


def encoder_from(files: ModelFiles, build: BuildContext, load_format: str, seed: int = 0) -> VisionEncoder | None:
    """The model's encoder with its weights; None: the model takes text alone."""
    encoder = make_encoder(build)
    if encoder is not None:
        targets = collect_targets(encoder)  # type: ignore[arg-type]
        load_encoder(encoder, open_checkpoint(files, load_format, targets=targets, seed=seed))
    return encoder


class LazyEncoder:
    """An encoder that is made and read when the first picture comes: text alone needs no memory for it."""

    def __init__(self, build: BuildContext, make: Callable[[], VisionEncoder]) -> None:
        self.build = build
        self._make = make
        self._lock = threading.Lock()
        self._made: VisionEncoder | None = None
        shape = make_shape(build)
        assert shape is not None
        self.width, self._largest, self._canonical = shape.width, shape.largest, shape.canonical

    @property
    def is_loaded(self) -> bool:
        """Whether a picture has come."""
        return self._made is not None

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """See `VisionEncoder`."""
        with self._lock:
            if self._made is None:
                logger.info("reading the vision encoder's weights for the first picture")
                with torch.inference_mode(False):  # other threads fill what is made here
                    self._made = self._make()
        return self._made.encode(items)

    def canonical(self, name: str) -> str:
        """See `VisionEncoder`."""
        return self._canonical(name)

    def largest(self, rows: int) -> MediaItem:
        """See `VisionEncoder`."""
        return self._largest(rows)


def make_shape(build: BuildContext) -> VisionEncoder | None:
    """The model's encoder without memory for its weights: it knows its sizes. None: the model takes text alone."""
    meta = BuildContext(
        config=build.config,
        ranks=build.ranks,
        dtype=build.dtype,
        device=torch.device("meta"),
        ops=build.ops,
        attention=build.attention,
        max_model_len=build.max_model_len,
    )
    return make_encoder(meta)
