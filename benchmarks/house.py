"""The shape of the code: files, lines, fan-in and fan-out of each package, longest functions, names used twice.

python benchmarks/house.py [FOLDER...]     as Markdown, a column for each folder that has a `quire` package
"""

from __future__ import annotations

import ast
import collections
import sys
from dataclasses import dataclass, field
from pathlib import Path

SMALL = 40
"""Lines up to which a module counts as small."""
LONGEST = 10


@dataclass
class Package:
    """What is counted of one package."""

    files: int = 0
    lines: int = 0
    imports: set[str] = field(default_factory=set)
    importers: set[str] = field(default_factory=set)


@dataclass
class House:
    """What is counted of the whole."""

    packages: dict[str, Package]
    functions: list[tuple[int, str]]
    classes: dict[str, list[str]]
    small: int
    over_400: int
    none_tests: int


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "quire"


def survey(folder: Path) -> House:
    """Count everything below `folder`/quire."""
    packages: dict[str, Package] = collections.defaultdict(Package)
    functions: list[tuple[int, str]] = []
    classes: dict[str, list[str]] = collections.defaultdict(list)
    small = over = none_tests = 0
    for path in sorted((folder / "quire").rglob("*.py")):
        relative = path.relative_to(folder)
        text = path.read_text()
        lines = len(text.splitlines())
        name = relative.parts[1] if len(relative.parts) > 2 else "(top)"
        package = packages[name]
        package.files += 1
        package.lines += lines
        small += lines <= SMALL and path.name != "__init__.py"
        over += lines > 400
        if name == "scheduler" or relative.as_posix() == "quire/engine/core.py":
            none_tests += text.count("is None") + text.count("is not None")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
                other = package_of(node.module or "")
                if other != name and other in {entry.name for entry in (folder / "quire").iterdir() if entry.is_dir()}:
                    package.imports.add(other)
                    packages[other].importers.add(name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((length, f"{relative.relative_to('quire')}: `{node.name}`"))
            elif isinstance(node, ast.ClassDef):
                classes[node.name].append(str(relative))
    return House(dict(packages), sorted(functions, reverse=True), classes, small, over, none_tests)


def cells(*values: object) -> str:
    return "| " + " | ".join(str(value) for value in values) + " |"


def report(houses: list[House]) -> None:
    """Print the tables."""
    rows = {
        "Python files": [sum(p.files for p in house.packages.values()) for house in houses],
        "lines": [f"{sum(p.lines for p in house.packages.values()):,}" for house in houses],
        f"modules of {SMALL} lines or fewer": [house.small for house in houses],
        "modules of more than 400 lines": [house.over_400 for house in houses],
        "class names defined more than once": [
            sum(len(places) > 1 for places in house.classes.values()) for house in houses
        ],
        "`is None` tests in scheduler/ and engine/core.py": [house.none_tests for house in houses],
        "functions of more than 60 lines": [sum(length > 60 for length, _ in house.functions) for house in houses],
    }
    print(cells("", *(f"{index}" for index in range(len(houses)))))
    print("|---" * (len(houses) + 1) + "|")
    for name, values in rows.items():
        print(cells(name, *values))
    print()
    print(cells("package", *["files", "lines", "fan-in", "fan-out"] * len(houses)))
    print("|---" * (4 * len(houses) + 1) + "|")
    for name in sorted({name for house in houses for name in house.packages}):
        found = [house.packages.get(name) for house in houses]
        numbers = [
            value
            for package in found
            for value in (
                ("", "", "", "")
                if package is None
                else (package.files, package.lines, len(package.importers), len(package.imports))
            )
        ]
        print(cells(name, *numbers))
    for house in houses:
        print("\nLongest functions:\n")
        for length, place in house.functions[:LONGEST]:
            print(f"- {length} lines, {place}")


if __name__ == "__main__":
    report([survey(Path(name)) for name in sys.argv[1:] or ["."]])
