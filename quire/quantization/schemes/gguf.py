"""GGUF files: every tensor names its own encoding."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable

from quire.loading.gguf import GGUFWeight
from quire.quantization.formats.gguf import BLOCKS, GGUFFormat

logger = logging.getLogger(__name__)

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


class GGUFScheme:
    """The encodings of a GGUF file's tensors. Encodings without a layout of ours are dequantized while loading."""

    name = "gguf"

    def __init__(self, checkpoint: Iterable[GGUFWeight]) -> None:
        self.disagreements: list[str] = []
        self._encodings = {
            weight.name.removesuffix(".weight"): weight.encoding
            for weight in checkpoint
            if weight.encoding is not None and weight.blocks is not None
        }
        others = Counter(encoding for encoding in self._encodings.values() if encoding not in BLOCKS)
        if others:
            listed = ", ".join(f"{count} in {encoding}" for encoding, count in sorted(others.items()))
            logger.info("GGUF tensors without kernels of their own are dequantized while loading: %s", listed)

    def format_of(self, module: str) -> GGUFFormat | None:
        """The module's format; experts may be asked for by their number though the file has them stacked."""
        encoding = self._encodings.get(module) or self._encodings.get(_ONE_EXPERT.sub(".experts.", module))
        return GGUFFormat(encoding) if encoding in BLOCKS else None

    def ignores(self, tensor: str) -> bool:
        """None: a GGUF file's tensors are all the model's."""
        return False
