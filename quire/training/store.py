"""What the target computed for the training sequences, in shards on disk: features, and its likeliest next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

TOP_TOKENS = 32
"""Next tokens whose probabilities are kept for each position."""
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class TokenSequence:
    """Tokens to train on."""

    tokens: np.ndarray
    """int32"""
    learned: np.ndarray
    """bool: the tokens that the head should learn to propose: those of answers, not of questions."""

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> TokenSequence:
        """Its first tokens."""
        return TokenSequence(self.tokens[:length], self.learned[:length])


def write_sequences(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Write them to one file."""
    empty = [np.empty(0, np.int32)]
    tokens = np.concatenate([*empty, *(each.tokens for each in sequences)]).astype(np.int32)
    learned = np.concatenate([*empty, *(each.learned for each in sequences)]).astype(np.uint8)
    lengths = np.array([len(each) for each in sequences], np.int64)
    arrays = {"tokens": tokens, "learned": learned, "lengths": lengths}
    scratch = path.with_suffix(".part")
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, scratch)
    scratch.replace(path)


def read_sequences(path: Path) -> list[TokenSequence]:
    """The sequences of a file."""
    arrays = {name: value.numpy() for name, value in load_file(path).items()}
    ends = np.cumsum(arrays["lengths"])
    return [
        TokenSequence(arrays["tokens"][end - count : end], arrays["learned"][end - count : end].astype(bool))
        for end, count in zip(ends, arrays["lengths"], strict=True)
    ]


@dataclass
class TargetRows:
    """What the target computed for some tokens, one row each."""

    features: torch.Tensor
    """[tokens, features * hidden] bfloat16: the residual stream that entered the feature layers."""
    ids: torch.Tensor
    """[tokens, TOP_TOKENS] int32: the likeliest next tokens, likeliest first."""
    probabilities: torch.Tensor
    """[tokens, TOP_TOKENS] float16; all 0 where the next token is not to be learned."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"features": self.features, "ids": self.ids, "probabilities": self.probabilities}

    @classmethod
    def joined(cls, parts: Sequence[TargetRows]) -> TargetRows:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensors()))


class FeatureWriter:
    """Writes shards of whole sequences. Those already in the folder are kept: `count` sequences are done."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard_bytes = folder, shard_bytes
        self._parts: list[TargetRows] = []
        self._bytes = self._waiting = 0
        self.count = sum(_count_of(path) for path in _shards(folder))

    def add(self, rows: TargetRows, sequences: int) -> None:
        """The rows of this many sequences, on the host."""
        self._parts.append(rows)
        self._waiting += sequences
        self._bytes += sum(value.nbytes for value in rows.tensors().values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if not self._parts:
            return
        name = f"features-{self.count:08d}-{self._waiting:08d}.safetensors"
        scratch = self._folder / "features.part"
        save_file(TargetRows.joined(self._parts).tensors(), scratch)
        scratch.replace(self._folder / name)
        self.count += self._waiting
        self._parts, self._bytes, self._waiting = [], 0, 0


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("features-*.safetensors"))


def _count_of(shard: Path) -> int:
    return int(shard.stem.split("-")[2])


class FeatureStore:
    """The sequences with what the target computed for them. Shards stay on disk unless they fit on the device."""

    def __init__(self, folder: Path, sequences: Sequence[TokenSequence], device: torch.device, room: int) -> None:
        """`room`: bytes of the device that they may take."""
        self.device = device
        paths = _shards(folder)
        self.num_bytes = sum(path.stat().st_size for path in paths)
        place = device if self.num_bytes <= room else torch.device("cpu")
        self._shards = [TargetRows(**load_file(path, device=str(place))) for path in paths]
        self.sequences = list(sequences[: sum(_count_of(path) for path in paths)])
        self._places: list[tuple[int, int]] = []
        first = 0
        for index, path in enumerate(paths):
            offset = 0
            for sequence in self.sequences[first : first + _count_of(path)]:
                self._places.append((index, offset))
                offset += len(sequence)
            first += _count_of(path)

    def __len__(self) -> int:
        return len(self.sequences)

    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self.sequences], np.int64)

    def rows(self, index: int) -> TargetRows:
        """What the target computed for a sequence."""
        shard, offset = self._places[index]
        part = slice(offset, offset + len(self.sequences[index]))
        return TargetRows(*(value[part] for value in self._shards[shard].tensors().values()))

    def feature_scale(self, sample: int = 256) -> torch.Tensor:
        """[features * hidden]: root mean square of each feature, over some sequences. The first token of a sequence is
        left out: many models have values there that are a thousand times as large."""
        chosen = np.linspace(0, len(self) - 1, min(sample, len(self))).astype(int)
        total, count = None, 0
        for index in chosen:
            wide = self.rows(int(index)).features[1:].float()
            squares = wide.square().sum(0)
            total = squares if total is None else total + squares
            count += len(wide)
        assert total is not None
        return (total / max(1, count)).sqrt()

    def batch(self, indices: Sequence[int], steps: int) -> Batch:
        """Some sequences, padded to the longest."""
        parts = [self.rows(index) for index in indices]
        tokens = [torch.from_numpy(self.sequences[index].tokens.astype(np.int64)) for index in indices]

        def padded(rows: list[torch.Tensor], more: int) -> torch.Tensor:
            found = pad_sequence(rows, batch_first=True)
            return F.pad(found, (0, 0, 0, more) if found.ndim == 3 else (0, more)).to(self.device)

        return Batch(
            padded(tokens, steps),
            padded([part.features for part in parts], 0),
            padded([part.ids for part in parts], steps),
            padded([part.probabilities for part in parts], steps),
        )


@dataclass
class Batch:
    """Sequences of `length` tokens, padded; tokens, ids and probabilities have more zeros, for the steps beyond."""

    tokens: torch.Tensor
    """[batch, length + steps] int64"""
    features: torch.Tensor
    """[batch, length, features * hidden]"""
    ids: torch.Tensor
    """[batch, length + steps, TOP_TOKENS]"""
    probabilities: torch.Tensor

    @property
    def length(self) -> int:
        return self.features.shape[1]
