"""Which tensors of an adapter belong together, by their names and shapes. Imports no torch: a front asks too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.adapters.peft_config import CONFIG, LoraSettings, Scales
from quire.errors import AdapterError, short_repr

Shape = tuple[int, ...]

MAX_EXPERTS = 4096
MAX_STACK = 1 << 31
"""Values of one matrix of all experts: the high number of an expert alone must not take memory."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_PREFIX = "base_model.model."
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
_ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_ONE_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d{1,9})\.(?P<matrix>\w+)")
_EXPERT_MATRICES = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": DOWN,
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    GATE_UP: GATE_UP,
    DOWN: DOWN,
}


@dataclass(frozen=True)
class MatrixTensors:
    """The names of the tensors of one adapted matrix."""

    a: str
    b: str
    shape: tuple[int, int]
    """[out, in] of the matrix."""
    rank: int
    scale: float
    bias: str | None = None
    magnitude: str | None = None
    experts: int = 0
    """The tensors are of so many experts, folded into two dimensions; 0: of one matrix."""


@dataclass
class AdapterLayout:
    """The names of an adapter's tensors, by what they change."""

    rank: int = 0
    """The largest of a matrix."""
    matrices: dict[str, MatrixTensors] = field(default_factory=dict)
    embeddings: dict[str, MatrixTensors] = field(default_factory=dict)
    stacks: dict[str, MatrixTensors] = field(default_factory=dict)
    """Of all experts in one, by parameter."""
    single_experts: dict[str, dict[str, dict[int, MatrixTensors]]] = field(default_factory=dict)
    """Of single experts: by the experts' name, the matrix and the expert."""
    replaced: dict[str, str] = field(default_factory=dict)
    token_rows: dict[str, tuple[list[int], str]] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each matrix that is adapted, by module; experts by parameter, and of one expert."""
        known = self.matrices | self.embeddings | self.stacks
        shapes = {name: tensors.shape for name, tensors in known.items()}
        for experts, group in self.single_experts.items():
            for matrix, tensors in group.items():
                out, width = next(iter(tensors.values())).shape
                is_half = matrix in ("gate_proj", "up_proj")
                shapes[f"{experts}.{GATE_UP if is_half else matrix}"] = (2 * out if is_half else out, width)
        return shapes


class LayoutReader:
    """Finds the layout, and checks that the tensors fit together."""

    def __init__(self, path: Path, settings: LoraSettings, max_rank: int, shapes: Mapping[str, Shape]) -> None:
        self._path, self._settings, self._max_rank, self._shapes = path, settings, max_rank, shapes
        self._scales = Scales(settings)
        self._found = AdapterLayout()

    def read(self) -> AdapterLayout:
        found = self._found
        parts: dict[str, dict[str, str]] = {}
        for name in self._shapes:
            self._sort(name, parts)
        wrappers: dict[str, list[tuple[int, str, str]]] = {}
        for module, names in parts.items():
            if module.endswith(".base_layer") or module.split(".")[-1] == "experts":
                a, b = self._pair(module, names, "A", "B")
                experts = module.replace(".base_layer", "")
                wrappers.setdefault(experts, []).append((module.count(".base_layer"), a, b))
            elif "embedding_A" in names or "embedding_B" in names:
                found.embeddings[module] = self._matrix(module, names, "embedding_A", "embedding_B")
            elif expert := _ONE_EXPERT.fullmatch(module):
                self._add_expert(module, expert, self._matrix(module, names, "A", "B"))
            else:
                found.matrices[module] = self._matrix(module, names, "A", "B")
        for experts, listed in wrappers.items():
            self._add_stacks(experts, listed)
        self._check_whole()
        return found

    def _sort(self, name: str, parts: dict[str, dict[str, str]]) -> None:
        module = name.removeprefix(_PREFIX)
        for ending, part in _ENDINGS.items():
            if module.endswith(ending):
                parts.setdefault(module.removesuffix(ending), {})[part] = name
                return
        if module.endswith(_TOKEN_ROWS):
            self._add_rows(module.removesuffix(_TOKEN_ROWS), name)
        elif module == name or "lora_" in module:
            raise AdapterError(f"{self._path}: the tensor {short_repr(name)} is not known: refused, not dropped")
        else:
            # Modules that were trained whole, biases (`bias`), and embeddings that PEFT saves beside their adapters.
            parameter = module.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            if parameter in self._found.replaced:
                raise AdapterError(f"{self._path}: {parameter} is replaced twice")
            self._found.replaced[parameter] = name

    def _add_rows(self, module: str, name: str) -> None:
        wanted = self._settings.tokens.items()
        ends = (tokens for target, tokens in wanted if target in ("", module) or module.endswith(f".{target}"))
        tokens, shape = next(ends, []), self._shapes[name]
        if not tokens or len(shape) != 2 or shape[0] != len(tokens):
            raise AdapterError(
                f"{self._path}: {module} has rows of the shape {list(shape)} for single tokens, and "
                f"trainable_token_indices names {len(tokens)}"
            )
        self._found.token_rows[module] = tokens, name

    def _matrix(self, module: str, names: dict[str, str], first: str, second: str) -> MatrixTensors:
        a, b = self._pair(module, names, first, second)
        (rank, width), out = self._shapes[a], self._shapes[b][0]
        # A parameter that is adapted without a module of its own has patterns for its own name.
        own = f"{module}.weight"
        named = own if self._is_parameter(own) else module
        self._check_rank(module, rank)
        if rank != (expected := self._scales.rank(named)):
            raise AdapterError(f"{self._path}: {module} has the rank {rank}, but {CONFIG} says {expected}")
        has_bias = self._settings.lora_bias and first == "A"
        return MatrixTensors(
            a, b, (out, width), rank, self._scales.scale(named, rank),
            self._vector(module, names, "bias", out, has_bias, "lora_bias"),
            self._vector(module, names, "magnitude", out, self._settings.dora, "use_dora"),
        )  # fmt: skip

    def _pair(self, module: str, names: dict[str, str], first: str, second: str) -> tuple[str, str]:
        if first not in names or second not in names:
            raise AdapterError(f"{self._path}: {module} has only one of lora_{first} and lora_{second}")
        a, b = self._shapes[names[first]], self._shapes[names[second]]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not all(a) or not all(b):
            raise AdapterError(
                f"{self._path}: {module}: lora_{first} {list(a)} and lora_{second} {list(b)} do not fit together: "
                "expected [rank, in] and [out, rank]"
            )
        if set(names) - {first, second, "bias", "magnitude"}:
            raise AdapterError(f"{self._path}: {module} is adapted both as an embedding and as a matrix")
        return names[first], names[second]

    def _vector(
        self, module: str, names: dict[str, str], part: str, size: int, is_expected: bool, setting: str
    ) -> str | None:
        name = names.get(part)
        if (name is not None) != is_expected:
            has = "lacks" if name is None else "has"
            raise AdapterError(
                f"{self._path}: {module} {has} a {part} of LoRA, but {setting} is {str(is_expected).lower()}"
            )
        if name is not None and self._shapes[name] not in ((size,), (size, 1), (1, size)):
            shape = list(self._shapes[name])
            raise AdapterError(f"{self._path}: {module}: the {part} has the shape {shape}, not [{size}]")
        return name

    def _check_rank(self, module: str, rank: int) -> None:
        self._found.rank = max(self._found.rank, rank)
        if rank > self._max_rank:
            raise AdapterError(
                f"{self._path}: {module} has the rank {rank}; at most {self._max_rank} is allowed: raise max_lora_rank"
            )

    def _is_parameter(self, name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in self._settings.parameters)

    # Experts

    def _add_expert(self, module: str, expert: re.Match[str], tensors: MatrixTensors) -> None:
        matrix, number = _EXPERT_MATRICES.get(expert["matrix"]), int(expert["number"])
        if matrix is None:
            raise AdapterError(f"{self._path}: {module}: a matrix of an expert that is not known")
        if number >= MAX_EXPERTS:
            raise AdapterError(f"{self._path}: {module}: at most {MAX_EXPERTS} experts are read")
        if tensors.bias or tensors.magnitude:
            raise AdapterError(f"{self._path}: {module}: DoRA and lora_bias of experts are not implemented")
        group = self._found.single_experts.setdefault(expert["experts"], {}).setdefault(matrix, {})
        some = next(iter(group.values()), tensors)
        if tensors.shape != some.shape:
            raise AdapterError(f"{self._path}: {module} has the shape {tensors.shape}, another expert {some.shape}")
        group[number] = tensors
        if (max(group) + 1) * tensors.rank * sum(tensors.shape) > MAX_STACK:
            raise AdapterError(f"{self._path}: {module}: {max(group) + 1} experts of this size are too large")

    def _add_stacks(self, experts: str, wrappers: list[tuple[int, str, str]]) -> None:
        # PEFT wraps parameters in the order in which the module declares them: gate_up_proj is the innermost.
        for parameter, (a, b) in self._by_parameter(experts, [one[1:] for one in sorted(wrappers, reverse=True)]):
            name = f"{experts}.{parameter}"
            rows, width = self._shapes[a]
            rank = self._scales.rank(name)
            count, rest = divmod(rows, rank)
            self._check_rank(name, rank)
            if rest or not 1 <= count <= MAX_EXPERTS:
                raise AdapterError(
                    f"{self._path}: {name} has {rows} rows in lora_A, not a multiple of its rank, {rank}"
                )
            shape = (self._shapes[b][0], width)
            self._found.stacks[name] = MatrixTensors(a, b, shape, rank, self._scales.scale(name, rank), experts=count)

    def _by_parameter(self, experts: str, pairs: list[tuple[str, str]]) -> list[tuple[str, tuple[str, str]]]:
        """Which parameter each pair of tensors is for."""
        if len(pairs) == 1:
            named = [parameter for parameter in (GATE_UP, DOWN) if self._is_parameter(f"{experts}.{parameter}")]
            if len(named) != 1:
                raise AdapterError(
                    f"{self._path}: {experts} has one adapter, and target_parameters in {CONFIG} does not say whether "
                    f"it is for {GATE_UP} or {DOWN}"
                )
            return [(named[0], pairs[0])]
        shapes = [(self._shapes[a], self._shapes[b]) for a, b in pairs]
        if len(pairs) == 2:
            for up, down in ((0, 1), (1, 0)):
                (up_a, up_b), (down_a, down_b) = shapes[up], shapes[down]
                if up_a[1] == down_b[0] and up_b[0] == 2 * down_a[1]:
                    return [(GATE_UP, pairs[up]), (DOWN, pairs[down])]
        listed = ", ".join(f"{list(a)} and {list(b)}" for a, b in shapes)
        raise AdapterError(
            f"{self._path}: {experts}: tensors of the shapes {listed} are not those of {GATE_UP} and {DOWN}"
        )

    # The whole

    def _check_whole(self) -> None:
        found, path = self._found, self._path
        for experts, group in found.single_experts.items():
            if any(f"{experts}.{parameter}" in found.stacks for parameter in (GATE_UP, DOWN)):
                raise AdapterError(f"{path}: {experts} is adapted twice, in two layouts")
            halves = [next(iter(group[half].values())).shape for half in ("gate_proj", "up_proj") if half in group]
            if GATE_UP in group and halves:
                raise AdapterError(f"{path}: {experts} has adapters both of {GATE_UP} and of its halves")
            if len(set(halves)) > 1:
                raise AdapterError(f"{path}: {experts}: gate_proj and up_proj have the shapes {halves}")
        for parameter, name in found.replaced.items():
            if not all(self._shapes[name]):
                raise AdapterError(f"{path}: the tensor for {parameter} is empty")
        for module, (_, name) in found.token_rows.items():
            if module in found.embeddings and found.embeddings[module].shape[0] != self._shapes[name][1]:
                raise AdapterError(f"{path}: {module}: the rows of single tokens have another width than its adapter")
        for target in self._settings.tokens:
            if not any(module.endswith(target) for module in found.token_rows):
                raise AdapterError(f"{path}: trainable_token_indices has tokens without rows, for {target or 'all'}")
        if not self._shapes:
            raise AdapterError(f"{path}: the adapter changes nothing: it has no tensors")
