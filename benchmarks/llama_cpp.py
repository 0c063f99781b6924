"""quire against llama.cpp on a CPU: the same GGUF files and threads, in turn.

    python benchmarks/llama_cpp.py --llama PYTHON [--gguf FILE] [--shapes 1b] [--encodings Q4_0,Q4_K,Q8_0] [--rounds 3]

`--llama`: the interpreter of an environment with llama-cpp-python (built with the machine's own instructions); without
it quire runs alone. `--gguf`: a file to run (default: the default model's). `--shapes 1b`: also a random Llama with the
shapes of a model of 1 billion weights in each of `--encodings`, written to `--folder`. Each engine is a process of its
own. Figures: milliseconds a token at 1 request, of a prompt of 512, tokens a second of 16 mixed requests (prompts of 16
to 256 tokens, 16 to 96 to generate) and of 32 that share a prefix of 256, and resident memory. llama.cpp runs the last
two as its server does, all sequences in one batch, the prefix computed once and shared. On a machine with other work
`--clock cpu --threads 1` counts the processor's time instead, which does not grow while a process waits for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from packed_weights import Child

from quire.kernels.weights.superblock import KINDS, set_halves

COMMON = """
import json, sys, time
clock = time.process_time if sys.argv[3] == "cpu" else time.perf_counter
def mixed_requests(count=16):
    return [([100 + (37 * i + 11 * j) % 9000 for j in range(16 + 240 * ((i * 7) % count) // (count - 1))],
             16 + 80 * ((i * 5) % count) // (count - 1)) for i in range(count)]
def shared_requests(seed, count=32):
    prefix = [200 + (13 * j + seed) % 9000 for j in range(256)]
    return prefix, [([300 + (29 * i + j) % 9000 for j in range(16)], 32) for i in range(count)]
def memory():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024
def answer():
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(globals()[name](*arguments)), flush=True)
"""
QUIRE = (
    COMMON
    + """
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=1024, disable_log_stats=True, **json.loads(sys.argv[2]))
def run(requests):
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    greedy = dict(temperature=0, ignore_eos=True, detokenize=False)
    params = [SamplingParams(max_tokens=tokens, **greedy) for _, tokens in requests]
    llm.reset_prefix_cache()
    start = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return clock() - start
def one():
    return (run([([50, 60, 70], 49)]) - run([([50, 60, 70], 1)])) / 48
def prompt(seed=[0]):
    seed[0] += 1
    return run([([100 + (7 * i * seed[0]) % 9000 for i in range(512)], 1)])
def mixed():
    requests = mixed_requests()
    return sum(tokens for _, tokens in requests) / run(requests)
def shared(seed=[0]):
    seed[0] += 1
    prefix, requests = shared_requests(seed[0])
    return sum(tokens for _, tokens in requests) / run([(prefix + own, tokens) for own, tokens in requests])
answer()
"""
)
LLAMA = (
    COMMON
    + """
import ctypes
import numpy as np
import llama_cpp as ll
threads = int(sys.argv[2])
ll.llama_backend_init()
silent = ll.llama_log_callback(lambda *_: None)
ll.llama_log_set(silent, ctypes.c_void_p(0))
model = ll.llama_model_load_from_file(sys.argv[1].encode(), ll.llama_model_default_params())
params = ll.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 12288, 512, 512, 33
params.n_threads = params.n_threads_batch = threads
params.kv_unified = True
ctx = ll.llama_init_from_model(model, params)
memory_of = ll.llama_get_memory(ctx)
words = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
batch = ll.llama_batch_init(512, 0, 1)
def decode(tokens):
    # tokens: (token, position, sequence, wants logits); returns the best token of each that wants logits
    found = []
    for first in range(0, len(tokens), 512):
        part = tokens[first : first + 512]
        for i, (token, position, sequence, wants) in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(part)
        assert ll.llama_decode(ctx, batch) == 0
        for i, each in enumerate(part):
            if each[3]:
                logits = ll.llama_get_logits_ith(ctx, i)
                found.append(int(np.ctypeslib.as_array(logits, (words,)).argmax()))
    return found
def run(requests, prefix=()):
    ll.llama_memory_clear(memory_of, True)
    start = clock()
    done = len(prefix)
    if prefix:
        decode([(token, i, 32, i == done - 1) for i, token in enumerate(prefix)])
        for sequence in range(len(requests)):
            ll.llama_memory_seq_cp(memory_of, 32, sequence, -1, -1)
    first = decode([(token, done + i, s, i == len(prompt) - 1)
                    for s, (prompt, _) in enumerate(requests) for i, token in enumerate(prompt)])
    left = {s: tokens - 1 for s, (_, tokens) in enumerate(requests)}
    last = dict(enumerate(first))
    at = {s: done + len(prompt) for s, (prompt, _) in enumerate(requests)}
    while active := [s for s in left if left[s] > 0]:
        for s, token in zip(active, decode([(last[s], at[s], s, True) for s in active])):
            last[s] = token
            at[s] += 1
            left[s] -= 1
    return clock() - start
def one():
    return (run([([50, 60, 70], 49)]) - run([([50, 60, 70], 1)])) / 48
def prompt(seed=[0]):
    seed[0] += 1
    return run([([100 + (7 * i * seed[0]) % 9000 for i in range(512)], 1)])
def mixed():
    requests = mixed_requests()
    return sum(tokens for _, tokens in requests) / run(requests)
def shared(seed=[0]):
    seed[0] += 1
    prefix, requests = shared_requests(seed[0])
    return sum(tokens for _, tokens in requests) / run(requests, prefix)
answer()
"""
)
SHAPES = {"1b": (2048, 8192, 16, 32, 8), "small": (512, 1024, 2, 8, 4)}
"""Hidden size, MLP width, layers, heads, KV heads."""
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "one": ("a token, 1 request", lambda seconds: f"{1e3 * seconds:.2f} ms"),
    "prompt": ("a prompt of 512", lambda seconds: f"{1e3 * seconds:.0f} ms"),
    "mixed": ("16 mixed requests", lambda rate: f"{rate:.0f} tok/s"),
    "shared": ("32 with a shared prefix", lambda rate: f"{rate:.0f} tok/s"),
}


def write_random(path: Path, like: Path, shape: str, encoding: str) -> None:
    """A Llama of random blocks with the tokenizer of the file `like`."""
    hidden, width, layers, heads, kv_heads = SHAPES[shape]
    fields = gguf.GGUFReader(like).fields
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind, *items = field.types
            writer.add_key_value(name, field.contents(), kind, items[-1] if items else None)
    vocabulary = len(fields["tokenizer.ggml.tokens"].data)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    kind, rng = KINDS[encoding], np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        raw = rng.integers(0, 256, (rows, columns // kind.block, kind.nbytes), dtype=np.uint8)
        set_halves(kind, torch.from_numpy(raw), 0.02)
        writer.add_tensor(f"{name}.weight", raw.reshape(rows, -1), raw_dtype=Kind[encoding])

    kv = hidden // heads * kv_heads
    matrix("token_embd", vocabulary, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for name, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden), ("attn_output", hidden, hidden),
            ("ffn_gate", width, hidden), ("ffn_up", width, hidden), ("ffn_down", hidden, width),
        ):  # fmt: skip
            matrix(f"blk.{layer}.{name}", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(path: Path, options: argparse.Namespace) -> None:
    settings = {"cpu_weights": options.weights, "threads": options.threads, "kv_cache_memory_bytes": 1 << 30}
    engines = {"quire": Child(sys.executable, QUIRE, str(path), json.dumps(settings), options.clock)}
    if options.llama:
        engines["llama.cpp"] = Child(options.llama, LLAMA, str(path), str(options.threads), options.clock)
    size = path.stat().st_size / 2**20
    print(f"\n{path.name} ({size:.0f} MiB), {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    for figure in options.figures.split(","):
        words, show = FIGURES[figure]
        found: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            for name, engine in engines.items():
                value = engine(figure)
                if turn:  # the first warms up
                    found[name].append(value)
        medians = {name: statistics.median(values) for name, values in found.items()}
        line = f"{words:>26}: " + ", ".join(f"{name} {show(value)}" for name, value in medians.items())
        if len(medians) == 2:
            line += f", ratio {medians['quire'] / medians['llama.cpp']:.2f}"
        print(line, flush=True)
    sizes: dict[str, Any] = {name: engine("memory") for name, engine in engines.items()}
    print(f"{'resident memory':>26}: " + ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items()))
    for engine in engines.values():
        engine.close()


def default_file() -> Path:
    found = subprocess.run([sys.executable, "-m", "quire.cli.main", "pull"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="python with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="a file to run; default: the default model's")
    parser.add_argument("--shapes", choices=sorted(SHAPES), help="also a random Llama of these shapes")
    parser.add_argument("--encodings", default="Q4_0,Q4_K,Q8_0")
    parser.add_argument("--folder", type=Path, help="where random models are written, and kept")
    parser.add_argument("--only-shapes", action="store_true", help="only the random models")
    parser.add_argument("--weights", default="packed", help="cpu_weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a loaded machine, with 1 thread"
    )
    parser.add_argument("--figures", default=",".join(FIGURES))
    options = parser.parse_args()
    file = options.gguf or default_file()
    if not options.only_shapes:
        compare(file, options)
    if options.shapes is None:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for encoding in options.encodings.split(","):
            path = folder / f"{options.shapes}.{encoding}.gguf"
            if not path.exists():
                write_random(path, file, options.shapes, encoding)
            compare(path, options)


if __name__ == "__main__":
    main()
