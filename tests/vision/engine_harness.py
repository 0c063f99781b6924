"""An engine over a tiny checkpoint that sees, driven request by request, and transformers' own answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from quire.config import EngineConfig
from quire.engine.setup import make_engine
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.step_builder import StepBuilder
from quire.vision.processor import Prepared, processor_for
from tests.vision.harness import Family, tokenizer_of, words, write

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 128,
    "max_model_len": 320, "encoder_cache_tokens": 256,
}  # fmt: skip


class Sighted:
    """A checkpoint, its processor, and transformers' model."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.folder = folder
        self.reference = write(family, folder)
        self.files = local_files("tiny", folder)
        self.config = read_model_config(self.files)
        self.processor = processor_for(self.config, folder, tokenizer_of(family.specials))

    def prepare(self, tokens: list[int], images: Sequence[Image.Image]) -> Prepared:
        assert self.processor is not None
        return self.processor.prepare(tokens, images)

    def engine(self, **settings: Any) -> Engine:
        return Engine(self, **settings)

    @torch.no_grad()
    def expected(self, prepared: Prepared, count: int, only: int | None = None, **inputs: Any) -> list[int]:
        """The likeliest continuation; `only`: by ids below this."""
        tokens, cache = torch.tensor([prepared.tokens]), None
        found: list[int] = []
        for _ in range(count):
            out = self.reference(input_ids=tokens, past_key_values=cache, use_cache=True, **inputs)
            found.append(int(out.logits[0, -1, :only].argmax()))
            tokens, cache = torch.tensor([found[-1:]]), out.past_key_values
            inputs = {}  # a placeholder that is generated stands for itself
        return found


class Case:
    """A family with its prompts, and what transformers makes of them."""

    def __init__(
        self, family: Family, folder: Path, image: int, pixels: Any, around: tuple[list[int], list[int]] = ([], [])
    ) -> None:
        """`image`: the placeholder of an image in a prompt; `pixels`: transformers' processor; `around`: tokens before
        and after a placeholder."""
        self.sighted = Sighted(family, folder)
        self._image, self._around = image, around
        self._pixels = pixels.from_pretrained(folder)
        self._answers: dict[tuple[bytes, ...], list[int]] = {}

    def prompt(self, images: Sequence[Image.Image], seed: int = 0, before: int = 5) -> Prepared:
        tokens = words(before, seed)
        for index in range(len(images)):
            tokens += [*self._around[0], self._image, *self._around[1], *words(3, seed + index)]
        return self.sighted.prepare(tokens, images)

    def theirs(
        self, images: Sequence[Image.Image], prepared: Prepared, count: int = 6, only: int | None = None
    ) -> list[int]:
        """Tokens of the likeliest continuation; `only`: by ids below this."""
        key = (bytes([*prepared.tokens, only or 0]), *(item.digest for item in prepared.items))
        if len(self._answers.get(key, ())) < count:
            inputs: dict[str, Any] = dict(self._pixels(list(images), return_tensors="pt"))
            inputs.pop("num_crops", None)
            types = torch.zeros(1, len(prepared.tokens), dtype=torch.int32)
            for span in prepared.spans:
                types[0, span.start : span.stop] = 1
            name = self.sighted.config.architecture
            if name.startswith("Gemma3"):
                inputs["token_type_ids"] = types
            elif name.startswith("Qwen"):
                inputs["mm_token_type_ids"] = types
            self._answers[key] = self.sighted.expected(prepared, count, only, **inputs)
        return self._answers[key][:count]


class Engine:
    """A core that is stepped by hand."""

    def __init__(self, sighted: Sighted, **settings: Any) -> None:
        config = EngineConfig(model=str(sighted.folder), skip_tokenizer_init=True, **SETTINGS | settings)
        self.core, self.info = make_engine(config, sighted.files, sighted.config)
        self.scheduler = self.core.scheduler
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Any] = {}
        self.cached: dict[str, int] = {}
        self.beams: dict[str, list[Any]] = {}
        self._ids = itertools.count()

    @property
    def keys(self) -> ContentKeys:
        return self.info.keys

    @property
    def stats(self) -> Any:
        return self.scheduler.requests.encoding.stats

    def add(self, prepared: Prepared, count: int, name: str = "", salt: str = "", **fields: Any) -> str:
        name = name or f"r{next(self._ids)}"
        params = fields.pop("params", None) or SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompt = list(prepared.tokens)
        request = NewRequest(
            name, prompt, params, len(prompt) + count, salt=salt, media=prepared.items, spans=prepared.spans,
            positions=prepared.positions, position_delta=prepared.position_delta, **fields,
        )  # fmt: skip
        self.core.add(request)
        return name

    def step(self) -> None:
        outputs = self.core.step()
        at = 0
        for key, count in zip(outputs.keys, outputs.counts or [1] * len(outputs.keys), strict=True):
            self.outputs.setdefault(tuple(key), []).extend(outputs.tokens[at : at + count])
            at += count
        for started in outputs.started:
            self.cached[started.key[0]] = started.num_cached
        self.beams.update(outputs.beams)
        for end in outputs.finished:
            self.ends[end.key] = end

    def run(self) -> None:
        """Until nothing is left."""
        for _ in range(5000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"not done: {self.scheduler.requests.ids()}")

    def answer(self, prepared: Prepared, count: int = 6, **fields: Any) -> list[int]:
        """Run one request; its tokens."""
        name = self.add(prepared, count, **fields)
        self.run()
        assert self.ends[name, 0].reason in ("stop", "length"), self.ends[name, 0]
        return self.outputs[name, 0]

    def preempt(self, name: str, swap: bool = False) -> None:
        """Take the row of a request, if it has one; with `swap` its blocks go to host memory."""
        table = self.scheduler.requests
        for request in table.sequences(name):
            if request.row < 0:
                continue
            tokens = min(int(table.rows.computed[request.row]), request.known)
            if swap and table.swapper.is_swappable(request, tokens):  # type: ignore[union-attr]
                table.swapper.swap_out(request, tokens)  # type: ignore[union-attr]
            self.scheduler._preemptor.preempt(StepBuilder(), request)

    def swap_always(self) -> None:
        """Requests that lose their row are swapped out, and loaded again, whatever it costs."""
        swapper = self.scheduler.requests.swapper
        swapper.least_swap = 1  # type: ignore[union-attr]
        for name in ("swapping_pays", "loading_pays"):
            setattr(swapper.tiers.costs, name, lambda *costs: True)  # type: ignore[union-attr]

    def close(self) -> None:
        self.run()
        self.scheduler.check_idle()
        self.core.shutdown()
