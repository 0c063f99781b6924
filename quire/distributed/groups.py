"""Tensor-parallel and pipeline ranks: which part of the model this process holds."""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.errors import ConfigError


def shares_gpu() -> bool:
    """Whether several engines or ranks may use the same GPU (QUIRE_SHARE_GPU=1)."""
    return os.environ.get("QUIRE_SHARE_GPU") == "1"


@dataclass(frozen=True)
class Ranks:
    """This process's tensor-parallel slice and pipeline stage."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    stage_layers: tuple[int, ...] = ()
    """Number of layers of each stage; empty: spread evenly."""

    @classmethod
    def at(cls, rank: int, tp_size: int, pp_size: int = 1, stage_layers: tuple[int, ...] = ()) -> Ranks:
        """From a global rank: ranks of a stage are consecutive."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size, stage_layers)

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.tp_size

    def split(self, total: int, what: str) -> int:
        """This rank's share of `total` equal parts."""
        if total % self.tp_size:
            fitting = [str(size) for size in range(1, min(total, 64) + 1) if total % size == 0]
            raise ConfigError(
                f"{total} {what} cannot be split over {self.tp_size} tensor-parallel ranks; sizes that divide them: "
                f"{', '.join(fitting)}",
                "tensor_parallel_size",
                self.tp_size,
            )
        return total // self.tp_size

    def slice(self, total: int, what: str) -> slice:
        """This rank's range of `total` equal parts."""
        share = self.split(total, what)
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)

    def layers(self, total: int) -> range:
        """This stage's range of layers."""
        counts = self.stage_layers or spread(total, self.pp_size)
        if sum(counts) != total or len(counts) != self.pp_size:
            raise ConfigError(
                f"pipeline_layers ({', '.join(map(str, counts))}) must be {self.pp_size} numbers that sum up to the "
                f"model's {total} layers; they sum up to {sum(counts)}",
                "pipeline_layers",
                counts,
            )
        start = sum(counts[: self.pp_rank])
        return range(start, start + counts[self.pp_rank])

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible. Extra layers go to the middle stages, then to the first, which has the
    embedding too, never to the last, which has the head and samples."""
    share, extra = divmod(layers, stages)
    larger = [*range(1, stages - 1), 0][:extra]
    return tuple(share + (stage in larger) for stage in range(stages))
