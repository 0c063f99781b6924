"""Host cost of a decode step: scheduling and applying the result, with a null executor.

python benchmarks/planning.py            # 256 and 1,024 running requests
python benchmarks/planning.py --fair     # …of 16 tenants under the fair policy, while more wait
python benchmarks/planning.py --timelines   # …with and without the timelines that the page shows, in turn
"""

from __future__ import annotations

import statistics
import sys
import time

from quire.executor.null import NullExecutor
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.timelines import Timelines

BLOCK_SIZE = 16


def measure(
    running: int, steps: int = 600, prompt: int = 100, policy: str = "fcfs", timelines: bool = False
) -> tuple[float, float]:
    """Median and 99th percentile of milliseconds a decode step costs the host."""
    keys = ContentKeys(BLOCK_SIZE, b"benchmark")
    tables = BlockTables(running * (prompt + steps + 64) // BLOCK_SIZE + 64, BLOCK_SIZE)
    scheduler = Scheduler(tables, make_policy(policy), keys, max_rows=running, token_budget=8192)
    if timelines:
        scheduler.requests.timelines = Timelines()
    executor = NullExecutor(running)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(running if policy == "fcfs" else 2 * running):
        tokens = [(7 * i + j) % 1000 for j in range(prompt + i % BLOCK_SIZE)]
        request = NewRequest(str(i), tokens, params, limit=len(tokens) + steps + 32, keys=keys.of(tokens))
        request.tenant = str(i % 16)
        scheduler.add(request)
    times = []
    while len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = executor.submit(plan)  # type: ignore[arg-type]
        submitted = time.perf_counter()
        scheduler.update(result)
        scheduler.take_outputs()
        end = time.perf_counter()
        if plan.num_decodes == running:  # type: ignore[union-attr]
            times.append(1000 * (planned - begin + end - submitted))
    times.sort()
    return statistics.median(times), times[int(0.99 * len(times))]


def compare(sizes: list[int], rounds: int = 5) -> None:
    """Print what timelines add: the median over rounds that alternate between with and without."""
    print(f"{'running':>8} {'without ms':>11} {'with ms':>9} {'added':>7}")
    for size in sizes:
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for is_on in (False, True):
                found[is_on].append(measure(size, timelines=is_on)[0])
        off, on = statistics.median(found[False]), statistics.median(found[True])
        print(f"{size:>8} {off:>11.4f} {on:>9.4f} {on / off - 1:>7.1%}")


def main() -> None:
    policy = "fair" if "--fair" in sys.argv else "fcfs"
    sizes = [int(size) for size in sys.argv[1:] if not size.startswith("--")] or [256, 1024]
    if "--timelines" in sys.argv:
        compare(sizes)
        return
    print(f"{'running':>8} {'median ms':>10} {'p99 ms':>8} {'µs/row':>8}")
    for size in sizes:
        median, p99 = measure(size, policy=policy)
        print(f"{size:>8} {median:>10.3f} {p99:>8.3f} {1000 * median / size:>8.2f}")


if __name__ == "__main__":
    main()
