"""`quire bench waste`: the share of KV cache slots without a token, with the real scheduler and no model."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.bench.common import add_output, report, waste_metrics, waste_rows
from quire.cli.engine_flags import add_common
from quire.cli.parser import Parser
from quire.cli.values import positive
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.messages.request import NewRequest
    from quire.scheduler.stats import SchedulerStats

WHAT = """\
Send ShareGPT-like traffic (lognormal prompt and output lengths, most short, some long) through the real scheduler
and block pool, with an executor that computes nothing, and count at every step the allocated cache slots without a
token. For comparison: the waste of reserving --max-len slots for every request, without paging."""
EXAMPLES = """
  quire bench waste
  quire bench waste --block-size 32 --max-num-seqs 64
"""


@dataclass(frozen=True)
class SimulatedTraffic:
    """Lengths of prompts and outputs, drawn independently."""

    requests: int = 3000
    mean: float = 200.0
    sigma: float = 1.0
    longest: int = 2048
    """Prompt and output together."""
    seed: int = 0

    def requests_to_send(self) -> Iterator[NewRequest]:
        """The requests. Only the length of a prompt matters: its tokens are not read."""
        import numpy as np

        from quire.messages.request import NewRequest
        from quire.messages.sampling import SamplingParams

        random = np.random.default_rng(self.seed)
        drawn = random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, (self.requests, 2))
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        for i, (prompt, output) in enumerate(np.ceil(drawn).astype(int).tolist()):
            prompt = min(prompt, self.longest - 1)
            yield NewRequest(str(i), [0] * prompt, params, limit=min(prompt + output, self.longest))


def configure(parser: Parser) -> None:
    """The flags of `quire bench waste`."""
    parser.describe(run, WHAT, EXAMPLES)
    load = parser.add_argument_group("traffic")
    load.add_argument("--num-prompts", type=positive, default=3000, metavar="N", help="requests (default: 3000)")
    load.add_argument("--mean-len", type=positive, default=200, metavar="N", help="mean of each length (default: 200)")
    load.add_argument("--sigma", type=float, default=1.0, metavar="X", help="spread of their logarithms (default: 1)")
    load.add_argument("--max-len", type=positive, default=2048, metavar="N", help="longest sequence (default: 2048)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the lengths (default: 0)")
    add_output(load)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens per block (default: 16)")
    engine.add_argument("--max-num-seqs", type=positive, default=256, metavar="N", help="rows (default: 256)")
    engine.add_argument(
        "--cache-tokens", type=positive, metavar="SIZE", help="size of the cache (default: 512 tokens per row)"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    cache = args.cache_tokens or 512 * args.max_num_seqs
    if cache < args.max_len:
        raise ValidationError(f"--cache-tokens {cache} is too small for one sequence of --max-len {args.max_len}")
    if args.max_len < 2 or not 0 <= args.sigma <= 10:
        raise ValidationError("--max-len must be at least 2, and --sigma from 0 to 10")
    traffic = SimulatedTraffic(args.num_prompts, args.mean_len, args.sigma, args.max_len, args.seed)
    begin = time.perf_counter()
    stats = measure(traffic, args.block_size, args.max_num_seqs, cache)
    elapsed = time.perf_counter() - begin
    report(
        f"{args.num_prompts} requests, lengths lognormal around {args.mean_len}, blocks of {args.block_size}",
        [
            ("cache", f"{cache} tokens for at most {args.max_num_seqs} requests"),
            ("steps", f"{stats.steps}, {stats.row_steps / stats.steps:.0f} requests in each on average"),
            ("tokens", f"{stats.prompt_tokens} of prompts, {stats.generated_tokens} generated"),
            ("preemptions", str(stats.preemptions)),
            ("planning", f"{1000 * elapsed / stats.steps:.2f} ms per step"),
            *waste_rows(stats, args.max_len),
        ],
        args,
        {"steps": stats.steps, "num_preemptions": stats.preemptions, **waste_metrics(stats, args.max_len)},
    )
    return 0


def measure(traffic: SimulatedTraffic, block_size: int, max_rows: int, cache_tokens: int) -> SchedulerStats:
    """Run the traffic through scheduler and pool; checks that all blocks are free at the end."""
    from quire.engine.core import EngineCore
    from quire.executor.null import NullExecutor
    from quire.kvcache.block_tables import BlockTables
    from quire.kvcache.prefix_cache import ContentKeys
    from quire.scheduler.policies.registry import make_policy
    from quire.scheduler.scheduler import Scheduler

    tables = BlockTables(cache_tokens // block_size + 1, block_size, prefix_caching=False)
    keys = ContentKeys(block_size)
    scheduler = Scheduler(tables, make_policy("fcfs"), keys, max_rows, token_budget=max(8192, max_rows))
    core = EngineCore(scheduler, NullExecutor(max_rows), log_stats=False)
    coming = traffic.requests_to_send()
    exhausted = False
    while core.has_work or not exhausted:
        while not exhausted and scheduler.waiting < max_rows:  # keep the queue filled
            request = next(coming, None)
            exhausted = request is None
            if request is not None:
                core.add(request)
        core.step()
    scheduler.check_idle()
    return scheduler.stats
