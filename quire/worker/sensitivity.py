"""Chooses bits by layer: `quantization` "auto:5" becomes a table that gives each matrix int4, int8 or 16 bits.

Each layer is loaded by itself and run on calibration text. A matrix's sensitivity is the error of its outputs on these
inputs when its weights are rounded, relative to the outputs. All begin as int4; bits are then spent where they remove
the most error, until the average is reached.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.weights.base import Allocate
from quire.loading.files import ModelFiles
from quire.loading.load import open_checkpoint
from quire.loading.model_config import ModelConfig
from quire.loading.progress import count_bar
from quire.loading.tokenizer import tokenizer_of
from quire.platforms.base import Platform
from quire.quantization.formats.on_load import OnLoadFormat
from quire.quantization.schemes.on_load import UNQUANTIZED
from quire.worker.calibration import LayerStage, Matrix, load_stage
from quire.worker.calibration_text import CALIBRATION_TEXT

logger = logging.getLogger(__name__)

LENGTH = 256
"""Tokens of a sequence."""
STEPS = ("int4", "int8", UNQUANTIZED)
_EXPERT = re.compile(r"^(?P<layer>.*\.experts)\.\d+\..*$")


@dataclass
class Unit:
    """Matrices that get the same bits: those of a fused weight, or all experts of a layer."""

    pattern: str
    """Their names, as a key of the table."""
    weights: int = 0
    bits: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    """Bits of all of them together, scales included, by kind."""
    errors: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    """Squared error of the outputs, by kind."""
    energy: float = 0.0
    """Squares of the outputs."""
    kind: str = STEPS[0]

    def error(self, kind: str) -> float:
        """Relative squared error."""
        return self.errors[kind] / self.energy if self.energy else 0.0


def resolve_auto(config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform) -> EngineConfig:
    """The configuration with `quantization` "auto:BITS" replaced by the table it stands for; others as they are."""
    if config.quantization is None or not config.quantization.startswith("auto:"):
        return config
    wanted = float(config.quantization.removeprefix("auto:"))
    units = measure(config, files, model, platform)
    spend(units, wanted, config.quantization)
    logger.info("%s", report(units))
    table = {unit.pattern: unit.kind for unit in units}
    return dataclasses.replace(config, quantization=json.dumps(table))


def measure(config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform) -> list[Unit]:
    """The sensitivity of every unit of the model."""
    if config.load_format == "dummy" or files.kind is None:
        raise ConfigError(
            "quantization 'auto' measures the model's own weights: it needs a checkpoint", "quantization", "auto"
        )
    plain = dataclasses.replace(
        config, quantization=None, tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_layers=None,
        data_parallel_size=1, enable_expert_parallel=False, num_redundant_experts=0, expert_rebalance_interval=0,
        distributed_executor_backend=None, enforce_eager=True, kv_cache_dtype="auto",
        speculative_config=None,
    )  # fmt: skip
    tokens = tokenizer_of(plain, files)(CALIBRATION_TEXT, verbose=False)["input_ids"]
    length = min(LENGTH, model.max_position, len(tokens))
    sequences = [torch.tensor(tokens[i : i + length]) for i in range(0, len(tokens) - length + 1, length)]
    checkpoint = open_checkpoint(files, plain.load_format)
    hidden: list[torch.Tensor] | None = None
    units: list[Unit] = []
    with count_bar(f"measuring {config.model}", model.num_layers) as show:
        for layer in range(model.num_layers):
            stage = load_stage(plain, files, model, platform, checkpoint, layer, length)
            stage.observe(sequences, hidden)
            units += _measure_stage(stage)
            hidden = stage.run(sequences, hidden) if layer + 1 < model.num_layers else None
            show(layer + 1)
    if platform.device.type == "cuda":
        torch.cuda.empty_cache()  # the layers' memory is the model's from here on
    return units


@torch.no_grad()
def _measure_stage(stage: LayerStage) -> list[Unit]:
    units: dict[object, Unit] = {}
    names: dict[object, list[str]] = {}
    for matrix in stage.matrices:
        expert = _EXPERT.match(matrix.name)
        key: object = expert["layer"] if expert else matrix.fused.data_ptr()
        unit = units.setdefault(key, Unit(""))
        names.setdefault(key, []).append(matrix.name)
        unit.pattern = rf"{re.escape(expert['layer'])}\.\d+\..*" if expert else _alternatives(names[key])
        _add(unit, matrix, stage)
    return list(units.values())


def _alternatives(names: list[str]) -> str:
    return names[0] if len(names) == 1 else "|".join(map(re.escape, names))


def _add(unit: Unit, matrix: Matrix, stage: LayerStage) -> None:
    values = matrix.into.float()
    moments = stage.moments_of(matrix.fused)
    unit.weights += values.numel()
    for kind in STEPS:
        if kind == UNQUANTIZED:
            unit.bits[kind] += 16 * values.numel()
            continue
        form = OnLoadFormat(kind)
        try:
            form.check_cut((values.shape[0], values.shape[1]), slice(None), slice(None))
        except ValueError:  # a width without groups: 8 bits is the least
            unit.bits[kind], unit.errors[kind] = float("inf"), float("inf")
            continue
        rounded = form.allocate(values.shape, matrix.into.dtype, _zeros(values.device))
        form.round(matrix.into, rounded, slice(0, len(values)), slice(None))
        unit.bits[kind] += 8 * rounded.nbytes
        if moments is not None:  # None: no token was routed to this expert
            unit.errors[kind] += _output_squares(rounded.dequantize().float() - values, moments.mean)
    if moments is not None:
        unit.energy += _output_squares(values, moments.mean)


def _zeros(device: torch.device) -> Allocate:
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


def _output_squares(values: torch.Tensor, moments: torch.Tensor) -> float:
    """Mean over the inputs x of |values x|^2, from the mean of x x^T."""
    return max(0.0, float((values @ moments.to(values.device) * values).sum()))


def spend(units: Iterable[Unit], average: float, setting: str) -> None:
    """Give every unit its kind, so that the average bits a weight are at most `average`."""
    units = list(units)
    for unit in units:
        unit.kind = next(kind for kind in STEPS if unit.bits[kind] != float("inf"))
    total = sum(unit.weights for unit in units)
    spent = sum(unit.bits[unit.kind] for unit in units)
    if spent > average * total:
        raise ConfigError(
            f"quantization is {setting!r}, but int4 with its scales takes {spent / total:.2f} bits a weight here",
            "quantization",
            setting,
        )
    queue: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        unit = units[index]
        place = STEPS.index(unit.kind)
        if place + 1 < len(STEPS):
            better = STEPS[place + 1]
            gain = unit.error(unit.kind) - unit.error(better)
            heapq.heappush(queue, (-gain / (unit.bits[better] - unit.bits[unit.kind]), index))

    for index in range(len(units)):
        offer(index)
    while queue:
        _, index = heapq.heappop(queue)
        unit = units[index]
        better = STEPS[STEPS.index(unit.kind) + 1]
        cost = unit.bits[better] - unit.bits[unit.kind]
        if spent + cost <= average * total:
            spent += cost
            unit.kind = better
            offer(index)


def report(units: list[Unit]) -> str:
    """What was chosen, for people."""
    total = sum(unit.weights for unit in units)
    lines = [f"quantization by sensitivity: {sum(unit.bits[unit.kind] for unit in units) / total:.2f} bits a weight"]
    for kind in STEPS:
        chosen = [unit for unit in units if unit.kind == kind]
        if chosen:
            share = sum(unit.weights for unit in chosen) / total
            errors = [unit.error("int4") ** 0.5 for unit in chosen]
            lines.append(
                f"  {kind:>5}: {share:6.1%} of the weights, {len(chosen)} matrices; error of their outputs as int4 "
                f"{min(errors):.1%} to {max(errors):.1%}"
            )
    return "\n".join(lines)
