"""Checkpoints in GGUF files: tensors dequantized while reading, or their blocks as they are."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.loading.file_checkpoint import REOPEN_AFTER
from quire.loading.gguf_config import delta_net_heads, num_layers
from quire.loading.gguf_families import kv_heads_of
from quire.loading.gguf_header import GGUFHeader, TensorInfo, block_sizes, read_header
from quire.loading.gguf_names import (
    NAMES,
    full_shape,
    halves_of,
    hf_name,
    is_transposed,
    layer_of,
    part_of,
    restored,
    row_order,
)
from quire.loading.weights import AnyTarget, AssemblyPart, StoredWeight

# Values dequantized at a time: enough to keep threads busy, few enough that temporaries do not raise the memory peak.
_CHUNK = 1 << 20
_PLAIN: Mapping[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}


class GGUFCheckpoint:
    """The tensors of a GGUF file under Hugging Face's names and in its layouts."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        family = self.header.architecture
        if family not in NAMES:
            raise UnsupportedModelError(
                f"{path}: GGUF architecture {family!r} is not supported; supported: {', '.join(sorted(NAMES))}"
            )
        heads = self.header.integer(f"{family}.attention.head_count", 0)
        kv_heads = max(kv_heads_of(self.header, heads), default=heads)
        delta_net = delta_net_heads(self.header)
        guesses = self.header.integer(f"{family}.nextn_predict_layers", 0)
        layers = num_layers(self.header) if guesses else math.inf
        file = self._file = _MappedFile(self.header)
        self._weights: dict[str, GGUFWeight | JoinedWeight] = {}
        parts: dict[str, dict[int, GGUFWeight]] = {}
        for info in self.header.tensors.values():
            splits = delta_net.split(info.name) if delta_net is not None and family == "qwen3next" else {}
            for own, rows in splits.items() if layer_of(info.name) < layers else ():
                if info.shape[0] != sum(map(len, splits.values())):
                    raise CheckpointError(f"{path}: {info.name!r} has {info.shape[0]} rows, not those of its heads")
                own_name = str(hf_name(family, own))
                self._weights[own_name] = GGUFWeight(own_name, (len(rows), info.shape[1]), info, rows, False, file)
            if splits:
                continue
            if (halves := halves_of(info.name)) and layer_of(info.name) < layers:
                for half, own in enumerate(halves):
                    fused = self._half(str(hf_name(family, own)), info, half)
                    self._weights[fused.name] = fused
                continue
            name = hf_name(family, info.name)
            if name is None or layer_of(info.name) >= layers:  # layers that only guess ahead
                continue
            flip = is_transposed(family, info.name)
            order = row_order(family, info.name, info.shape[0], heads, kv_heads)
            columns = None
            if delta_net is not None and family != "qwen3next":
                order = delta_net.output_order(info.name, info.shape[0])
                columns = delta_net.input_order(info.name)
            info = replace(info, shape=full_shape(info.name, info.shape))
            shape = info.shape[::-1] if flip else info.shape
            if name in self._weights:
                raise CheckpointError(f"{path}: two tensors are {name}: one is {info.name!r}")
            weight = GGUFWeight(name, shape, info, order, flip, file, restored(family, info.name), columns)
            if (part := part_of(family, info.name)) is None:
                self._weights[name] = weight
            else:
                parts.setdefault(part[0], {})[part[1]] = weight
        for name, found in parts.items():
            if name in self._weights:  # some files have the whole tensor too
                continue
            if len(found) != 2:
                raise CheckpointError(f"{path}: there is only {found.popitem()[1].info.name!r} for {name}")
            self._weights[name] = JoinedWeight(name, (found[0], found[1]), heads if family == "deepseek2" else 0)

    def _half(self, name: str, info: TensorInfo, half: int) -> GGUFWeight:
        """The first or second half of each expert's rows."""
        if len(info.shape) != 3 or info.shape[1] % 2:
            raise CheckpointError(f"{self.header.path}: {info.name!r} of shape {info.shape} is not gate and up in one")
        width = info.shape[1] // 2
        shape, part = (info.shape[0], width, info.shape[2]), slice(half * width, (half + 1) * width)
        return GGUFWeight(name, shape, info, None, False, self._file, part=part)

    def __iter__(self) -> Iterator[GGUFWeight | JoinedWeight]:
        return iter(self._weights.values())

    def __len__(self) -> int:
        return len(self._weights)

    def release(self) -> None:
        """Give back the pages that were read: they count as this process's memory. Tensors can still be read."""
        self._file.release()


class _MappedFile:
    """The mapped file. Its pages are released from time to time, so that they do not add up in this process."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path = header.path
        self._buffer = header.buffer
        self._touched = 0

    def release(self) -> None:
        """Release the pages that were read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED)
        self._touched = 0

    def rows(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes, [rows, bytes of a row]."""
        if self._touched > REOPEN_AFTER:
            self.release()
        self._touched += info.nbytes
        count = int(np.prod(info.shape[:-1], dtype=np.int64))
        return np.frombuffer(self._buffer, np.uint8, info.nbytes, info.start).reshape(count, -1)


@dataclass(frozen=True)
class GGUFWeight:
    """One tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    info: TensorInfo
    _order: np.ndarray | None = field(repr=False)
    _flip: bool = field(repr=False)
    _file: _MappedFile = field(repr=False)
    _restored: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    """Makes a vector's values of those in the file."""
    _columns: np.ndarray | None = field(default=None, repr=False)
    """For each column its column in the file, if their order differs."""
    part: slice | None = field(default=None, repr=False)
    """The rows of each expert that are this tensor's, if the file has two in one."""

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects; quantized tensors as float32. Only kept rows are dequantized."""
        whole = tuple(keep) + (slice(None),) * (len(self.shape) - len(keep))
        if self._flip:
            return self._read(whole[::-1]).t()
        if self._columns is not None:
            return self._read((*whole[:-1], slice(None)))[..., torch.from_numpy(self._columns[whole[-1]])]
        return self._read(whole)

    @property
    def dtype(self) -> torch.dtype:
        """What `read` returns."""
        return _PLAIN.get(self.info.kind, torch.float32)

    @property
    def encoding(self) -> str | None:
        """GGUF's name of the encoding, if it is one of few bits ("Q4_K")."""
        return None if self.info.kind in _PLAIN else _encoding_name(self.info.kind)

    @property
    def blocks(self) -> GGUFBlocks | None:
        """The tensor as the file's blocks; None: it is not in few bits, or the file has its transpose, or the order of
        its inputs differs."""
        if self.encoding is None or self._flip or self._columns is not None or len(self.shape) < 2:
            return None
        return GGUFBlocks(self)

    def forms_for(self, targets: Mapping[str, Sequence[AnyTarget]]) -> Sequence[StoredWeight]:
        """The tensor in the form that the model's targets need: as blocks if they fill a weight in few bits, stacked
        experts then one by one; otherwise as it is, to be dequantized."""
        blocks = self.blocks
        if blocks is None:
            return [self]
        if blocks.fills(targets):
            return [blocks]
        if len(self.shape) == 3:
            matrices = [GGUFBlocks(self, index) for index in range(self.shape[0])]
            if any(each.fills(targets) for each in matrices):
                return matrices
        return [self]

    def _read(self, keep: tuple[slice, ...]) -> torch.Tensor:
        shape = self.info.shape
        if len(shape) == 1:
            flat = self._unpack(self._file.rows(self.info), slice(None))[0]
            flat = flat if self._restored is None else self._restored(flat)
            return (flat if self._order is None else flat[torch.from_numpy(self._order)])[keep[0]]
        rows = self._rows(keep[:-1])
        values = self._unpack(rows.reshape(-1, rows.shape[-1]), keep[-1])
        return values.reshape(*rows.shape[:-1], values.shape[-1])

    def _rows(self, keep: tuple[slice, ...]) -> np.ndarray:
        """The kept rows, still quantized: [..., bytes]."""
        shape = self.info.shape
        rows = self._file.rows(self.info).reshape(*shape[:-1], -1)
        if self.part is not None:
            rows = rows[:, self.part]
        if self._order is not None:
            rows = rows[self._order[keep[0]]]
            keep = (slice(None), *keep[1:])
        # Otherwise a view of the file.
        return rows[keep]

    def _unpack(self, raw: np.ndarray, columns: slice) -> torch.Tensor:
        """Dequantize rows of bytes, the kept columns only (quantization blocks without any of them are skipped)."""
        kind, width = self.info.kind, self.info.shape[-1]
        block, block_bytes = block_sizes()[kind]
        first, last, step = columns.indices(width)
        last = max(first, last)
        lower, upper = first // block, -(-last // block)
        raw = raw[:, lower * block_bytes : upper * block_bytes]
        within = slice(first - lower * block, last - lower * block, step)
        values = torch.empty(len(raw), (upper - lower) * block, dtype=_PLAIN.get(kind, torch.float32))
        if values.numel():
            _fill(values, raw, kind, f"{self._file.path}: tensor {self.info.name!r}")
        return values[:, within]


@dataclass(frozen=True)
class JoinedWeight:
    """One tensor that a GGUF file has in two: the rows of the one, then those of the other."""

    name: str
    parts: tuple[GGUFWeight, GGUFWeight]
    heads: int = 0
    """If not 0, so it is for each head, and the file has the first part transposed: DeepSeek's `kv_b_proj`."""

    @property
    def shape(self) -> tuple[int, ...]:
        first, second = (part.shape for part in self.parts)
        if self.heads:
            return (self.heads * (first[-1] + second[-2]), second[-1])
        return (first[0] + second[0], *first[1:])

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects; quantized tensors as float32."""
        first, second = (part.read() for part in self.parts)
        if not self.heads:
            return torch.cat((first, second))[keep]
        keys, values = (part.reshape(self.heads, -1, part.shape[-1]) for part in (first, second))
        return torch.cat((keys.mT, values), dim=1).flatten(0, 1)[keep]

    @property
    def dtype(self) -> torch.dtype:
        """What `read` returns."""
        return torch.promote_types(self.parts[0].dtype, self.parts[1].dtype)

    @property
    def encoding(self) -> str | None:
        """GGUF's name of the encoding of its first part in few bits."""
        return self.parts[0].encoding or self.parts[1].encoding

    @property
    def info(self) -> TensorInfo:
        """The first part's: it has the encoding of the whole, where there are blocks of it."""
        return self.parts[0].info

    @property
    def blocks(self) -> GGUFBlocks | None:
        """The tensor as the file's blocks, if all its rows have one encoding."""
        first, second = self.parts
        is_one = first.info.kind == second.info.kind and first.blocks is not None and second.blocks is not None
        return GGUFBlocks(self) if is_one and not self.heads else None

    def forms_for(self, targets: Mapping[str, Sequence[AnyTarget]]) -> Sequence[StoredWeight]:
        """As blocks if the model's targets need them so; otherwise as it is, to be dequantized."""
        blocks = self.blocks
        return [self] if blocks is None or not blocks.fills(targets) else [blocks]

    def _rows(self, keep: tuple[slice, ...]) -> np.ndarray:
        """The kept rows, still quantized: [..., bytes]."""
        return np.concatenate([part._rows((slice(None),)) for part in self.parts])[keep]


@dataclass(frozen=True)
class GGUFBlocks:
    """A tensor in few bits as its blocks: bytes [..., rows, bytes of a row], rows in Hugging Face's order."""

    weight: GGUFWeight | JoinedWeight
    expert: int | None = None
    """One matrix of a stack, under the name it has where experts are stored one by one."""

    @property
    def name(self) -> str:
        name = self.weight.name
        return name if self.expert is None else name.replace(".experts.", f".experts.{self.expert}.")

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.weight.shape if self.expert is None else self.weight.shape[1:]
        block, block_bytes = block_sizes()[self.weight.info.kind]
        return (*shape[:-1], shape[-1] // block * block_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def fills(self, targets: Mapping[str, Sequence[AnyTarget]]) -> bool:
        """Whether there is a target for these bytes."""
        wanted = (target for target in targets.get(self.name, ()) if isinstance(target, AssemblyPart))
        return any(torch.uint8 in target.dtypes for target in wanted)

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The bytes, or the part that `keep` selects."""
        whole = tuple(keep) + (slice(None),) * (len(self.shape) - len(keep))
        if self.expert is None:
            rows = self.weight._rows(whole[:-1])
        else:
            rows = self.weight._rows((slice(self.expert, self.expert + 1), *whole[:-1]))[0]
        # Copied: the mapping is read-only, and its pages are released.
        return torch.from_numpy(rows[..., whole[-1]].copy())


def _encoding_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def _fill(out: torch.Tensor, raw: np.ndarray, kind: int, what: str) -> None:
    lines = max(1, _CHUNK // out.shape[1])
    starts = range(0, len(raw), lines)
    if kind in _PLAIN:
        target = out.view(torch.uint8).numpy()
        for start in starts:
            target[start : start + lines] = raw[start : start + lines]
        return
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    encoding, target = GGMLQuantizationType(kind), out.numpy()

    def one(start: int) -> None:
        target[start : start + lines] = dequantize(raw[start : start + lines], encoding)

    try:
        one(0)
        if len(starts) > 1:
            # numpy releases the GIL inside its loops, so threads work in parallel.
            with ThreadPoolExecutor(min(len(starts), torch.get_num_threads())) as threads:
                list(threads.map(one, starts[1:]))
    except NotImplementedError:
        raise CheckpointError(f"{what}: the encoding {encoding.name} cannot be dequantized") from None
