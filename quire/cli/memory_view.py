"""Draws a map of an engine's memory in a terminal: bars, cells and tables. It is readable without colours."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.values import readable_bytes
from quire.messages.memory_map import (
    CACHED,
    EMPTY,
    HELD,
    MOVING,
    SHARED,
    DeviceBlocks,
    DiskBlocks,
    ExpertLoad,
    HostBlocks,
    MemoryMap,
    Pressure,
    Sleeping,
)

LOOKS = {
    HELD: ("▒", "green", "held once"),
    SHARED: ("█", "magenta", "shared"),
    MOVING: ("»", "yellow", "moving"),
    CACHED: ("░", "blue", "cached"),
    EMPTY: ("·", "bright_black", "empty"),
}
"""Glyph, colour and name of each state of a block. A cell shows its most frequent state; in a tie, the first here."""
MAP_ROWS = 16
WIDEST_BAR = 32
NAMED = 20
"""Lines of a table."""
BESIDE_NAMES = 56
"""Characters that the numbers beside a name take."""
HOTTEST = 4


def draw(found: MemoryMap, console: Console, where: str) -> RenderableType:
    """The whole view. `where`: the server or file that the map is from."""
    parts = [
        _title(found, where),
        draw_tiers(found.device, found.host, found.disk, found.pressure, console),
        *_cells(found, console),
        _summary(found),
    ]
    if found.groups:
        parts.append(_groups(found))
    parts += _owners(found, console)
    if found.sleeping is not None:
        parts += _sleeping(found.sleeping, console)
    if found.experts:
        parts += _experts(found.experts)
    return Group(*parts)


def _title(found: MemoryMap, where: str) -> Text:
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.taken))
    return Text.assemble(("memory", "bold"), f" at {taken} of {where}", no_wrap=True, overflow="crop")


# Tiers


def draw_tiers(
    device: DeviceBlocks, host: HostBlocks | None, disk: DiskBlocks | None, pressure: Pressure, console: Console
) -> Table:
    """How full each tier is, a line each."""
    grid = plain_grid()
    parts = {
        HELD: device.held, SHARED: device.shared, MOVING: device.moving, CACHED: device.cached, EMPTY: device.empty,
    }  # fmt: skip
    used = f"{device.used} of {device.capacity} blocks"
    size = (
        f"{readable_bytes(device.used * device.block_bytes)} of {readable_bytes(device.capacity * device.block_bytes)}"
    )
    grid.add_row("device", _bar(parts, console), used, size, f"{device.cached} cached{_level(pressure.device)}")
    if host is not None:
        parts = {HELD: host.owned, CACHED: max(0, host.used - host.owned), EMPTY: host.slots - host.used}
        size = f"{readable_bytes(host.used * host.block_bytes)} of {readable_bytes(host.slots * host.block_bytes)}"
        used = f"{host.used} of {host.slots} blocks"
        grid.add_row("host", _bar(parts, console), used, size, f"{host.owned} owned{_level(pressure.host)}")
    if disk is not None:
        most = max(disk.blocks, disk.capacity // max(1, disk.block_bytes))
        parts = {HELD: disk.owned, CACHED: disk.blocks - disk.owned, EMPTY: most - disk.blocks}
        size = f"{readable_bytes(disk.blocks * disk.block_bytes)} of {readable_bytes(disk.capacity)}"
        paused = ", writes paused" if disk.is_paused else ""
        notes = f"{disk.owned} owned{paused}{_level(pressure.disk)}"
        grid.add_row("disk", _bar(parts, console), f"{disk.blocks} blocks", size, notes)
    return grid


def _level(level: int) -> str:
    return f"; past watermark {level}" if level else ""


def _bar(parts: dict[str, int], console: Console) -> Text:
    """A bar of shares; every non-zero part has at least one cell."""
    whole = min(WIDEST_BAR, max(8, console.width - 72))  # the numbers beside it matter more
    total, bar, left = sum(parts.values()) or 1, Text(), whole
    for state, count in parts.items():
        width = min(left, max(1, round(whole * count / total))) if count else 0
        width = left if state == EMPTY else width
        bar.append(_glyph(state, console) * width, LOOKS[state][1])
        left -= width
    return bar


def _glyph(state: str, console: Console) -> str:
    return LOOKS[state][0] if console.encoding.startswith("utf") else state


# Blocks


def _cells(found: MemoryMap, console: Console) -> Iterator[RenderableType]:
    width = max(16, console.width - 2)
    each = max(1, -(-len(found.blocks) // (width * MAP_ROWS)))
    states = [_most_frequent(found.blocks[i : i + each]) for i in range(0, len(found.blocks), each)]
    for start in range(0, len(states), width):
        line = Text("  ", no_wrap=True, overflow="crop")
        for state, run in itertools.groupby(states[start : start + width]):
            line.append(_glyph(state, console) * len(list(run)), LOOKS[state][1])
        yield line
    legend = Text("  ")
    for state, (_, colour, meaning) in LOOKS.items():
        legend.append(f"{_glyph(state, console)} ", colour).append(f"{meaning}  ")
    blocks, sampled = each * found.stride, f", every {_nth(found.stride)} sampled" if found.stride > 1 else ""
    yield legend.append("(a cell is a block)" if blocks == 1 else f"(a cell is {blocks} blocks{sampled})")


def _most_frequent(states: str) -> str:
    counts = Counter(states)
    return max(LOOKS, key=lambda state: counts[state])


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _summary(found: MemoryMap) -> Table:
    sharing, transfers, owners, grid = found.sharing, found.transfers, found.owners, plain_grid()
    saved = readable_bytes(sharing.saved * found.device.block_bytes)
    grid.add_row(
        "sharing",
        f"{sharing.by_one} blocks with one owner, {sharing.by_two} with two, {sharing.by_more} with more; saves "
        f"{sharing.saved} blocks ({saved})",
    )
    if transfers.out or transfers.back or transfers.writes:
        grid.add_row(
            "transfers", f"{transfers.out} blocks to host, {transfers.back} to device, {transfers.writes} to disk"
        )
    if sharing.unaccounted:
        grid.add_row("leaked", f"{sharing.unaccounted} blocks have no known owner: please report this")
    swapped = f" ({owners.swapped} swapped out)" if owners.swapped else ""
    grid.add_row(
        "owners",
        f"{owners.running} running, {owners.loading} loading, {owners.waiting} waiting{swapped}, "
        f"{owners.sessions} sessions between turns",
    )
    return grid


def _groups(found: MemoryMap) -> Table:
    """Blocks by cache group."""
    grid = listing("cache group", "layers", "held", "cached", "bytes", words=1)
    for group in found.groups:
        name = {
            "full": "every token",
            "window": f"window of {group.window} tokens",
            "state": f"recurrent states of {group.state_blocks} blocks",
        }[group.kind]
        size = readable_bytes((group.held + group.cached) * found.device.block_bytes)
        grid.add_row(name, str(group.layers), str(group.held), str(group.cached), size)
    return grid


# Owners


def _owners(found: MemoryMap, console: Console) -> list[RenderableType]:
    owners = found.owners
    if not owners.largest:
        return []
    columns = ["by group"] if found.groups else []
    grid = listing("owner", "kind", "tenant", "tokens", "blocks", "shared", *columns, words=3)
    for owner in owners.largest[:NAMED]:
        name = owner.name if not owner.session else f"{owner.name} (session {owner.session})"
        numbers = [str(owner.tokens), str(owner.blocks), str(owner.shared)]
        numbers += [" + ".join(map(str, owner.by_group))] if found.groups else []
        grid.add_row(printable(name, console), owner.kind, printable(owner.tenant), *numbers)
    more = owners.running + owners.loading + owners.swapped + owners.sessions - len(owners.largest[:NAMED])
    return [Text(""), grid, *([Text(f"  and {more} more")] if more else [])]


def _sleeping(sleeping: Sleeping, console: Console) -> list[RenderableType]:
    unknown = f", {sleeping.unknown} not looked up" if sleeping.unknown else ""
    title = Text.assemble(
        ("\nasleep", "bold"),
        f" {sleeping.count} session{'s' if sleeping.count != 1 else ''}: {sleeping.in_host} in host memory, "
        f"{sleeping.on_disk} on disk, {sleeping.nowhere} without saved KV{unknown}",
    )
    if not sleeping.latest:
        return [title]
    grid = listing("session", "tenant", "in", "tokens", "saved", words=3)
    for one in sleeping.latest[:NAMED]:
        grid.add_row(
            printable(one.name, console), printable(one.tenant), one.place, str(one.tokens), str(one.kv_tokens)
        )
    return [title, grid]


# Experts


def _experts(layers: Sequence[ExpertLoad]) -> list[RenderableType]:
    loads = [load.max_over_mean for load in layers]
    title = Text.assemble(
        ("\nexperts", "bold"),
        f" {len(layers[0].chosen)} in each of {len(layers)} layers; max / mean "
        f"{sum(loads) / len(loads):.2f} on average, {max(loads):.2f} at worst",
    )
    grid = listing("layer", "choices", "max / mean", f"hottest {HOTTEST}", words=0)
    uneven = sorted(layers, key=lambda load: -load.max_over_mean)[:NAMED]
    for load in sorted(uneven, key=lambda load: load.layer):
        hottest = "  ".join(f"{expert}: {100 * share:.1f}%" for expert, share in load.hottest(HOTTEST))
        grid.add_row(str(load.layer), str(sum(load.chosen)), f"{load.max_over_mean:.2f}", hottest)
    more = len(layers) - len(uneven)
    return [title, grid, *([Text(f"  and {more} layers that are more even")] if more else [])]


# Tables


def plain_grid() -> Table:
    """A table of names and values."""
    grid = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    grid.add_column(style="bold", no_wrap=True, overflow="crop")
    return grid


def listing(*names: str, words: int) -> Table:
    """A table whose columns are numbers, except for the first `words`."""
    grid = Table(box=None, pad_edge=True, padding=(0, 1), header_style="bold")
    for i, name in enumerate(names):
        grid.add_column(name, justify="left" if i < words else "right", no_wrap=True, overflow="crop")
    return grid


def printable(name: str, console: Console | None = None) -> Text:
    """A name that a user chose, without control characters. The end is kept: it may be the sequence number."""
    room = 16 if console is None else max(16, console.width - BESIDE_NAMES)
    clean = "".join(character if character.isprintable() else "?" for character in name)
    if len(clean) > room:
        clean = f"{clean[: room - room // 3 - 2]}..{clean[-(room // 3) :]}"
    return Text(clean)
