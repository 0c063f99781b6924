"""Which matrices of a 16-bit checkpoint are quantized while loading, and to what."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.errors import ConfigError
from quire.quantization.formats.on_load import KINDS, OnLoadFormat

UNQUANTIZED = "16bit"
"""In a file: leave these modules as they are."""
_LEFT_ALONE = re.compile(r"(^|\.)(lm_head|embed_out|gate|shared_expert_gate|router|embed_tokens|wte|embed_in)$")
"""Heads, routers and embeddings: small, or what errors hurt most in."""


class OnLoadScheme:
    """Quantizes every matrix of the layers to one kind, or each to the kind that a table gives for its name."""

    name = "on load"

    def __init__(self, kinds: Mapping[str, str] | str) -> None:
        """`kinds`: one of KINDS for all; or by a module's full name, or a regex that matches all of it (the first
        that does counts; what no entry matches is left alone). Raises ConfigError for an unknown kind."""
        self.disagreements: list[str] = []
        table = {".*": kinds} if isinstance(kinds, str) else dict(kinds)
        for pattern, kind in table.items():
            if kind not in KINDS and kind != UNQUANTIZED:
                known = ", ".join([*KINDS, UNQUANTIZED])
                raise ConfigError(
                    f"quantization gives {pattern!r} the kind {kind!r}; known are {known}", "quantization", kind
                )
        self._only_layers = isinstance(kinds, str)
        self._exact = table
        # A plain name is not compiled: a table may have thousands.
        self._patterns = [(_compiled(key), kind) for key, kind in table.items() if not re.fullmatch(r"[\w.]+", key)]

    def format_of(self, module: str) -> OnLoadFormat | None:
        """The format that the module's matrix is rounded to."""
        if self._only_layers and _LEFT_ALONE.search(module):
            return None
        kind = self._exact.get(module) or next(
            (kind for pattern, kind in self._patterns if pattern.fullmatch(module)), UNQUANTIZED
        )
        return None if kind == UNQUANTIZED else OnLoadFormat(kind)

    def ignores(self, tensor: str) -> bool:
        """None: the tensors are those of the 16-bit model."""
        return False


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"quantization has {pattern!r}, which is neither a module's name nor a regex: {error}",
            "quantization",
            pattern,
        ) from error
