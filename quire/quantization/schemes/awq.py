"""`quant_method: awq`: AutoAWQ's `gemm` layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError
from quire.quantization.formats.base import Format
from quire.quantization.formats.grouped import AwqFormat
from quire.quantization.schemes.base import DescribedScheme, names_in, number_in, unsupported


class AwqScheme(DescribedScheme):
    """All matrices but those whose name contains one that is listed, in 4 bits."""

    name = "awq"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        if layout != "gemm":
            raise unsupported(f"awq: the layout {layout!r}", "use a checkpoint of version 'gemm'")
        bits = number_in(config, 4, "bits", "w_bit")
        if bits != 4:
            raise unsupported(f"awq: {bits} bits", "AWQ's layout has 4")
        group = number_in(config, 128, "group_size", "q_group_size")
        if group < 1 and group != -1:
            raise CheckpointError(f"quantization_config: group_size is {group}")
        self._format = AwqFormat(4, None if group == -1 else group, zeros=bool(config.get("zero_point", True)))
        self._skipped = names_in(config, "modules_to_not_convert")

    def described(self, module: str) -> Format | None:
        return None if any(name in module for name in self._skipped) else self._format
