"""Plots a run as one self-contained SVG, with light and dark colors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

from quire.cli.bench.load.measure import Distribution

WIDTH, HEIGHT = 960, 660
PANEL_WIDTH, PANEL_HEIGHT = 400, 220
LEFT, RIGHT, FIRST_ROW, SECOND_ROW = 60, 530, 80, 380
POINTS = 200
"""Points of a curve: more would not be visible."""
TIMELINE_BINS = 60
"""Intervals of the timeline."""

STYLE = """
  svg { background: #fff; color: #1f2328; font: 12px system-ui, sans-serif; }
  text { fill: currentColor; } .small { font-size: 11px; opacity: .7; } .title { font-size: 14px; font-weight: 600; }
  .axis, .grid { stroke: currentColor; fill: none; } .axis { opacity: .5; } .grid { opacity: .12; }
  .a { stroke: #2563eb; } .b { stroke: #d97706; } .bad { stroke: #dc2626; }
  .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .goal { stroke-dasharray: 5 4; fill: none; }
  .fill-a { fill: #2563eb; } .fill-b { fill: #d97706; } .fill-bad { fill: #dc2626; }
  @media (prefers-color-scheme: dark) { svg { background: #0d1117; color: #e6edf3; } }
"""


class PlottedRun(Protocol):
    """What is drawn of a run: of `RunMeasurements`, or of a simulation."""

    goals: dict[str, float]
    distributions: dict[str, Distribution]

    @property
    def run(self) -> Any: ...
    @property
    def most_open(self) -> int: ...
    def tokens_over_time(self, width: float = 1.0) -> list[float]: ...
    def failures_over_time(self, width: float = 1.0) -> list[float]: ...
    def open_requests(self) -> list[tuple[float, int]]: ...


def plot(measured: PlottedRun, title: str, subtitle: str) -> str:
    """The SVG: three latency distributions and a timeline."""
    values, goals = measured.distributions, measured.goals
    panels = [
        _distribution(LEFT, FIRST_ROW, "Time to first token", values["ttft"], goals.get("ttft")),
        _distribution(RIGHT, FIRST_ROW, "Between tokens", values["itl"], goals.get("itl")),
        _distribution(LEFT, SECOND_ROW, "Whole request", values["e2el"], goals.get("e2el")),
        _timeline(RIGHT, SECOND_ROW, measured),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<text x="{LEFT}" y="28" class="title">{escape(title)}</text>',
            f'<text x="{LEFT}" y="46" class="small">{escape(subtitle)}</text>',
            *panels,
            "</svg>\n",
        ]
    )


class Axis:
    """Maps values to positions along an axis, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, length: float, log: bool = False) -> None:
        self._is_log = log
        self._low, self._high = self._scaled(low), self._scaled(high)
        self._start, self._length = start, length

    def _scaled(self, value: float) -> float:
        return math.log10(_visible(value)) if self._is_log else value

    def at(self, value: float) -> float:
        """Position of `value`; values outside the range are at the ends."""
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return round(self._start + self._length * min(1.0, max(0.0, share)), 1)


def _distribution(x: float, y: float, title: str, spread: Distribution, goal: float | None) -> str:
    """A cumulative distribution."""
    parts = [f'<text x="{x}" y="{y - 8}">{escape(title)}</text>']
    values = spread.values
    if not values:
        return "\n".join([*parts, _frame(x, y), _label(x + PANEL_WIDTH / 2, y + PANEL_HEIGHT / 2, "none", "middle")])
    low, high = _decades(min(values[0], goal or math.inf), max(values[-1], goal or 0.0))
    across, up = Axis(low, high, x, PANEL_WIDTH, log=True), Axis(0, 100, y + PANEL_HEIGHT, -PANEL_HEIGHT)
    parts += [_tick_x(across.at(tick), y, _milliseconds(tick)) for tick in _ticks_log(low, high)]
    parts += [_tick_y(x, up.at(share), f"{share}%") for share in (0, 25, 50, 75, 100)]
    step = max(1, len(values) // POINTS)
    shown = [*range(0, len(values) - 1, step), len(values) - 1]
    points = [(across.at(values[0]), up.at(0))]
    points += [(across.at(values[i]), up.at(100 * (i + 1) / len(values))) for i in shown]
    parts += [_frame(x, y), _line(points, "a")]
    for percent in (50, 99):
        value = spread.at(percent)
        place, height = across.at(value), up.at(percent)
        parts.append(f'<circle cx="{place}" cy="{height}" r="3.5" class="fill-a"/>')
        parts.append(_beside(x, place, height + 14, f"p{percent} {_milliseconds(value)}"))
    if goal is not None:
        parts.append(f'<path d="M{across.at(goal)} {y}v{PANEL_HEIGHT}" class="goal bad"/>')
        parts.append(_beside(x, across.at(goal), y + PANEL_HEIGHT - 8, f"goal {_milliseconds(goal)}"))
    return "\n".join(parts)


def _timeline(x: float, y: float, measured: PlottedRun) -> str:
    """Tokens per second and open requests, each on its own scale, with marks for failed requests."""
    seconds = max(measured.run.duration, 1e-3)
    width = seconds / TIMELINE_BINS
    rates = [count / width for count in measured.tokens_over_time(width)][:TIMELINE_BINS]
    open_now = measured.open_requests()
    most_rate, most_open = _round_up(max(rates)), _round_up(measured.most_open)
    across = Axis(0, seconds, x, PANEL_WIDTH)
    up_rate, up_open = (Axis(0, most, y + PANEL_HEIGHT, -PANEL_HEIGHT) for most in (most_rate, most_open))
    parts = [
        f'<text x="{x}" y="{y - 8}"><tspan class="fill-a">■</tspan> output tokens/s  '
        f'<tspan class="fill-b">■</tspan> open requests (top: {most_open:g})</text>'
    ]
    parts += [_tick_x(across.at(second), y, f"{second:g} s") for second in _ticks(seconds)]
    parts += [_tick_y(x, up_rate.at(rate), _short(rate)) for rate in _ticks(most_rate)]
    steps: list[tuple[float, float]] = []
    for at, many in open_now[:: max(1, len(open_now) // (2 * POINTS))]:
        steps += [(across.at(at), steps[-1][1] if steps else up_open.at(0)), (across.at(at), up_open.at(many))]
    curve = [(across.at((i + 0.5) * width), up_rate.at(rate)) for i, rate in enumerate(rates)]
    parts += [_frame(x, y), _line(steps, "b"), _line(curve, "a")]
    for i, count in enumerate(measured.failures_over_time(width)):
        if count:
            parts.append(
                f'<circle cx="{across.at((i + 0.5) * width)}" cy="{y + PANEL_HEIGHT - 4}" r="3" class="fill-bad">'
                f"<title>{count:.0f} failed</title></circle>"
            )
    return "\n".join(parts)


def _frame(x: float, y: float) -> str:
    return f'<path d="M{x} {y}v{PANEL_HEIGHT}h{PANEL_WIDTH}" class="axis"/>'


def _line(points: Sequence[tuple[float, float]], which: str) -> str:
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{places}" class="line {which}"/>'


def _beside(panel: float, x: float, y: float, text: str) -> str:
    """A label to the right of `x`, or to its left where the panel ends."""
    is_right = x > panel + PANEL_WIDTH * 0.7
    return _label(x - 7 if is_right else x + 7, y, text, "end" if is_right else "start")


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="small" text-anchor="{anchor}">{escape(text)}</text>'


def _tick_x(x: float, y: float, text: str) -> str:
    low = y + PANEL_HEIGHT
    return f'<path d="M{x} {y}v{PANEL_HEIGHT}" class="grid"/>' + _label(x, low + 16, text, "middle")


def _tick_y(x: float, y: float, text: str) -> str:
    return f'<path d="M{x} {y}h{PANEL_WIDTH}" class="grid"/>' + _label(x - 6, y + 4, text, "end")


MIN_MS = 1e-2
"""Smaller values are drawn here: events that arrive together are 0 ms apart, which has no logarithm."""


def _visible(value: float) -> float:
    return max(value, MIN_MS)


def _decades(low: float, high: float) -> tuple[float, float]:
    """The ends of a logarithmic axis, rounded to 1, 2 or 5 times a power of ten."""
    low, high = _visible(low), _visible(high)
    ladder = [digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)]
    begin = max((step for step in ladder if step <= low * 0.999), default=ladder[0])
    end = min((step for step in ladder if step >= high * 1.001), default=ladder[-1])
    return begin, end


def _ticks_log(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades <= 2.5 else (1,)
    ladder = [digit * 10.0**power for power in range(-4, 9) for digit in digits]
    return [tick for tick in ladder if low * 0.999 <= tick <= high * 1.001]


def _ticks(high: float) -> list[float]:
    step = _nice(high / 5)
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def _round_up(value: float) -> float:
    """The end of an axis that starts at 0: a round number, at least 1."""
    return max(1.0, _nice(value)) if value > 0 else 1.0


def _nice(value: float) -> float:
    """The next of …, 0.5, 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * 0.999)


def _milliseconds(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
