"""`quire top`: what a server does now, for people on a terminal: rates, rows, blocks, and why requests wait."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cli.admin_client import KEY, get
from quire.cli.parser import Parser
from quire.errors import ValidationError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from quire.messages.memory_map import MemoryMap

WHAT = """\
Watch a server that was started with --admin-key: tokens a second, rows and queue, blocks, tiers and cache hits, and for
every waiting request what it waits for."""
EXAMPLES = """
  quire serve --admin-key secret &
  quire top --api-key secret
  quire top --url http://gpu-7:8000 --interval 0.5
  quire top --once                             one view, for scripts
"""
MOST_SHOWN = 12
"""Waiting and running requests listed."""


def configure(parser: Parser) -> None:
    """The flags of `quire top`."""
    parser.describe(run, WHAT, EXAMPLES)
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's admin key (default: ${KEY})")
    parser.add_argument("--replica", type=int, default=0, metavar="N", help="which engine's memory (default: 0)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between views (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one view, measured over one interval, and exit")


@dataclass(frozen=True)
class Snapshot:
    """What the server said at one moment."""

    at: float
    stats: dict[str, Any]
    memory: MemoryMap
    frame: dict[str, Any]
    """A frame of the page's feed."""

    def value(self, name: str) -> float:
        """A metric of all engines together."""
        return float(self.stats["engine"].get(f"quire:{name}", 0.0))


def run(args: argparse.Namespace) -> int:
    """Show the view until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    if not 0.1 <= args.interval <= 3600:
        raise ValidationError(f"--interval must be from 0.1 to 3600 seconds, got {args.interval:g}")
    console = Console(highlight=False)
    before = take(args)
    time.sleep(args.interval)
    now = take(args)
    if args.once or not console.is_terminal:
        console.print(draw(before, now, console, args.url))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(draw(before, now, console, args.url), refresh=True)
                time.sleep(args.interval)
                before, now = now, take(args)
    except KeyboardInterrupt:
        console.print(draw(before, now, console, args.url))  # keep the last view on the screen
    return 0


def take(args: argparse.Namespace) -> Snapshot:
    """Ask the server."""
    import msgspec

    from quire.messages.memory_map import MemoryMap

    key = args.api_key or os.environ.get(KEY)
    stats = msgspec.json.decode(get(args.url, key, "/admin/stats"))
    memory = MemoryMap.from_json(
        get(args.url, key, "/admin/memory", {"replica": args.replica}), f"what {args.url} sent"
    )
    events = get(args.url, key, "/admin/feed", {"replica": args.replica, "frames": 1})
    frame = msgspec.json.decode(events.partition(b"data: ")[2] or b"{}")
    return Snapshot(time.monotonic(), stats, memory, frame)


def draw(before: Snapshot, now: Snapshot, console: Console, where: str) -> RenderableType:
    """The view: changes between two snapshots, and the later one's state."""
    from rich.console import Group
    from rich.text import Text

    from quire.cli.memory_view import draw_tiers

    stats = now.stats
    title = Text.assemble(
        ("quire", "bold"), f" at {where}: {stats['status']}; {stats['open_requests']} open requests, ",
        f"{stats['restarts']} restarts",
    )  # fmt: skip
    parts: list[RenderableType] = [title, _rates(before, now), draw_tiers(now.memory, console)]
    parts += _queue(now.memory)
    parts += _running(now.memory)
    return Group(*parts)


def _rates(before: Snapshot, now: Snapshot) -> RenderableType:
    from quire.cli.memory_view import plain_grid

    seconds = max(1e-9, now.at - before.at)

    def rate(name: str) -> float:
        return max(0.0, now.value(name) - before.value(name)) / seconds

    queried = now.value("prefix_cache_queries") - before.value("prefix_cache_queries")
    hits = now.value("prefix_cache_hits") - before.value("prefix_cache_hits")
    grid = plain_grid()
    grid.add_row("tokens", f"{rate('generation_tokens'):.1f} out, {rate('prompt_tokens'):.1f} of prompts a second")
    grid.add_row("steps", f"{rate('steps'):.1f} a second; {rate('num_preemptions'):.1f} preemptions a second")
    running, waiting = now.value("num_requests_running"), now.value("num_requests_waiting")
    grid.add_row("requests", f"{running:.0f} running, {waiting:.0f} waiting")
    grid.add_row("prefix cache", f"{100 * hits / queried:.0f}% of prompt tokens found" if queried > 0 else "no prompts")
    if "quire:power_watts" in now.stats["engine"]:
        kind = ", estimated" if now.value("energy_estimated") else ""
        budget, held = now.value("power_budget_watts"), rate("energy_held_seconds")
        of = f" of a budget of {budget:g} W" if budget else ""
        watts = rate("energy_joules")
        tokens = rate("generation_tokens")
        each = f"; {watts / tokens:.3g} J a token out" if tokens else ""
        paced = f"; steps held back {100 * held:.0f}% of the time" if held else ""
        grid.add_row("power", f"{watts:.1f} W{of}{kind}{each}{paced}")
    if (latency := now.frame.get("latency")) is not None and latency["first_median"]:
        first, after = latency["first_median"], latency["token_median"]
        grid.add_row(
            "latency", f"first token {first:.0f} ms (95%: {latency['first_p95']:.0f}), then {after:.1f} ms a token"
        )
    if steps := now.frame.get("steps"):
        number, _, took, decodes, prompts, computed, drafts = steps[-1]
        what = f"{decodes} decodes, {prompts} prompts ({computed} tokens), {drafts} drafts in {took:.1f} ms"
        grid.add_row("last step", f"{number}: {what}")
    if (speculation := now.stats.get("speculation")) is not None:
        grid.add_row("drafts", f"{speculation['tokens_per_draw']:.2f} tokens a draw that verified drafts")
    return grid


def _queue(memory: MemoryMap) -> list[RenderableType]:
    """The waiting requests, and why."""
    from rich.text import Text

    from quire.cli.memory_view import listing, printable

    queue = memory.owners.queue
    if not queue:
        return []
    grid = listing("waiting", "tenant", "why", "tokens", "seconds", words=3)
    for one in queue[:MOST_SHOWN]:
        again = f" (preempted {one.preemptions} times)" if one.preemptions else ""
        why = f"{one.reason}: {one.detail}{again}"
        grid.add_row(printable(one.name), printable(one.tenant), why, str(one.tokens), f"{one.seconds:.1f}")
    more = memory.owners.waiting - len(queue[:MOST_SHOWN])
    return [Text(""), grid, *([Text(f"  and {more} more")] if more > 0 else [])]


def _running(memory: MemoryMap) -> list[RenderableType]:
    from rich.text import Text

    from quire.cli.memory_view import listing, printable

    owners = [owner for owner in memory.owners.largest if owner.kind in ("running", "loading")]
    if not owners:
        return []
    grid = listing("running", "tenant", "tokens", "blocks", "shared", words=2)
    for owner in owners[:MOST_SHOWN]:
        numbers = (str(owner.tokens), str(owner.blocks), str(owner.shared))
        grid.add_row(printable(owner.name), printable(owner.tenant), *numbers)
    more = memory.owners.running + memory.owners.loading - len(owners[:MOST_SHOWN])
    return [Text(""), grid, *([Text(f"  and {more} more")] if more > 0 else [])]
