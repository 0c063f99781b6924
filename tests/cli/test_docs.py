"""The docs match the code: links lead to files, and code in CONTRIBUTING is that of the examples and models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_code_in_contributing_is_real_code():
    sources = [*(ROOT / "examples").glob("*.py"), *(ROOT / "quire/models").glob("*.py")]
    examples = "\n".join(path.read_text() for path in sources)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    inner = [line for block in blocks for line in block.splitlines() if line.startswith(" " * 8)]
    assert len(inner) > 15
    assert [line for line in inner if line.strip() not in examples] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_pages_is_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(block, page.name, "exec")


def test_the_readme_names_every_command():
    from quire.cli.bench import BENCHMARKS
    from quire.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text()
    named = [f"quire {name}" for name in COMMANDS if name != "bench"] + [f"quire bench {name}" for name in BENCHMARKS]
    assert [name for name in named if f"`{name}" not in text] == []


def test_the_readme_says_how_long_the_path_to_read_is():
    """Within a fifth."""
    text = (ROOT / "README.md").read_text()
    rows = [(named_in(cell), lines) for cell, lines in re.findall(r"^\| \d+ \| (.*) \| ([\d,]+) \|$", text, re.M)]
    assert len(rows) == 10
    (whole,) = re.findall(r"they are ([\d,]+) lines of about\s([\d,]+)", text)
    everything = set((ROOT / "quire").rglob("*.py"))
    for paths, said in [*rows, (set().union(*(paths for paths, _ in rows)), whole[0]), (everything, whole[1])]:
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        assert lines == pytest.approx(int(said.replace(",", "")), rel=0.2), f"{sorted(paths)[0]} and more"


def named_in(cell: str) -> set[Path]:
    """The files that a cell of README's table names: links to files, and names in the folder of the link before."""
    found, folder = set(), ROOT
    for link, name in re.findall(r"\]\(([^)]+)\)|`([^`]+)`", cell):
        if link and (ROOT / link).is_dir():
            folder = ROOT / link
        elif link:
            found.add(ROOT / link)
        else:
            before, _, inside = name.partition("{")
            parts = inside.rstrip("}").split(",") if inside else [""]
            found |= {folder / f"{before}{part}.py" for part in parts}
    return found


def test_the_page_of_models_names_every_architecture():
    from quire.loading.gguf_names import NAMES
    from quire.models.registry import supported

    text = (ROOT / "docs/models.md").read_text()
    assert [name for name in (*supported(), *NAMES) if f"`{name}`" not in text] == []
