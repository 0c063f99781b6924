"""`quant_method: mxfp4`: gpt-oss, whose experts are one stacked tensor a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quire.quantization.formats.base import Format
from quire.quantization.formats.fp4 import Mxfp4Experts
from quire.quantization.schemes.base import DescribedScheme, names_in

_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


class Mxfp4Scheme(DescribedScheme):
    """Stacks of experts in MXFP4; everything else in 16 bits."""

    name = "mxfp4"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        self._skipped = names_in(config, "modules_to_not_convert")

    def described(self, module: str) -> Format | None:
        """None: experts are asked for as a stack."""
        return None

    def experts_of(self, stack: str) -> Mxfp4Experts | None:
        """The format of a layer's stack of experts ("model.layers.0.mlp.experts.gate_up_proj"); None: 16 bits."""
        found = _EXPERTS.search(stack)
        if found is None or any(fnmatchcase(stack, f"{name}*") for name in self._skipped):
            return None
        owner, _, name = stack.rpartition(".")
        if self.header.known and f"{name}_blocks" not in self.header.of(owner):
            self._note(f"{stack} is mxfp4 by the description, but stored in 16 bits")
            return None
        return Mxfp4Experts(name, interleaved=name == "gate_up_proj")
