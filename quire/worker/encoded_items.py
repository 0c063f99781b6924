"""Encoded images on the device, by slot: encoded before a step, read by its prompts in place of embeddings of ids."""

from __future__ import annotations

import logging
from typing import Any

import torch

from quire.layers.attention.base import Deepstack
from quire.messages.media import EMBEDS, ENCODE_PARTS, VALUES, EncodeItem, MediaItem
from quire.messages.plan import StepPlan
from quire.worker.batch import StepInputs, Upload

logger = logging.getLogger(__name__)


class EncodeJob:
    """An image that is encoded over several steps, layer after layer."""

    def __init__(self, item: EncodeItem, encoder: Any | None) -> None:
        """`encoder`: one without `encode_parts` does all of it at once."""
        self.item = item
        self.slot = item.slot
        self._done = 0
        self._encoder = encoder
        self._parts: Any | None = None
        if hasattr(encoder, "encode_parts"):
            assert encoder is not None
            self._parts = encoder.encode_parts([item.item])

    def advance(self, until: int) -> list[torch.Tensor] | None:
        """Go on until so much of `ENCODE_PARTS` is done; the rows, once all is."""
        if self._parts is None:
            if until < ENCODE_PARTS:
                return None
            if self._encoder is None:
                raise ValueError("this model has no encoder")
            rows: list[torch.Tensor] = self._encoder.encode([self.item.item])
            return rows
        assert self._encoder is not None
        count = self._encoder.parts if until >= ENCODE_PARTS else until * self._encoder.parts // ENCODE_PARTS
        try:
            while self._done < count or until >= ENCODE_PARTS:
                next(self._parts)
                self._done += 1
        except StopIteration as end:
            return list(end.value)
        return None


class EncodedItems:
    """Embeddings of items [rows, width], by slot. Which slot has what, the scheduler decides."""

    def __init__(self, model: Any, encoder: Any | None, hidden_size: int, dtype: torch.dtype) -> None:
        """`encoder`: a `VisionEncoder`, if the model takes images."""
        self._model = model
        self._encoder = encoder
        self._hidden = hidden_size
        self._dtype = dtype
        self._device: torch.device = model.build.device
        self._is_first_stage: bool = model.build.ranks.is_first_stage
        self._upload = Upload(self._device)
        self._slots: dict[int, torch.Tensor] = {}
        self._job: EncodeJob | None = None
        """An image whose encoding takes several steps."""

    def apply(self, plan: StepPlan) -> list[tuple[int, str]]:
        """Free and encode what the plan says; returns (slot, why) of items that could not be encoded. All stages check
        what they are given; only the first has use for it."""
        if plan.reset:
            self._slots.clear()
            self._job = None
        for slot in plan.freed:
            self._slots.pop(slot, None)
        if self._job is not None and self._job.slot in plan.freed:
            self._job = None
        if not self._is_first_stage:
            return []
        images = [each for each in plan.encode if each.item.kind != EMBEDS]
        errors: list[tuple[int, str]] = []
        for each in plan.encode:
            if each.item.kind == EMBEDS:
                self._slots[each.slot] = self._embeds(each.item)
        is_partial = 0 < plan.encoded < ENCODE_PARTS
        if is_partial and self._job is None and len(images) == 1:
            self._job = EncodeJob(images.pop(), self._encoder)
        if self._job is not None:
            self._go_on(self._job, plan.encoded if is_partial else ENCODE_PARTS, errors)
        if images:
            try:
                self._encode(images)
            except Exception as error:
                if len(images) == 1:
                    self._fail(images[0], error, errors)
                else:
                    self._encode_alone(images, errors)
        return errors

    def _go_on(self, job: EncodeJob, until: int, errors: list[tuple[int, str]]) -> None:
        """Do another part of an image's encoding."""
        try:
            if (found := job.advance(until)) is not None:
                self._job = None
                self._keep([job.item], found)
        except Exception as error:
            self._job = None
            self._fail(job.item, error, errors)

    def _encode_alone(self, images: list[EncodeItem], errors: list[tuple[int, str]]) -> None:
        """One of these cannot be encoded: find out which."""
        for each in images:
            try:
                self._encode([each])
            except Exception as error:
                self._fail(each, error, errors)

    def _fail(self, each: EncodeItem, error: Exception, errors: list[tuple[int, str]]) -> None:
        """Tokens that read the item give no numbers, so that nothing is drawn from them."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        logger.error("request %s: its %s cannot be encoded: %s", each.request, each.item.kind, error)
        width = self._hidden if self._encoder is None else self._encoder.width
        self._slots[each.slot] = torch.full((each.item.rows, width), torch.nan, dtype=self._dtype, device=self._device)
        errors.append((each.slot, str(error)))

    def _encode(self, images: list[EncodeItem]) -> None:
        if self._encoder is None:
            raise ValueError("this model has no encoder")
        self._keep(images, self._encoder.encode([each.item for each in images]))

    def _keep(self, images: list[EncodeItem], found: list[torch.Tensor]) -> None:
        assert self._encoder is not None
        for each, rows in zip(images, found, strict=True):
            if rows.shape != (each.item.rows, self._encoder.width):
                raise ValueError(
                    f"the encoder yields {tuple(rows.shape)}, and {each.item.rows} rows of {self._encoder.width} are "
                    "expected"
                )
            # Not a part of what was encoded together: that would stay in memory until the last of it leaves.
            self._slots[each.slot] = rows.clone() if len(images) > 1 else rows

    def _embeds(self, item: MediaItem) -> torch.Tensor:
        values = torch.from_numpy(item.arrays[VALUES])
        return values.to(device=self._device, dtype=self._dtype)

    def splice(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Make the hidden states that enter the first layer, with the rows that the plan's tokens read."""
        if not self._is_first_stage:
            return
        rows = torch.cat([self._slots[s.slot][s.offset : s.offset + s.length] for s in plan.splices])
        places = self._places(plan)
        hidden = self._model.embed(inputs.tokens)
        hidden.index_copy_(0, places, rows[:, : self._hidden].to(hidden.dtype))
        inputs.hidden = hidden
        if rows.shape[1] > self._hidden:
            layers = rows[:, self._hidden :].split(self._hidden, dim=1)
            inputs.attention[0].deepstack = Deepstack(places, layers)

    def _places(self, plan: StepPlan) -> torch.Tensor:
        """[rows read]: the step's tokens that read them."""
        starts, lengths = self._upload([s.start for s in plan.splices], [s.length for s in plan.splices])
        ends = lengths.cumsum(0)
        total = sum(s.length for s in plan.splices)
        offsets = torch.repeat_interleave(starts - (ends - lengths), lengths, output_size=total)
        return torch.arange(total, device=self._device) + offsets
