"""The routing policies compared with simpler ways to spread requests, on replayed traces over simulated replicas.

python benchmarks/router.py                       # 5 traces × 3 seeds over 4 replicas; about two minutes
python benchmarks/router.py --traces mixed --seeds 1 --replicas 8 --rate 2
python benchmarks/router.py --choose              # the cost of one choice
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from prefix_traces import BLOCK, TRACES, Arrival, trace
from replica_simulation import Dispatcher, Machine, Outcome, replay

from quire.router import OpenRequest, RoutedRequest, Router, make_routing_policy


class RoundRobin(Dispatcher):
    """One after the other."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, -1

    def send(self, arrival: Arrival, now: float) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next


class Random(Dispatcher):
    """At random."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self._rng = replicas, random.Random(0)

    def send(self, arrival: Arrival, now: float) -> int:
        return self._rng.randrange(self._replicas)


class FewestOpen(Dispatcher):
    """The replica with the fewest open requests."""

    def __init__(self, replicas: int) -> None:
        self._open, self._at = [0] * replicas, dict[Arrival, int]()

    def send(self, arrival: Arrival, now: float) -> int:
        chosen = self._at[arrival] = self._open.index(min(self._open))
        self._open[chosen] += 1
        return chosen

    def ended(self, arrival: Arrival, now: float) -> None:
        self._open[self._at.pop(arrival)] -= 1


class Routed(Dispatcher):
    """quire's router with one of its policies. It is given no speeds and measures them."""

    def __init__(self, replicas: int, machine: Machine, policy: str) -> None:
        self._now = 0.0
        self.router = Router(BLOCK, make_routing_policy(policy), clock=lambda: self._now)
        self._open: dict[Arrival, OpenRequest] = {}
        for number in range(replicas):
            self.router.add(str(number), machine.blocks, machine.rows)

    def send(self, arrival: Arrival, now: float) -> int:
        self._now = now
        request = RoutedRequest(arrival.prompt_keys, arrival.prompt_tokens)
        name = self.router.choose(request)
        self._open[arrival] = self.router.launched(request, name)
        return int(name)

    def started(self, arrival: Arrival, cached: int, now: float) -> None:
        self._now = now
        self.router.progress(self._open[arrival], 1, cached)

    def progressed(self, arrival: Arrival, generated: int, now: float) -> None:
        self._now = now
        self.router.progress(self._open[arrival], generated)

    def ended(self, arrival: Arrival, now: float) -> None:
        self._now = now
        opened = self._open.pop(arrival)
        self.router.progress(opened, arrival.output_tokens)
        self.router.finished(opened, arrival.keys)


def contestants(replicas: int, machine: Machine) -> dict[str, Callable[[], Dispatcher]]:
    """Every way to spread requests, by name."""
    return {
        "round robin": lambda: RoundRobin(replicas),
        "random": lambda: Random(replicas),
        "fewest open": lambda: FewestOpen(replicas),
        "least_loaded": lambda: Routed(replicas, machine, "least_loaded"),
        "prefix": lambda: Routed(replicas, machine, "prefix"),
    }


def compare(arrivals: Sequence[Arrival], replicas: int, machine: Machine) -> dict[str, Outcome]:
    """Replay one trace through all of them."""
    return {name: replay(arrivals, make, replicas, machine) for name, make in contestants(replicas, machine).items()}


def most_hits(arrivals: Sequence[Arrival]) -> int:
    """Hits of one unbounded cache, if every answer were complete before the next request."""
    seen: set[bytes] = set()
    tokens = 0
    for arrival in arrivals:
        whole = arrival.keys[: (arrival.prompt_tokens - 1) // BLOCK]
        tokens += BLOCK * next((i for i, key in enumerate(whole) if key not in seen), len(whole))
        seen.update(arrival.keys)
    return tokens


def print_outcomes(name: str, seed: int, arrivals: Sequence[Arrival], outcomes: dict[str, Outcome]) -> None:
    base = outcomes["round robin"]
    print(f"{name:>7} {seed:>4} {'at most':>13} {most_hits(arrivals) / base.prompt_tokens:>7.1%}")
    for policy, outcome in outcomes.items():
        share = outcome.hit_tokens / outcome.prompt_tokens
        ratio = outcome.hit_tokens / base.hit_tokens if base.hit_tokens else float("nan")
        print(
            f"{name:>7} {seed:>4} {policy:>13} {share:>7.1%} {ratio:>6.2f}× {outcome.work_balance:>7.3f} "
            f"{outcome.window_balance:>7.3f} {outcome.longest:>7.1f} "
            f"{1000 * outcome.ttft_p50:>9.0f} {1000 * outcome.ttft_p99:>9.0f}",
            flush=True,
        )


def choice_microseconds(blocks: int = 512, replicas: int = 16, rounds: int = 300) -> tuple[float, float]:
    """Median microseconds of `choose` and of `launched`. Each prompt's keys are new objects, as those of a new request
    are."""
    router = Router(BLOCK)
    rng = random.Random(0)
    shared = [rng.randbytes(32) for _ in range(blocks)]
    for number in range(replicas):
        router.add(str(number), 50_000, 256)
        for _ in range(40):
            filler = [rng.randbytes(32) for _ in range(blocks)]
            router.launched(RoutedRequest(filler, blocks * BLOCK), str(number))
        # Each replica knows a different length of the prompt.
        known = shared[: blocks * (number + 1) // replicas]
        router.launched(RoutedRequest(known, len(known) * BLOCK), str(number))
    choosing, launching = [], []
    for _ in range(rounds):
        request = RoutedRequest([bytes(bytearray(key)) for key in shared], blocks * BLOCK)
        begin = time.perf_counter()
        name = router.choose(request)
        middle = time.perf_counter()
        opened = router.launched(request, name)
        end = time.perf_counter()
        router.finished(opened)
        choosing.append(middle - begin)
        launching.append(end - middle)
    return 1e6 * statistics.median(choosing), 1e6 * statistics.median(launching)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=TRACES, choices=TRACES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the arrival rate")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=Machine.blocks, help="KV blocks of a replica")
    parser.add_argument("--choose", action="store_true", help="only time a choice")
    args = parser.parse_args()
    if args.choose:
        choosing, launching = choice_microseconds()
        print(f"512 blocks, 16 replicas: choose {choosing:.0f} µs, launched {launching:.0f} µs")
        return
    print(f"{'trace':>7} {'seed':>4} {'':>13} {'cached':>7} {'hits':>7} {'work':>7} {'10 s':>7} {'longest':>7} "
          f"{'TTFT p50':>9} {'p99 ms':>9}")  # fmt: skip
    for name in args.traces:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            arrivals = trace(name, seed, args.seconds, args.rate)
            print_outcomes(name, seed, arrivals, compare(arrivals, args.replicas, Machine(blocks=args.blocks)))


if __name__ == "__main__":
    main()
