"""GGUF files: every tensor names its own encoding."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable

from quire.kernels.weights.superblock import KINDS
from quire.loading.gguf import GGUFWeight, JoinedWeight
from quire.quantization.formats.gguf import BLOCKS, PACKED_ON_CPU, GGUFFormat

logger = logging.getLogger(__name__)

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate|up|down)_proj")
_REGROUPED = re.compile(r"\.query_key_value$")
"""Matrices whose rows the model regroups while loading: GPT-NeoX's."""


@functools.cache
def _say(message: str) -> None:
    """Once: a file's scheme is made several times, for estimates and by every rank."""
    logger.info("%s", message)


class GGUFScheme:
    """The encodings of a GGUF file's tensors. Encodings without a layout of ours are dequantized while loading."""

    name = "gguf"
    covers_embeddings = True
    stacks_experts = True
    """Experts are stacked in the file; they are asked for, and read, under the names of Hugging Face's Qwen models."""

    def __init__(self, checkpoint: Iterable[GGUFWeight | JoinedWeight], interleaved: bool = False) -> None:
        """`interleaved`: for a CPU's products."""
        self.disagreements: list[str] = []
        self._formats: dict[str, GGUFFormat] = {}
        encodings: dict[str, str] = {}
        for weight in checkpoint:
            if weight.encoding is None:
                continue
            module = weight.name.removesuffix(".weight")
            encodings[module] = weight.encoding
            known = PACKED_ON_CPU if interleaved else BLOCKS
            if weight.encoding in known and weight.blocks is not None and not _REGROUPED.search(module):
                self._formats[module] = GGUFFormat(weight.encoding, interleaved)
        self._drop_uneven_experts(encodings)
        others = Counter(encoding for module, encoding in encodings.items() if module not in self._formats)
        if others:
            listed = ", ".join(f"{count} in {encoding}" for encoding, count in sorted(others.items()))
            _say(f"tensors of the GGUF file that are dequantized while loading: {listed}")

    @property
    def is_empty(self) -> bool:
        """Whether no matrix stays packed."""
        return not self._formats

    def format_of(self, module: str) -> GGUFFormat | None:
        """The module's format; None: it is dequantized."""
        return self._formats.get(module) or self._formats.get(_ONE_EXPERT.sub(".experts.", module))

    def ignores(self, tensor: str) -> bool:
        return False

    def _drop_uneven_experts(self, modules: Iterable[str]) -> None:
        """Experts of a layer stay packed if gate and up have one encoding, and down one of the same layout."""
        for owner in {found[1] for module in modules if (found := _EXPERTS.fullmatch(module))}:
            gate, up, down = (self._formats.get(f"{owner}.{name}_proj") for name in ("gate", "up", "down"))
            packs = gate is not None and gate == up and down is not None
            same = packs and (gate.interleaved or (gate.encoding in KINDS) == (down.encoding in KINDS))  # type: ignore[union-attr]
            if not same:
                for name in ("gate", "up", "down"):
                    self._formats.pop(f"{owner}.{name}_proj", None)
