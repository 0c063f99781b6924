"""A custom block store: KV blocks below host memory, compressed, one file each."""

import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from quire import LLM, SamplingParams
from quire.kvcache.offload.block_store import BlockStore, StoreStats


class CompressedFiles(BlockStore):
    """Keeps blocks until it is full. The path has the fingerprint of the model: other models find nothing here."""

    def __init__(self, folder: Path, block_bytes: int, capacity: int) -> None:
        self.folder, self.block_bytes, self.capacity = folder, block_bytes, capacity
        self.sizes = {bytes.fromhex(path.name): path.stat().st_size for path in folder.iterdir()}

    @classmethod
    def open(cls, folder: Path, fingerprint: bytes, block_bytes: int, capacity: int) -> "CompressedFiles":
        (own := folder / fingerprint.hex()[:32]).mkdir(parents=True, exist_ok=True)
        return cls(own, block_bytes, capacity)

    def has(self, key: bytes) -> bool:
        return key in self.sizes

    def read(self, key: bytes, into: memoryview) -> bool:
        into[:] = zlib.decompress((self.folder / key.hex()).read_bytes())  # a store that raises has lost the block
        return True

    def write(self, key: bytes, payload: memoryview) -> bool:
        data = zlib.compress(payload, level=1)
        if fits := self.stats().used_bytes + len(data) <= self.capacity:
            (self.folder / key.hex()).write_bytes(data)
            self.sizes[key] = len(data)
        return fits

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self.sizes.pop(key, 0):
                (self.folder / key.hex()).unlink()

    def stats(self) -> StoreStats:
        used = sum(list(self.sizes.values()))
        return StoreStats(blocks=len(self.sizes), block_bytes=self.block_bytes, used_bytes=used, capacity=self.capacity)


def main(max_tokens: int = 24, **settings) -> int:
    settings["kv_store"] = f"{__name__}.CompressedFiles"
    with tempfile.TemporaryDirectory() as settings["kv_disk"], LLM(**settings, swap_space=0.25) as llm:
        session = llm.sessions.create("agent-7", "Once upon a time there was a lighthouse keeper who")
        session.generate(SamplingParams(temperature=0, max_tokens=max_tokens))
        session.suspend()  # its KV goes to the store
        stats = llm.llm_engine.core.scheduler.tiers.store.stats()
    print(f"{stats.blocks} blocks of {stats.block_bytes} bytes, {stats.used_bytes} bytes in all")
    return stats.blocks


if __name__ == "__main__":
    main()
