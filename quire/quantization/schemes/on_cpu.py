"""A checkpoint's scheme with its integer matrices packed for a CPU (`cpu_weights`)."""

from __future__ import annotations

from quire.quantization.formats.base import Format, Scheme
from quire.quantization.formats.strips import StripFormat
from quire.quantization.schemes.base import DescribedScheme


class PackedScheme:
    """`found` with integers of 2 to 8 bits in strips."""

    def __init__(self, found: Scheme) -> None:
        self._found = found
        self.name, self.disagreements = found.name, found.disagreements
        self.covers_embeddings = getattr(found, "covers_embeddings", False)
        self.stacks_experts = getattr(found, "stacks_experts", False)

    def format_of(self, module: str) -> Format | None:
        """The module's format; None: 16 bits."""
        return StripFormat.of(self._found.format_of(module))

    @property
    def is_empty(self) -> bool:
        """Whether no matrix of the checkpoint is in such integers."""
        if not isinstance(self._found, DescribedScheme):
            return True
        header = self._found.header
        modules = (
            [name for name in header if header.is_quantized(name)] if header.known else ["model.layers.0.mlp.up_proj"]
        )
        return not any(isinstance(StripFormat.of(self._found.described(name)), StripFormat) for name in modules)

    def ignores(self, tensor: str) -> bool:
        return self._found.ignores(tensor)
