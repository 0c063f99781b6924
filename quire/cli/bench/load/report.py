"""The report of a run: tables for the terminal, and JSON with vLLM's keys where it has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cli.bench.common import energy_text
from quire.cli.bench.load.measure import METRICS, RunMeasurements
from quire.cli.terminal import table
from quire.errors import ValidationError

LATE_MS = 25.0
"""If the 99th percentile of send delays is above this, the load was not as requested."""
BUSY_CPU_SHARE = 0.9
"""A load generator that uses more of a core may have limited the result."""


def result_metrics(
    measured: RunMeasurements, metrics: Sequence[str], percents: Sequence[float], detailed: bool = False
) -> dict[str, Any]:
    """The metrics that --save-result writes."""
    found: dict[str, Any] = {
        "duration": measured.run.duration,
        "completed": len(measured.done),
        "failed": sum(measured.failures.values()),
        "failures": dict(measured.failures),
        "total_input_tokens": measured.input_tokens,
        "total_cached_tokens": measured.cached_tokens,
        "total_output_tokens": measured.output_tokens,
        "request_throughput": measured.per_second(len(measured.done)),
        "request_goodput": measured.per_second(measured.good) if measured.goals else None,
        "good_requests": measured.good if measured.goals else None,
        "goodput_slo_ms": measured.goals or None,
        "output_throughput": measured.per_second(measured.output_tokens),
        "total_token_throughput": measured.per_second(measured.input_tokens + measured.output_tokens),
        "max_output_tokens_per_s": max(measured.tokens_over_time()),
        "max_concurrent_requests": measured.most_open,
        "client_late_p99_ms": measured.send_delays.at(99),
        "client_cpu_share": measured.cpu_share,
    }
    if measured.metered:
        found |= {
            "total_joules": measured.joules,
            "joules_per_output_token": measured.joules / max(1, measured.output_tokens),
            "energy_estimated": any(each.estimated for each in measured.metered),
            "energy_source": measured.metered[-1].source,
        }
    for name in metrics:
        spread = measured.distributions[name]
        found |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        found |= {f"p{percent:g}_{name}_ms": spread.at(percent) for percent in percents}
    if detailed:
        results = measured.run.results
        found["input_lens"] = [result.prompt_tokens for result in results]
        found["output_lens"] = [result.output_tokens for result in results]
        found["start_times"] = [result.sent - measured.run.start for result in results]
        found["ttfts"] = [result.ttft if result.first else 0.0 for result in results]
        found["itls"] = [result.gaps for result in results]
        found["errors"] = ["" if result.ok else f"{result.failure}: {result.detail}" for result in results]
    return found


def print_report(measured: RunMeasurements, metrics: Sequence[str], percents: Sequence[float], title: str) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    print(table(_totals(measured), title))
    print()
    if measured.done:
        grid = Table("milliseconds", box=None, pad_edge=False, header_style="")
        columns = ["mean", "median", "std", *(f"p{percent:g}" for percent in percents)]
        for column in columns:
            grid.add_column(column, justify="right")
        for name in metrics:
            spread = measured.distributions[name]
            values = [spread.mean, spread.median, spread.std, *(spread.at(percent) for percent in percents)]
            cells = [f"{value:.2f}" for value in values] if spread.values else ["–"] * len(values)
            grid.add_row(f"{METRICS[name]} ({name})", *cells)
        Console().print(grid)
    _show_failures(measured)
    for remark in _remarks(measured):
        print(remark)


def _totals(measured: RunMeasurements) -> list[tuple[str, str]]:
    run, done = measured.run, len(measured.done)
    rows = [
        ("requests", f"{done} completed, {sum(measured.failures.values())} failed, in {run.duration:.2f} s"),
        ("throughput", f"{measured.per_second(done):.2f} requests/s"),
        ("", f"{measured.per_second(measured.output_tokens):.1f} output tokens/s, "
             f"{measured.per_second(measured.input_tokens + measured.output_tokens):.1f} with prompts"),
        ("tokens", f"{measured.input_tokens} in ({measured.cached_tokens} cached), {measured.output_tokens} out"),
        ("peaks", f"{measured.most_open} requests at once, {max(measured.tokens_over_time()):.0f} tokens in a second"),
        ("generator", f"{100 * measured.cpu_share:.0f}% of a core; requests sent {measured.send_delays.at(99):.1f} ms "
                      "late (p99)"),
    ]  # fmt: skip
    if measured.metered:
        is_estimate = any(each.estimated for each in measured.metered)
        tokens = max(1, measured.output_tokens)
        rows.append(("energy", energy_text(measured.joules, tokens, measured.metered[-1].source, is_estimate)))
    if measured.goals:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in measured.goals.items())
        share = 100 * measured.good / len(run.results) if run.results else 0.0
        rows.append(("goodput", f"{measured.per_second(measured.good):.2f} requests/s: {share:.1f}% with {limits}"))
    return rows


def _show_failures(measured: RunMeasurements) -> None:
    if not measured.failures:
        return
    examples = {result.failure: result.detail for result in reversed(measured.run.results) if not result.ok}
    rows = [(f"{count} × {kind}", examples[kind]) for kind, count in measured.failures.most_common()]
    print("\n" + table(rows, "failures"))


def _remarks(measured: RunMeasurements) -> list[str]:
    """Warnings about the validity of the metrics."""
    remarks = []
    if measured.done and not measured.is_counted_by_server:
        remarks.append(
            "The server sent no usage: every event with text was counted as one token, and prompts were not counted."
        )
    if measured.send_delays.at(99) > LATE_MS or measured.cpu_share > BUSY_CPU_SHARE:
        remarks.append(
            "The load generator could not keep up: requests were sent late, or it used a whole core. The server is "
            "faster than these results; use less load, or run the generator on another machine."
        )
    return remarks


def write_json(path: str, found: dict[str, Any], flag: str) -> None:
    """Write a JSON object, one key per line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    write_text(path, f"{{\n{lines}\n}}\n", flag)


def write_text(path: str, text: str, flag: str) -> None:
    """Write a file; an error names the flag."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"{flag} {path}: {error.strerror}") from error
