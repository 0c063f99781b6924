"""Many suspended sessions on disk with a common beginning: what each costs in time and in bytes.

python benchmarks/many_sessions.py                          # default model, CPU, 1,000 sessions
python benchmarks/many_sessions.py --sessions 100 --turns 10

Each is forked from one session with the shared prompt, has a turn of its own, and is suspended. Some are then resumed
in random order, each from disk: host memory and the device's cache are emptied before.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quire import LLM, SamplingParams

HIGHEST = 10_000


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--shared", type=int, default=512, help="tokens of the common beginning")
    parser.add_argument("--own", type=int, default=32, help="other tokens of each session, including its output")
    parser.add_argument("--turns", type=int, default=20, help="how many are resumed")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--swap-space", type=float, default=0.5, help="GiB of host memory")
    parser.add_argument("--folder", help="on the disk to be measured (default: a temporary one)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Run it and print the metrics."""
    rng, times = random.Random(1), dict[str, list[float]]()

    def timed(operation: str, run: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = run()
        times.setdefault(operation, []).append(time.perf_counter() - begin)
        return result

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, HIGHEST) for _ in range(count)]

    llm = LLM(
        args.model, load_format=args.load_format, swap_space=args.swap_space, kv_disk=str(folder), kv_disk_size=64,
        skip_tokenizer_init=True, disable_log_stats=True, max_model_len=args.shared + args.own + 64,
        max_num_seqs=args.at_once,
    )  # fmt: skip
    tiers, sessions = llm.llm_engine.core.scheduler.tiers, llm.sessions
    assert tiers is not None and tiers.store is not None
    shared = tokens(args.shared)
    system = sessions.create("system", shared)
    system.generate(greedy(1))
    for first in range(0, args.sessions, args.at_once):
        created = []
        for i in range(first, min(first + args.at_once, args.sessions)):
            session = timed("create (fork)", lambda i=i: system.fork(f"s{i}", args.shared))
            timed("append", lambda session=session: session.append(tokens(args.own - 1)))
            created.append(session)
        begin = time.perf_counter()
        for stream in [session.stream(greedy(1)) for session in created]:
            for _ in stream:
                pass
        times.setdefault("first turn", []).append((time.perf_counter() - begin) / len(created))
        for session in created:
            timed("suspend", session.suspend)
    system.suspend()
    for _ in range(args.turns):
        timed("list a page of 100", lambda: sessions.list(limit=100))
    computed = 0
    for i in rng.sample(range(args.sessions), min(args.turns, args.sessions)):
        llm.reset_prefix_cache()
        tiers.host.discard(list(tiers.host.oldest()))
        handle = timed("resume", lambda i=i: sessions.resume(f"s{i}"))
        output = timed("first token from disk", lambda handle=handle: handle.generate(greedy(1)))
        computed += args.shared + args.own - output.num_cached_tokens
        handle.delete()
    for _ in range(min(args.turns, 10)):
        prompt = {"prompt_token_ids": tokens(args.shared + args.own)}
        timed("first token of a new prompt", lambda prompt=prompt: llm.generate([prompt], greedy(1), use_tqdm=False))
    report(args, llm, times, folder, computed)
    llm.shutdown()


def report(args: argparse.Namespace, llm: LLM, times: dict[str, list[float]], folder: Path, computed: int) -> None:
    """Print times and sizes."""
    tiers = llm.llm_engine.core.scheduler.tiers
    assert tiers is not None and tiers.store is not None
    stats, size = tiers.store.stats(), llm.llm_engine.core.scheduler.tables.block_size
    info = llm.llm_engine.info
    print(f"{info.files.name}, {info.device}, {info.dtype}: {args.sessions} sessions of {args.shared} shared tokens")
    print(f"and {args.own} of their own; {args.swap_space:g} GiB of host memory = {tiers.host.num_slots} blocks\n")
    for operation, values in times.items():
        middle, high = statistics.median(values), max(values)
        print(f"{operation:<28} {1000 * middle:9.2f} ms   (at most {1000 * high:.2f})")
    each = -(-(args.shared + args.own - 1) // size)
    alone, there = args.sessions * each * stats.block_bytes, stats.blocks * stats.block_bytes
    log = sum(path.stat().st_size for path in (folder / "sessions").iterdir())
    resumed = len(times.get("resume", []))
    print(
        f"\nKV on disk: {stats.blocks} blocks, {there / 2**20:.0f} MiB; if nothing were shared: {alone / 2**20:.0f} MiB"
    )
    print(f"({alone / there:.1f}x). Tokens and names: {log / 2**20:.1f} MiB.")
    print(f"Computed when {resumed} were resumed: {computed} tokens (at least one each: the last of the output)")


if __name__ == "__main__":
    main()
