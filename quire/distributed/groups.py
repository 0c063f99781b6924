"""Which part of the model this process holds."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place: its tensor-parallel slice and its pipeline stage."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

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
        """This stage's range of layers; earlier stages take the remainder."""
        share, extra = divmod(total, self.pp_size)
        start = self.pp_rank * share + min(self.pp_rank, extra)
        return range(start, start + share + (self.pp_rank < extra))

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1
