"""`quire top`: what a server does now, for people on a terminal: rates, rows, blocks, and why requests wait."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.cli.admin_client import KEY, NoAnswerError, get
from quire.cli.parser import Parser
from quire.errors import ValidationError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from quire.server.page.frames import FeedFrame, RowFigures, SlowFigures

WHAT = """\
Watch a server: what its page shows, for a terminal. Tokens a second, rows and queue, blocks, tiers and cache hits, and
for every waiting request what it waits for. With the server's admin key everything is shown, otherwise your own
requests and totals."""
EXAMPLES = """
  quire serve &
  quire top
  quire top --api-key secret                   the server's --admin-key
  quire top --url http://gpu-7:8000 --interval 0.5
  quire top --once                             one view, for scripts
"""
MOST_SHOWN = 12
"""Waiting and running requests listed."""


def configure(parser: Parser) -> None:
    """The flags of `quire top`."""
    parser.describe(run, WHAT, EXAMPLES)
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's admin key, or an API key (default: ${KEY})")
    parser.add_argument("--replica", type=int, default=0, metavar="N", help="which engine (default: 0)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between views (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one view, measured over one interval, and exit")


def run(args: argparse.Namespace) -> int:
    """Show the view until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    if not 0.1 <= args.interval <= 3600:
        raise ValidationError(f"--interval must be from 0.1 to 3600 seconds, got {args.interval:g}")
    console = Console(highlight=False)
    take = reader(args.url, args.api_key or os.environ.get(KEY), args.replica)
    before = take()
    time.sleep(args.interval)
    now = take()
    if args.once or not console.is_terminal:
        console.print(draw(before, now, console, args.url))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(draw(before, now, console, args.url), refresh=True)
                time.sleep(args.interval)
                before, now = now, take()
    except KeyboardInterrupt:
        console.print(draw(before, now, console, args.url))  # keep the last view on the screen
    return 0


def reader(url: str, key: str | None, replica: int) -> Callable[[], FeedFrame]:
    """What asks the server for a whole frame of its feed: of everything, if the key is its admin key."""
    import msgspec

    from quire.server.page.frames import FeedFrame

    def read(path: str) -> FeedFrame:
        events = get(url, key, path, {"replica": replica, "frames": 1})
        lines = [line for line in events.split(b"\n") if line.startswith(b"data: ")]
        if not lines:
            raise NoAnswerError(f"{url} sent no frame of its feed: it may be stopping")
        return msgspec.json.decode(lines[0].removeprefix(b"data: "), type=FeedFrame)

    path = _feed_path(url, key)
    return lambda: read(path)


def _feed_path(url: str, key: str | None) -> str:
    """The feed that this key may read."""
    import msgspec

    public, every = "/v1/engine/feed", "/admin/feed"
    try:
        settings = msgspec.json.decode(get(url, None, "/page/settings"))
    except NoAnswerError as error:
        if "/page/settings" not in str(error):
            raise  # nothing answers
        return every  # the server has no page
    if not key and settings["needs_key"]:
        raise NoAnswerError(f"{url} needs a key: give its --admin-key, or an API key, as --api-key or in ${KEY}")
    if not key or not settings["has_admin"]:
        return public
    try:
        get(url, key, every, {"frames": 1})
    except NoAnswerError:
        if not settings["needs_key"]:
            raise  # it is no API key either
        return public
    return every


def draw(before: FeedFrame, now: FeedFrame, console: Console, where: str) -> RenderableType:
    """The view: changes between two frames, and the later one's state."""
    from rich.console import Group
    from rich.text import Text

    slow = now.slow
    status = now.status or (slow.status if slow is not None else "")
    shown = "" if now.scope == "admin" else "; totals and your own requests"
    title = Text.assemble(("quire", "bold"), f" at {where}: {status or 'serving'}")
    if slow is not None and slow.restarts:
        title.append(f", {slow.restarts} restarts")
    title.append(shown)
    if now.status:
        return title
    parts: list[RenderableType] = [title, _rates(before, now), _tiers(now, console)]
    if slow is not None and slow.replicas:
        parts += _replicas(slow)
    return Group(*parts, *_queue(now), *_rows(now), *_tenants(now))


def _rates(before: FeedFrame, now: FeedFrame) -> RenderableType:
    from quire.cli.memory_view import plain_grid

    seconds = max(1e-9, (now.at - before.at) / 1000)

    def grown(name: str) -> float:
        return max(0.0, now.counters.get(name, 0.0) - before.counters.get(name, 0.0))

    def rate(name: str) -> float:
        return grown(name) / seconds

    grid = plain_grid()
    grid.add_row("tokens", f"{rate('generated_tokens'):.1f} out, {rate('prompt_tokens'):.1f} of prompts a second")
    grid.add_row("steps", f"{rate('steps'):.1f} a second; {rate('preemptions'):.1f} preemptions a second")
    running, waiting = now.counters.get("running", 0.0), now.waiting + now.loading + now.compiling
    grid.add_row("requests", f"{running:.0f} running in {now.row_count} rows, {waiting} waiting")
    queried = grown("queried_tokens")
    share = f"{100 * grown('cached_tokens') / queried:.0f}% of prompt tokens found" if queried else "no prompts"
    grid.add_row("prefix cache", share)
    if (latency := now.latency) is not None and latency.first_median:
        each = f", then {latency.token_median:.1f} ms a token" if latency.token_median else ""
        grid.add_row("latency", f"first token {latency.first_median:.0f} ms (95%: {latency.first_p95:.0f}){each}")
    if now.steps:
        number, _, took, decodes, prompts, computed, drafts = now.steps[-1]
        what = f"{decodes} decodes, {prompts} prompts ({computed} tokens), {drafts} drafts in {took:.1f} ms"
        grid.add_row("last step", f"{number}: {what}")
    if now.slow is not None:
        for name, value in _slow(before.slow, now.slow, grown("generated_tokens")):
            grid.add_row(name, value)
    if (adapters := now.adapters) is not None:
        names = ", ".join(adapters.loaded) or "none loaded"
        waits = f"; requests wait for {', '.join(adapters.awaited)}" if adapters.awaited else ""
        grid.add_row("adapters", f"{names} (of {adapters.slots} slots){waits}")
    return grid


def _slow(before: SlowFigures | None, now: SlowFigures, tokens: float) -> list[tuple[str, str]]:
    """Energy, drafts, experts, ranks and sessions, where there are any."""
    lines = []
    if energy := now.energy:
        kind = ", estimated" if energy.get("is_estimated") else ""
        of = f" of a budget of {energy['budget']:g} W" if energy.get("budget") else ""
        joules = energy["joules"] - (before.energy.get("joules", 0.0) if before is not None else 0.0)
        each = f"; {joules / tokens:.3g} J a token out" if tokens and joules > 0 else ""
        lines.append(("power", f"{energy.get('watts', 0.0):.1f} W{of}{kind}{each}; {energy['joules']:.0f} J so far"))
    if drafts := now.speculation.get("num_drafts"):
        per_step = 1 + now.speculation.get("num_accepted_tokens", 0.0) / drafts
        lines.append(("drafts", f"{per_step:.2f} tokens a draw that verified drafts"))
    if now.experts:
        layer, load = max(now.experts.items(), key=lambda one: one[1])
        lines.append(("experts", f"the busiest has {load:.2f} times its share, in layer {layer}"))
    if (ranks := now.ranks) is not None:
        stages = f" in {ranks.pipeline} stages" if ranks.pipeline > 1 else ""
        experts = f"; experts over {ranks.experts} ranks" if ranks.experts > 1 else ""
        lines.append(("ranks", f"{ranks.tensor * ranks.pipeline}{stages}{experts}"))
    if now.sessions.get("sessions"):
        on_device = now.sessions.get("sessions_on_device", 0.0)
        lines.append(("sessions", f"{now.sessions['sessions']:.0f}, {on_device:.0f} on the device"))
    return lines


def _tiers(now: FeedFrame, console: Console) -> RenderableType:
    from quire.cli.memory_view import draw_tiers
    from quire.messages.memory_map import DeviceBlocks, Pressure

    counts = now.counts
    device = DeviceBlocks(
        capacity=sum(counts.values()), block_size=now.block_size, block_bytes=now.block_bytes,
        empty=counts.get("empty", 0), cached=counts.get("cached", 0),
        held=counts.get("held", 0) + counts.get("other", 0), shared=counts.get("shared", 0),
        moving=counts.get("moving", 0),
    )  # fmt: skip
    tiers = now.tiers
    if tiers is None:
        return draw_tiers(device, None, None, Pressure(), console)
    return draw_tiers(device, tiers.host, tiers.disk, tiers.pressure, console)


def _replicas(slow: SlowFigures) -> list[RenderableType]:
    from rich.text import Text

    from quire.cli.memory_view import listing

    grid = listing("engine", "state", "running", "waiting", "blocks", "tokens", words=2)
    for number, one in enumerate(slow.replicas):
        figures = (one.running, one.waiting, one.blocks_used, one.generated_tokens)
        grid.add_row(str(number), one.status, *(f"{figure:.0f}" for figure in figures))
    return [Text(""), grid]


def _queue(now: FeedFrame) -> list[RenderableType]:
    """The waiting requests, and why."""
    from rich.text import Text

    from quire.cli.memory_view import listing, printable

    if not now.queue:
        return []
    grid = listing("waiting", "tenant", "why", "tokens", "seconds", words=3)
    for one in now.queue[:MOST_SHOWN]:
        again = f" (preempted {'once' if one.preemptions == 1 else f'{one.preemptions} times'})" * bool(one.preemptions)
        why = f"{one.reason}: {one.detail}{again}"
        grid.add_row(printable(one.name), printable(one.tenant), why, str(one.tokens), f"{one.seconds:.1f}")
    more = max(now.waiting + now.compiling, len(now.queue)) - len(now.queue[:MOST_SHOWN])
    return [Text(""), grid, *([Text(f"  and {more} more")] if more > 0 else [])]


def _rows(now: FeedFrame) -> list[RenderableType]:
    from rich.text import Text

    from quire.cli.memory_view import listing, printable

    if not now.rows:
        return []
    has_adapters = any(row.adapter for row in now.rows)
    more = ["adapter"] if has_adapters else []
    grid = listing("request", "tenant", "does", *more, "tokens", "blocks", "shared", words=3 + len(more))
    for row in now.rows[:MOST_SHOWN]:
        name = row.session if row.kind in ("session", "asleep") else row.name
        numbers = (str(row.known), str(row.blocks), str(row.shared))
        own = [printable(row.adapter)] if has_adapters else []
        grid.add_row(printable(name), printable(row.tenant if _is_request(row) else ""), _does(row), *own, *numbers)
    left = len(now.rows) - len(now.rows[:MOST_SHOWN]) + now.hidden
    return [Text(""), grid, *([Text(f"  and {left} more")] if left > 0 else [])]


def _is_request(row: RowFigures) -> bool:
    return row.kind not in ("session", "asleep")


def _does(row: RowFigures) -> str:
    if row.kind == "asleep":
        return {"host": "asleep in host memory", "disk": "asleep on disk"}.get(row.place, "asleep")
    return {"session": "session, idle", "swapped": "swapped out"}.get(row.kind, row.kind)


def _tenants(now: FeedFrame) -> list[RenderableType]:
    from rich.text import Text

    from quire.cli.memory_view import listing, printable

    if len(now.tenants) < 2:
        return []
    grid = listing("tenant", "rows", "waiting", "blocks", "tokens", words=1)
    for one in now.tenants[:MOST_SHOWN]:
        grid.add_row(printable(one.name or "(none)"), str(one.rows), str(one.waiting), str(one.blocks), str(one.tokens))
    return [Text(""), grid]
