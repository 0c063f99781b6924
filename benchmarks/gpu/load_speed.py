"""How fast weights get from the disk into a model, beside how fast the disk alone is read.

    python benchmarks/gpu/load_speed.py FOLDER                              # Llama-3.1-8B's shape, 16 GB, onto a GPU
    python benchmarks/gpu/load_speed.py FOLDER --layers 2 --device cpu      # small, anywhere

The checkpoint (random bfloat16 numbers in four safetensors files) is written to FOLDER if it is not there. "Cold" is
after the files were dropped from the page cache; the share still cached is printed, and should be 0%. The disk's own
speed is that of threads that read the same files into buffers. On a CPU the first load also includes page faults for
the weights; the best round is compared.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from quire.config import EngineConfig
from quire.layers.build_context import collect_targets
from quire.loading import readers
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.loading.weights import Target
from quire.platforms import choose
from quire.worker.building import build_model

SHARDS = 4
RANGE = 16 << 20
Shapes = dict[str, tuple[int, ...]]


def llama_config(layers: int) -> dict[str, Any]:
    """Llama-3.1-8B's config.json, as far as shapes go."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def llama_shapes(config: dict[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write the files, unless a checkpoint of the same configuration is there."""
    note = folder / "config.json"
    if note.is_file() and json.loads(note.read_text()) == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shapes = llama_shapes(config)
    shards: list[Shapes] = [{} for _ in range(SHARDS)]
    share = sum(map(math.prod, shapes.values())) / SHARDS
    written = 0
    for name, shape in shapes.items():
        shards[min(SHARDS - 1, int(written / share))][name] = shape
        written += math.prod(shape)
    bank = (torch.randn(32 << 20) * 0.02).bfloat16().view(torch.uint8).numpy().data
    names = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as threads:
        list(threads.map(lambda name, shard: write_shard(folder / name, shard, bank), names, shards))
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    note.write_text(json.dumps(config))  # Last: its presence means that the checkpoint is complete.


def write_shard(path: Path, shapes: Shapes, bank: memoryview) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = end
        while left:
            left -= file.write(bank[: min(left, len(bank))])
        os.fsync(file.fileno())


def drop_from_page_cache(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: list[Path]) -> float:
    """The share of the files that is in the page cache."""
    libc, held, total = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size)
            del view
            if libc.mincore(address, size, ctypes.c_void_p(pages.ctypes.data)):
                return math.nan
            held, total = held + int((pages & 1).sum()), total + pages.size
    return held / total


def read_plainly(files: list[Path], threads: int) -> None:
    """Read every byte into a buffer that is reused."""
    ranges = [(path, at) for path in files for at in range(0, path.stat().st_size, RANGE)]
    buffers = [np.zeros(RANGE, np.uint8).data for _ in range(threads)]

    def read(work: tuple[Path, int]) -> None:
        buffer = buffers.pop()
        with work[0].open("rb", buffering=0) as file:
            file.seek(work[1])
            done = 0
            while count := file.readinto(buffer[done:]):
                done += count
        buffers.append(buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, ranges))


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def check(targets: dict[str, list[Target]], files: list[Path], layers: int) -> None:
    """Compare what was loaded with what safetensors reads: the last layer and everything outside the layers."""
    wanted = {name for name in targets if ".layers." not in name or f".layers.{layers - 1}." in name}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in wanted.intersection(file.keys()):
                (target,) = targets[name]
                expected = file.get_tensor(name)[target.keep].to(target.into.device)
                if not torch.equal(target.into, expected.to(target.into.dtype)):
                    raise RuntimeError(f"{name} differs from the file")


def peak_memory() -> float:
    """Peak memory of this process, in GB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / 1e9 if found else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", help="the model's; the file's is bfloat16")
    parser.add_argument(
        "--threads",
        type=int,
        default=readers.THREADS,
        help="readers of quire; the disk alone is read by as many, then by twice as many",
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    readers.THREADS = options.threads

    write_checkpoint(options.folder, llama_config(options.layers))
    found = local_files("llama", options.folder)
    files = list(found.weight_files("safetensors"))
    size = sum(path.stat().st_size for path in files)
    platform = choose(options.device)
    config = EngineConfig(model=str(options.folder), device=options.device, dtype=options.dtype)
    model = build_model(config, found, read_model_config(found), platform, max_model_len=2048)
    targets = collect_targets(model)  # type: ignore[arg-type]

    def load() -> None:
        load_weights(targets, model.ignores, open_checkpoint(found), progress=False)
        if options.device == "cuda":
            torch.cuda.synchronize()

    def show(what: str, held: float, took: float) -> float:
        print(f"{what:<26} {held:>9.0%} {took:>8.2f} {size / took / 1e9:>8.2f}", flush=True)
        return size / took / 1e9

    print(f"{platform.describe()} | {size / 1e9:.2f} GB in {len(files)} files, at most {options.threads} threads")
    print(f"{'':<26} {'cached':>9} {'seconds':>8} {'GB/s':>8}")
    disk, cold, warm = [], [], []
    for number in range(options.rounds):
        threads = options.threads << number % 2
        drop_from_page_cache(files)
        held = cached_share(files)
        disk.append(show(f"disk, {threads} plain readers", held, seconds(partial(read_plainly, files, threads))))
        drop_from_page_cache(files)
        held = cached_share(files)
        cold.append(show("load, cold", held, seconds(load)))
    for _ in range(options.rounds):
        held = cached_share(files)
        warm.append(show("load, warm", held, seconds(load)))
    peak = peak_memory()
    check(targets, files, options.layers)
    print(f"cold load / disk, best of each: {max(cold) / max(disk):.2f}")
    print(f"warm load / disk, best of each: {max(warm) / max(disk):.2f}")
    print(f"host memory at its peak: {peak:.2f} GB; loaded tensors equal the file's")


if __name__ == "__main__":
    main()
