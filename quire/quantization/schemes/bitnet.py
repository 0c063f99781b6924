"""`quant_method: bitnet`: BitNet b1.58 as transformers stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.quantization.formats.base import Format
from quire.quantization.formats.bitnet import BitNetFormat
from quire.quantization.schemes.base import DescribedScheme, names_in, unsupported


class BitNetScheme(DescribedScheme):
    """All matrices but those listed, in ternary codes."""

    name = "bitnet"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        kind = str(config.get("linear_class") or "bitlinear").lower()
        if kind not in ("bitlinear", "autobitlinear"):
            raise unsupported(f"bitnet: linear_class {kind!r}", "bitlinear and autobitlinear are")
        if kind == "autobitlinear" and str(config.get("quantization_mode") or "offline").lower() != "offline":
            raise unsupported(
                "bitnet: weights in 16 bits that are rounded at every use (quantization_mode 'online')",
                "use the checkpoint with packed weights (quantization_mode 'offline')",
            )
        if config.get("use_rms_norm"):
            raise unsupported("bitnet: a norm inside every matrix (use_rms_norm)", "use a checkpoint without it")
        self._format = BitNetFormat(divides=kind == "bitlinear")
        self._skipped = frozenset(names_in(config, "modules_to_not_convert"))

    def described(self, module: str) -> Format | None:
        path = module.split(".")
        names = {*path, *(".".join(path[:length]) for length in range(1, len(path) + 1))}
        return None if names & self._skipped else self._format
