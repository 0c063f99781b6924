"""How tensor-parallel ranks share a model's layers, by the plan that transformers has for it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

from quire.errors import UnsupportedModelError


class Cut(enum.Enum):
    """What a rank keeps of a matrix."""

    WHOLE = "whole"
    OUTPUTS = "outputs"
    PACKED_OUTPUTS = "packed outputs"
    """The outputs are two matrices, one above the other; a part of each."""
    INPUTS = "inputs"
    """The ranks' results are summed."""


_STYLES = {
    "colwise": Cut.OUTPUTS,
    "packed_colwise": Cut.PACKED_OUTPUTS,
    "rowwise": Cut.INPUTS,
    # These take a whole input and give a whole output: each rank computes all of it.
    "colwise_gather_output": Cut.WHOLE,
    "colwise_rep": Cut.WHOLE,
    "rowwise_split_input": Cut.WHOLE,
    "rowwise_rep": Cut.WHOLE,
    "replicate": Cut.WHOLE,
    "replicated_with_grad_allreduce": Cut.WHOLE,
    "embedding_rowwise": Cut.WHOLE,
}


class ParallelPlan:
    """A model's plan, by the names of its modules and parameters with `*` for numbers."""

    def __init__(self, architecture: str, styles: Mapping[str, str]) -> None:
        self._architecture = architecture
        self._styles = styles

    def cut(self, name: str) -> Cut:
        """How ranks share a matrix or a parameter. Raises for a way that is not implemented."""
        style = self.style(name)
        if style is None:
            return Cut.WHOLE
        if style not in _STYLES:
            raise UnsupportedModelError(
                f"{self._architecture} shares {name} between ranks as {style!r}, which is not implemented: set "
                "tensor_parallel_size to 1"
            )
        return _STYLES[style]

    def style(self, name: str) -> str | None:
        """The plan's word for a module or a parameter."""
        return self._styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
