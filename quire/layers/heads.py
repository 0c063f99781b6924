"""How attention heads are dealt over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.layers.build_context import BuildContext


@dataclass(frozen=True)
class Heads:
    """The query and KV heads of this rank, as ranges of the whole model's heads."""

    query: range
    kv: range
    dim: int

    @classmethod
    def of(cls, build: BuildContext) -> Heads:
        """An equal share of both; where ranks outnumber KV heads, several ranks hold the same one."""
        config, ranks = build.config, build.ranks
        query = ranks.slice(config.num_heads, "attention heads")
        return cls(range(query.start, query.stop), _kv_heads(config.num_kv_heads, ranks), config.head_dim)

    @property
    def rows(self) -> slice:
        """The rows of a whole Q projection that this rank keeps."""
        return slice(self.query.start * self.dim, self.query.stop * self.dim)

    @property
    def kv_rows(self) -> slice:
        """The rows of a whole K or V projection that this rank keeps."""
        return slice(self.kv.start * self.dim, self.kv.stop * self.dim)


def _kv_heads(total: int, ranks: Ranks) -> range:
    if total >= ranks.tp_size:
        share = ranks.slice(total, "KV heads")
        return range(share.start, share.stop)
    if ranks.tp_size % total:
        raise ConfigError(
            f"{total} KV heads cannot be shared out evenly over {ranks.tp_size} tensor-parallel ranks; "
            f"use a multiple or a divisor of {total}",
            "tensor_parallel_size",
            ranks.tp_size,
        )
    head = ranks.tp_rank * total // ranks.tp_size
    return range(head, head + 1)
