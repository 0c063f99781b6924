"""Writes a model's checkpoint in few bits, layer by layer: rounded to nearest, or by GPTQ or AWQ."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import CheckpointError, ValidationError
from quire.loading.files import ModelFiles
from quire.loading.hub import find_model
from quire.loading.load import open_checkpoint
from quire.loading.model_config import ModelConfig, read_model_config
from quire.loading.progress import count_bar
from quire.loading.tokenizer import tokenizer_of
from quire.platforms import choose
from quire.quantization.awq import awq_candidates, output_error, search_scales, smooth_candidates
from quire.quantization.gptq import DAMPING, corrected
from quire.quantization.rounding import round_groups
from quire.quantization.writer import SHARD_BYTES, CheckpointWriter, WriteScheme
from quire.worker.building import DTYPES
from quire.worker.calibration import InputMoments, LayerStage, Matrix, Scaling, load_stage

ALGORITHMS = ("rtn", "gptq", "awq", "awq-gptq", "smoothquant", "smoothquant-gptq")
"""rtn: round to nearest. awq-gptq: AWQ's scales, then GPTQ."""
_DESCRIPTIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Calibration:
    """The text that GPTQ and AWQ measure inputs on, and how much of it."""

    text: str
    samples: int = 128
    """Sequences, spread evenly over the text."""
    length: int = 512
    """Tokens of a sequence."""


@dataclass(frozen=True)
class QuantizeSettings:
    """How a checkpoint is quantized."""

    scheme: WriteScheme
    algorithm: str = "rtn"
    calibration: Calibration | None = None
    ignore: Sequence[str] = ()
    """Modules that stay in 16 bits: names, or `re:` and an expression that matches from the start."""
    search: bool = False
    """With rtn: search each group's scale for the least squared error. GPTQ and AWQ always do."""
    damping: float = DAMPING
    """Of GPTQ."""
    by_importance: bool = True
    """GPTQ rounds columns with large inputs first."""
    correct: bool = False
    """GPTQ aims at the outputs of the unquantized model, so that layers make up for the errors of those before."""
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValidationError(f"algorithm {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}", "algorithm")
        if self.algorithm == "rtn":
            return
        scaling = self.algorithm.partition("-")[0]
        if scaling == "awq" and not self.scheme.is_grouped:
            raise ValidationError(
                f"awq is for integers in groups (W4A16, W4A16_ASYM, W8A16), not for {self.scheme.name}: use gptq",
                "algorithm",
                self.algorithm,
            )
        if scaling == "smoothquant" and self.scheme.inputs is None:
            raise ValidationError(
                f"smoothquant is for schemes that round activations (W8A8, FP8), not for {self.scheme.name}: use gptq",
                "algorithm",
                self.algorithm,
            )
        if self.calibration is None:
            raise ValidationError(f"{self.algorithm} needs calibration text", "calibration")


@dataclass
class QuantizeReport:
    """What was written."""

    folder: Path
    dtype: str
    """Of what stays unquantized."""
    matrices: int = 0
    num_bytes: int = 0
    ignored: list[str] = field(default_factory=list)
    calibration_tokens: int = 0
    squared_error: float = 0.0
    squares: float = 0.0

    @property
    def relative_error(self) -> float:
        """Root mean square of the matrices' errors, relative to that of their values."""
        return (self.squared_error / self.squares) ** 0.5 if self.squares else 0.0


def quantize_checkpoint(config: EngineConfig, output: Path, settings: QuantizeSettings) -> QuantizeReport:
    """Write the configured model to the folder `output`, which must be empty or not exist.

    `config.dtype` is the dtype of what stays in 16 bits, and of scales; auto: the checkpoint's, bfloat16 for a
    quantized GGUF file. Only one layer is in memory at a time.
    """
    files = find_model(config)
    model = read_model_config(files, config.hf_overrides)
    _refuse_quantized(files, model)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValidationError(f"{output} exists and is not an empty folder", "output", str(output))
    stored = _stored_dtype(config, model)
    platform = choose(config.device)
    fast = platform.device.type != "cpu" or (stored is torch.bfloat16 and platform.has_bfloat16)
    computed = str(stored).removeprefix("torch.") if fast and settings.calibration else "float32"
    build = dataclasses.replace(config, dtype=computed, enforce_eager=True)
    sequences = _sequences(build, files, model, settings.calibration)
    length = max(map(len, sequences), default=16)
    checkpoint = open_checkpoint(files, config.load_format)
    output.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(output, settings.shard_bytes)
    name = str(stored).removeprefix("torch.")
    report = QuantizeReport(output, name, calibration_tokens=sum(map(len, sequences)))
    job = _Job(settings, stored, writer, report)
    hidden: list[torch.Tensor] | None = None
    exact: list[torch.Tensor] | None = None
    consumed: set[str] = set()
    with count_bar(f"quantizing {config.model}", model.num_layers) as show:
        for layer in range(model.num_layers):
            stage = load_stage(build, files, model, platform, checkpoint, layer, length)
            if sequences:
                outputs = stage.observe(sequences, hidden, exact)
                exact = outputs if settings.correct else None
            job.quantize(stage)
            consumed.update(stage.consumed)
            if sequences and layer + 1 < model.num_layers:
                hidden = stage.run(sequences, hidden)
            show(layer + 1)
    for weight in checkpoint:  # what no layer needs: old checkpoints have a few such tensors
        if weight.name not in writer.names | consumed:
            job.keep(weight.name, weight.read())
    job.check_ignored()
    writer.close()
    _copy_files(files, output)
    if files.gguf is not None:
        tokenizer_of(config, files).save_pretrained(output)
    _write_config(output, model, stored, settings, job.report.ignored)
    job.report.num_bytes = writer.num_bytes
    return job.report


def _refuse_quantized(files: ModelFiles, model: ModelConfig) -> None:
    found = model.raw.get("quantization_config") or model.raw.get("compression_config")
    name = "a method that its config.json does not name"
    if isinstance(found, dict):
        name = f"quant_method {found.get('quant_method', 'unknown')!r}"
    elif (path := next((path for each in _DESCRIPTIONS if (path := files.file(each))), None)) is not None:
        name = path.name
    elif not found:
        return
    raise CheckpointError(f"{files.name} is quantized already ({name}): quantize the checkpoint it was made from")


def _stored_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return DTYPES.get(model.dtype or "bfloat16", torch.bfloat16)


def _sequences(
    config: EngineConfig, files: ModelFiles, model: ModelConfig, calibration: Calibration | None
) -> list[torch.Tensor]:
    """The calibration text's tokens, in sequences spread evenly over it."""
    if calibration is None:
        return []
    tokens = tokenizer_of(config, files)(calibration.text, verbose=False)["input_ids"]
    length = min(calibration.length, model.max_position, len(tokens))
    if length < 2:
        raise ValidationError(f"the calibration text has {len(tokens)} tokens", "calibration")
    count = min(calibration.samples, len(tokens) // length)
    starts = [round(index * (len(tokens) - length) / max(1, count - 1)) for index in range(count)]
    return [torch.tensor(tokens[start : start + length]) for start in starts]


class _Job:
    """Quantizes layers and writes their tensors."""

    def __init__(
        self, settings: QuantizeSettings, stored: torch.dtype, writer: CheckpointWriter, report: QuantizeReport
    ) -> None:
        self.report = report
        self._settings, self._scheme = settings, settings.scheme
        self._stored, self._writer = stored, writer
        self._unmatched = set(settings.ignore)

    @torch.no_grad()
    def quantize(self, stage: LayerStage) -> None:
        """Choose codes for the layer's matrices, write them, and give the layer the values that they mean."""
        chosen = [matrix for matrix in stage.matrices if not self._is_ignored(matrix.name)]
        for matrix in chosen:
            self._scheme.check(matrix.name, matrix.into.shape)
            if not bool(matrix.into.isfinite().all()):
                raise CheckpointError(f"{matrix.name}.weight has values that are not finite")
        if self._settings.algorithm.startswith(("awq", "smoothquant")):
            self._scale(stage, {matrix.fused.data_ptr() for matrix in chosen})
        self.report.ignored += stage.unquantized
        # Of whole fused matrices, before their parts are rounded one by one.
        peaks = {matrix.fused.data_ptr(): matrix.fused.abs().amax() for matrix in chosen}
        names = {matrix.name for matrix in chosen}
        for matrix in stage.matrices:
            if matrix.name in names:
                self._quantize_one(stage, matrix, peaks[matrix.fused.data_ptr()])
            else:
                self.report.ignored.append(matrix.name)
                self.keep(f"{matrix.name}.weight", matrix.read())
        for other in stage.others:
            if other.name not in self._writer.names:  # a tied head is the embedding again
                self.keep(other.name, other.read())

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor that stays in 16 bits."""
        self._writer.add(name, tensor.to(self._stored) if tensor.is_floating_point() else tensor)

    def check_ignored(self) -> None:
        """Refuse patterns that have matched no matrix: a misspelt one would quantize what it was to spare."""
        if self._unmatched:
            raise ValidationError(
                f"no matrix is called {', '.join(sorted(self._unmatched))}; names are those of the checkpoint, such as "
                "model.layers.0.mlp.down_proj, or re:.*down_proj",
                "ignore",
            )

    def _is_ignored(self, name: str) -> bool:
        matching = [
            pattern
            for pattern in self._settings.ignore
            if (re.match(pattern[3:], name) if pattern.startswith("re:") else pattern == name)
        ]
        self._unmatched.difference_update(matching)
        return bool(matching)

    def _scale(self, stage: LayerStage, quantized: set[int]) -> None:
        """Move scales between layers, where that makes the outputs err less."""
        for scaling in stage.scalings():
            moments = stage.moments_of(scaling.readers)
            if moments is None or not moments.count or scaling.readers.data_ptr() not in quantized:
                continue
            weight = scaling.readers.float()
            search = self._search_smooth if self._settings.algorithm.startswith("smoothquant") else self._search_awq
            if (scales := search(weight, moments, scaling)) is not None:
                moments.scale(scaling.apply(scales, self._stored))

    def _search_awq(self, weight: torch.Tensor, moments: InputMoments, scaling: Scaling) -> torch.Tensor | None:
        mean = moments.mean

        def error(scales: torch.Tensor | None) -> float:
            if scales is None:
                return output_error(self._rounded(weight) - weight, mean)
            return output_error(self._rounded(weight * scales) / scales - weight, mean)

        return search_scales(awq_candidates(scaling.tie(mean.diagonal()).clamp_min(0).sqrt()), error)

    def _search_smooth(self, weight: torch.Tensor, moments: InputMoments, scaling: Scaling) -> torch.Tensor | None:
        """By the outputs of a sample of inputs, which are rounded too."""
        x = moments.sample
        exact = x @ weight.t()

        def error(scales: torch.Tensor | None) -> float:
            given, held = (x, weight) if scales is None else (x / scales, weight * scales)
            return float((self._scheme.restore_input(given) @ self._rounded(held).t() - exact).square().sum())

        peaks = scaling.tie(moments.peaks), scaling.tie(weight.abs().amax(0))
        return search_scales(smooth_candidates(*peaks), error)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return self._scheme.restore(self._scheme.round(weight, self._stored))

    def _quantize_one(self, stage: LayerStage, matrix: Matrix, peak: torch.Tensor) -> None:
        weight = matrix.read()
        scheme, settings = self._scheme, self._settings
        moments = stage.moments_of(matrix.fused)
        if moments is None or not moments.count or settings.algorithm in ("rtn", "smoothquant"):
            tensors = scheme.round(weight, self._stored, peak, settings.search)
        elif settings.algorithm.endswith("gptq"):
            aim = weight
            if moments.cross is not None:
                aim = corrected(weight, moments.mean, moments.cross / moments.count, settings.damping)
            tensors = scheme.round_by_gptq(
                aim, moments.mean, self._stored, peak, settings.damping, settings.by_importance
            )
        else:
            assert scheme.group is not None
            rounded = round_groups(
                weight, scheme.bits, scheme.group, scheme.symmetric, self._stored, True, moments.mean.diagonal()
            )
            tensors = scheme.pack(rounded, weight.shape)
        for name, tensor in tensors.items():
            self._writer.add(f"{matrix.name}.{name}", tensor)
        restored = scheme.restore(tensors)
        matrix.write(restored)
        self.report.matrices += 1
        self.report.squared_error += float((restored - weight).double().square().sum())
        self.report.squares += float(weight.double().square().sum())


def _copy_files(files: ModelFiles, output: Path) -> None:
    """The files beside the weights: tokenizer, generation config, license, code."""
    if files.folder is None:
        return
    for path in sorted(files.folder.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, output / path.name)


def _write_config(
    output: Path, model: ModelConfig, stored: torch.dtype, settings: QuantizeSettings, ignored: Sequence[str]
) -> None:
    raw: dict[str, Any] = {key: value for key, value in model.raw.items() if value is not None}
    raw.pop("torch_dtype", None)
    raw["dtype"] = str(stored).removeprefix("torch.")
    ordered = settings.by_importance and settings.algorithm.endswith("gptq")
    raw["quantization_config"] = settings.scheme.describe(["lm_head", *dict.fromkeys(ignored)], ordered)
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
