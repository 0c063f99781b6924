"""What a server says when it is ready: what it is, what it has, where it is, and a line to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cli.values import readable_bytes

if TYPE_CHECKING:
    from quire.server.context import ServerContext


def show(server: ServerContext, url: str) -> None:
    """Print it on stderr."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(server, url):
        table.add_row(name, value)
    console = Console(stderr=True)
    console.print(Panel(table, title=f"quire {server.version}", title_align="left", expand=False))
    console.print(curl(server, url), markup=False, highlight=False, soft_wrap=True)


def rows(server: ServerContext, url: str) -> list[tuple[str, str]]:
    """The facts, by name."""
    facts = server.llm.facts
    several = facts.cache_tokens / facts.max_model_len
    return [
        ("model", f"{', '.join(server.names)} ({facts.dtype}, {facts.max_model_len:,} tokens of context)"),
        ("device", facts.device),
        ("weights", readable_bytes(facts.weight_bytes)),
        ("KV cache", f"{readable_bytes(facts.kv_bytes)}: {facts.cache_tokens:,} tokens, {several:.1f} full contexts"),
        ("at once", f"{facts.max_num_seqs:,} requests, {facts.max_num_batched_tokens:,} tokens a step"),
        ("API keys", "needed" if server.keys else "none: whoever reaches the address may use it"),
        ("address", f"{url}/v1" if url.startswith("http") else url),
        ("ready in", f"{facts.start_seconds:.1f} s"),
    ]


def curl(server: ServerContext, url: str) -> str:
    """A line that can be pasted."""
    where = url + "/v1" if url.startswith("http") else f"--unix-socket {server.config.uds} http://quire/v1"
    key = " -H 'Authorization: Bearer '$QUIRE_API_KEY" if server.keys else ""
    said = '[{"role": "user", "content": "Hello!"}]'
    body = f'{{"model": "{server.names[0]}", "messages": {said}, "temperature": 0.2}}'
    return f"curl {where}/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
