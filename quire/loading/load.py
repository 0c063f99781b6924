"""Loads a checkpoint into a model: reads the part of each tensor that this rank keeps once, and copies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import torch

from quire.config import LOAD_FORMATS
from quire.errors import CheckpointError, ConfigError, ModelNotFoundError
from quire.loading.files import ModelFiles
from quire.loading.progress import bytes_bar
from quire.loading.readers import LoadPiece, copy_part, read_pieces, split_tensor
from quire.loading.weights import AnyTarget, Assembly, AssemblyPart, Checkpoint, StoredWeight, Target, match_layouts

_SHOWN = 10


def open_checkpoint(
    files: ModelFiles,
    load_format: str = "auto",
    *,
    targets: Mapping[str, Sequence[AnyTarget]] | None = None,
    seed: int = 0,
) -> Checkpoint:
    """The model's checkpoint. `targets` and `seed` are for the dummy format, which generates the model's tensors."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}", "load_format", load_format
        )
    kind = files.kind if load_format == "auto" else load_format
    if kind is None:
        raise ModelNotFoundError(
            f"{files.path} has no weights: no .safetensors, .bin or .gguf file was found "
            "(load_format='dummy' runs with random ones)"
        )
    if kind == "dummy":
        from quire.loading.dummy import DummyCheckpoint

        if targets is None:
            raise ValueError("the dummy format needs the model's targets")
        return DummyCheckpoint(targets, seed)
    if kind == "gguf":
        from quire.loading.gguf import GGUFCheckpoint

        if files.gguf is None:
            raise ModelNotFoundError(f"{files.path} is a folder of {files.kind} weights, not a GGUF file")
        return GGUFCheckpoint(files.gguf)
    if not files.weight_files(kind) and files.weight_index(kind) is None:
        raise ModelNotFoundError(f"{files.path} has no {kind} weights (it has: {files.kind or 'none'})")
    from quire.loading.file_checkpoint import FileCheckpoint, find_shards

    if kind == "safetensors":
        from quire.loading.safetensors import SafetensorsFile

        return FileCheckpoint(find_shards(files, kind), SafetensorsFile)
    from quire.loading.torch_bin import TorchFile

    return FileCheckpoint(find_shards(files, kind), TorchFile)


@torch.no_grad()
def load_weights(
    targets: Mapping[str, Sequence[AnyTarget]],
    ignores: Callable[[str], bool],
    checkpoint: Checkpoint,
    progress: bool = True,
) -> None:
    """Copy every tensor of the checkpoint to its targets.

    Names and shapes are compared before anything is read; one error lists all mismatches. `ignores` says which
    tensors of the checkpoint the model does not need.
    """
    matched, misfits = compare(targets, ignores, checkpoint)
    misfits.raise_if_any()
    assemblies: dict[Assembly, dict[str, tuple[StoredWeight, AssemblyPart]]] = {}
    copies: list[tuple[StoredWeight, list[Target]]] = []
    for weight, wanted in matched:
        copies.append((weight, [target for target in wanted if isinstance(target, Target)]))
        for part in wanted:
            if isinstance(part, AssemblyPart):
                assemblies.setdefault(part.assembly, {})[part.key] = (weight, part)
    total = sum(target.into.nbytes for _, wanted in copies for target in wanted)
    total += sum(assembly.nbytes for assembly in assemblies)
    done = 0
    with bytes_bar("loading weights", total, progress) as show:

        def count(size: int) -> None:
            nonlocal done
            done += size
            show(done)

        pieces: list[LoadPiece] = []
        for weight, copied in copies:
            stored = getattr(weight, "stored", None)
            if stored is None:
                _copy(weight, copied, count)
            else:
                pieces.extend(split_tensor(stored, copied))
        read_pieces(pieces, count)
        _check_codes(copies)
        _assemble(assemblies, count)


def match_checkpoint(
    targets: Mapping[str, Sequence[AnyTarget]], ignores: Callable[[str], bool], checkpoint: Checkpoint
) -> list[tuple[StoredWeight, Sequence[AnyTarget]]]:
    """The checkpoint's tensors that the model needs, each with its targets. Raises like `load_weights`."""
    matched, misfits = compare(targets, ignores, checkpoint)
    misfits.raise_if_any()
    return matched


def _check_codes(copies: Sequence[tuple[StoredWeight, Sequence[Target]]]) -> None:
    """Refuse 8-bit floats that are NaN, in tensors that were copied as they are."""

    def has_nan(codes: torch.Tensor) -> torch.Tensor:
        return ((codes.view(torch.uint8) & 0x7F) == 0x7F).any()

    coded = [(weight, into.into) for weight, wanted in copies for into in wanted if into.into.dtype in _FP8]
    # Stacks of experts are checked whole, and the device is waited for once.
    whole = {into.untyped_storage().data_ptr(): into if into._base is None else into._base for _, into in coded}
    if whole and bool(torch.stack([has_nan(codes) for codes in whole.values()]).any()):
        name = next(weight.name for weight, into in coded if has_nan(into.contiguous()))
        raise CheckpointError(f"the tensor {name!r} has NaN values")


_FP8 = (torch.float8_e4m3fn,)
_ASSEMBLERS = 8
"""Threads that read and re-lay weights in few bits."""


def _assemble(
    assemblies: Mapping[Assembly, Mapping[str, tuple[StoredWeight, AssemblyPart]]], count: Callable[[int], None]
) -> None:
    """Read the parts of every assembly and place them. The first error stops the rest."""

    @torch.no_grad()
    def one(assembly: Assembly) -> int:
        read = {}
        for key, (weight, part) in assemblies[assembly].items():
            values = weight.read(part.keep_of(weight.shape) or ())
            if values.dtype not in part.dtypes:
                raise CheckpointError(
                    f"the tensor {weight.name!r} is {_words((values.dtype,))}, not {_words(part.dtypes)}"
                )
            read[key] = values.to(assembly.device)
        try:
            assembly.place(read)
        except CheckpointError as error:
            first = next(iter(assemblies[assembly].values()))[0].name
            raise CheckpointError(f"{first.rpartition('.')[0]}: {error}") from error
        return assembly.nbytes

    # On a CPU torch's own threads do the work; on a GPU many threads keep disk and device busy.
    on_gpu = any(assembly.device.type == "cuda" for assembly in assemblies)
    with ThreadPoolExecutor(_ASSEMBLERS if on_gpu else 1, "assemble") as threads:
        try:
            for future in as_completed([threads.submit(one, assembly) for assembly in assemblies]):
                count(future.result())
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _copy(weight: StoredWeight, wanted: Sequence[Target], count: Callable[[int], None]) -> None:
    """Copy a tensor that can be read only through `Weight.read`."""
    part, part_keep = None, None
    for target in wanted:
        if part is None or target.keep != part_keep:
            part = None  # Free the old part before the next is read.
            part, part_keep = weight.read(target.keep), target.keep
        copy_part(part, target, weight.name)
        count(target.into.nbytes)


@dataclass
class Misfits:
    """Where a checkpoint's tensors are not those that the model needs."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)

    @property
    def described(self) -> list[str]:
        """A paragraph for each kind that there is."""
        parts = [
            self._part(self.missing, "missing from the checkpoint"),
            self._part(self.unexpected, "in the checkpoint but unknown to the model"),
            self._part(self.wrong_shape, "of a different shape than in the model"),
            self._part(self.wrong_dtype, "of another type than config.json says"),
        ]
        return [part for part in parts if part]

    def raise_if_any(self) -> None:
        if found := self.described:
            raise CheckpointError(
                "the checkpoint does not fit the model (is config.json the one that belongs to these weights?):\n"
                + "\n".join(found)
            )

    @staticmethod
    def _part(names: list[str], what: str) -> str:
        if not names:
            return ""
        listed = "".join(f"\n  - {name}" for name in names[:_SHOWN])
        rest = f"\n  - … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}:{listed}{rest}"


def compare(
    targets: Mapping[str, Sequence[AnyTarget]], ignores: Callable[[str], bool], checkpoint: Checkpoint
) -> tuple[list[tuple[StoredWeight, Sequence[AnyTarget]]], Misfits]:
    """(the checkpoint's tensors with their targets, what does not fit); by names, shapes and dtypes alone."""
    weights = [form for weight in checkpoint for form in _forms(weight, targets)]
    names = [weight.name for weight in weights]
    lacking, extra = _prefixes(targets, names)
    has_nested = any(name.startswith(_NESTED) for name in targets)
    nesting = "" if has_nested else next((each for each in _NESTED if any(n.startswith(each) for n in names)), "")
    candidates = {*names, *(lacking + name for name in names), *(name.removeprefix(extra) for name in names)}
    candidates |= {name.replace(nesting, "model.", 1) for name in names if nesting}
    targets = match_layouts(targets, candidates)

    def rename(name: str) -> str:
        name = name.replace(nesting, "model.", 1) if nesting else name
        return lacking + name if lacking and lacking + name in targets else name.removeprefix(extra)

    matched: list[tuple[StoredWeight, Sequence[AnyTarget]]] = []
    misfits, seen = Misfits(), set()
    for weight in weights:
        name = weight.name if weight.name in targets else rename(weight.name)
        if name not in targets:
            if not (ignores(weight.name) or ignores(name)):
                misfits.unexpected.append(f"{weight.name} {tuple(weight.shape)}")
            continue
        seen.add(name)
        found = targets[name]
        wanted = [each.for_shape(weight.shape) if isinstance(each, Target) else each for each in found]
        wrong = [target.shape for target in wanted if not _fits(target, weight.shape)]
        if wrong:
            misfits.wrong_shape.append(
                f"{name}: {tuple(weight.shape)} in the checkpoint, {tuple(wrong[0])} in the model"
            )
            continue
        dtype: torch.dtype | None = getattr(weight, "dtype", None)
        expected = next((types for types in map(_types, wanted) if dtype is not None and dtype not in types), None)
        if expected is not None and dtype is not None:
            misfits.wrong_dtype.append(f"{name}: {_words((dtype,))} in the checkpoint, {_words(expected)} expected")
        else:
            matched.append((weight, wanted))
    misfits.missing = [
        f"{name} {tuple(each[0].shape)}"
        for name, each in targets.items()
        if each and name not in seen and not all(isinstance(part, AssemblyPart) and part.optional for part in each)
    ]
    return matched, misfits


_NESTED = ("model.language_model.", "model.text_model.")
"""What files of models that also take images have in place of `model.`."""
_PLAIN_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _types(target: AnyTarget) -> tuple[torch.dtype, ...]:
    """What the tensor may be stored as. A plain weight may be converted, but not from codes; codes may not."""
    if isinstance(target, AssemblyPart):
        return target.dtypes
    own = target.into.dtype
    return (own,) if own.itemsize == 1 else (own, *_PLAIN_TYPES)


def _words(types: Sequence[torch.dtype]) -> str:
    return " or ".join(dict.fromkeys(str(each).removeprefix("torch.") for each in types))


def _forms(weight: StoredWeight, targets: Mapping[str, Sequence[AnyTarget]]) -> Sequence[StoredWeight]:
    """The tensor as its targets need it, where a checkpoint can read it in several forms."""
    choose = getattr(weight, "forms_for", None)
    return [weight] if choose is None else choose(targets)


def _fits(target: AnyTarget, shape: tuple[int, ...]) -> bool:
    if isinstance(target, AssemblyPart):
        return target.keep_of(shape) is not None
    return tuple(target.shape) == tuple(shape)


def _prefixes(targets: Iterable[str], names: list[str]) -> tuple[str, str]:
    """The prefix that the checkpoint's names lack, and the prefix that they have in addition; at most one is set.

    Checkpoints of a bare base model have `layers.0…` instead of `model.layers.0…`. A prefix is used only if no name
    matches without the change and most match with it.
    """
    wanted, present = set(targets), set(names)

    def lacks(prefix: str) -> bool:
        under = {name for name in wanted if name.startswith(prefix)}
        return not under & present and 2 * sum(name[len(prefix) :] in present for name in under) > len(under)

    def has_more(prefix: str) -> bool:
        stripped = {name[len(prefix) :] for name in names if name.startswith(prefix)}
        return not wanted & present and 2 * len(stripped & wanted) > len(wanted)

    lacking = next(filter(lacks, _first_parts(wanted)), "")
    return lacking, "" if lacking else next(filter(has_more, _first_parts(names)), "")


def _first_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.split(".", 1)[0] + "." for name in names if "." in name})
