"""The names that checkpoints give to a model's tensors, where these are not the names in the model.

transformers has, for some architectures, rules that rename tensors when they are loaded, or stack the matrices of
experts. Here the rules are read backwards: from the name in the model to the names in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModelError
from quire.loading.weights import TensorLayout


class FullyNamedLayout(TensorLayout):
    """A layout whose names are those of the checkpoint, not relative to the module that owns the layer."""

    def under(self, owner: str) -> TensorLayout:
        return self


@dataclass(frozen=True)
class ExpertNames:
    """Names of an expert's matrices in a checkpoint; `{}` is its number."""

    gate: str
    up: str
    down: str


class CheckpointNames:
    """The rules of one model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        self._architecture = type(model).__name__
        rules: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [rule.reverse_transform() for rule in reversed(rules) if isinstance(rule, WeightRenaming)]
        self._converters = [(rule, rule.reverse_transform()) for rule in rules if not isinstance(rule, WeightRenaming)]

    def stored(self, name: str) -> str:
        """The name that a checkpoint may have for the tensor `name`; the same if there is no rule for it."""
        for rule, backwards in self._converters:
            if backwards.rename_source_key(name)[1] is not None:
                operations = ", ".join(type(each).__name__ for each in rule.operations)
                raise UnsupportedModelError(
                    f"{self._architecture}: checkpoints store {name} in another form ({operations}), which is not "
                    "implemented"
                )
        return self._renamed(name)

    def experts(self, path: str) -> ExpertNames | None:
        """Names of the matrices of the experts `path`; None if a checkpoint only has them stacked."""
        gate_up, down = self._apart(f"{path}.gate_up_proj"), self._apart(f"{path}.down_proj")
        if len(gate_up) == 2 and len(down) == 1:
            return ExpertNames(*gate_up, *down)
        if gate_up or down:
            raise UnsupportedModelError(
                f"{self._architecture}: the form in which checkpoints store {path} is not implemented"
            )
        return None

    def _apart(self, name: str) -> list[str]:
        """The patterns of names whose tensors are stacked into `name`."""
        for rule, backwards in self._converters:
            renamed, matched = backwards.rename_source_key(name)
            if matched is None:
                continue
            operations = [type(each).__name__ for each in rule.operations]
            sources = backwards.target_patterns
            if operations not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
                continue
            names = [renamed.replace(sources[0], source) for source in sources]
            return [self._renamed(each).replace(".*.", ".{}.") for each in names]
        return []

    def _renamed(self, name: str) -> str:
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        return name
