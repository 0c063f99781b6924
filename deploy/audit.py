"""`make audit`: quire's dependencies, direct and indirect, with versions and licences; fails if one does not fit.

A licence is read from the installed package: its expression, its classifiers, or its licence field. Known
vulnerabilities are looked up with pip-audit where it is installed; it needs a network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata

FITTING = (
    "Apache", "MIT", "BSD", "ISC", "PSF", "Python Software Foundation", "Unlicense", "Zlib", "0BSD", "HPND", "CC0",
    "MPL", "Mozilla Public License", "BlueOak", "NCSA", "CNRI", "BSL-1.0", "Boost",
)  # fmt: skip
"""Licences that ask nothing of software that only uses the package (MPL: of its own files)."""
PROPRIETARY = ("nvidia",)
"""Packages under their maker's own terms, which permit use with its hardware."""
KNOWN = {"triton": "MIT"}
"""Licences that a package's metadata leaves out, read from its files."""


@dataclass(frozen=True)
class Dependency:
    """An installed package that quire needs."""

    name: str
    version: str
    licence: str
    needed_by: str
    """Why it is there: "quire", one of its extras, or another package."""

    @property
    def fits(self) -> bool:
        if self.name.startswith(PROPRIETARY):
            return True
        return all(map(_fits, re.split(r" AND |, and ", self.licence)))  # all of them apply; of alternatives, one


def _fits(licence: str) -> bool:
    return any(re.search(rf"\b{re.escape(each)}", licence, re.IGNORECASE) for each in FITTING)


def licence_of(package: metadata.Distribution) -> str:
    """The licence that the package names, in one line."""
    about = package.metadata
    if known := KNOWN.get(_normal(about["Name"])):
        return known
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = about.get_all("Classifier") or []
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    named = [each for each in named if each != "OSI Approved"]
    if named:
        return ", ".join(named)
    text = (about.get("License") or "").strip()
    return text.splitlines()[0][:80] if text else "not named"


def dependencies(extras: Iterable[str] = ()) -> list[Dependency]:
    """Everything that an installed quire with these extras imports, as far as it is installed here."""
    found: dict[str, Dependency] = {}
    queue = [("quire", frozenset({"", *extras}), "")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        name, wanted, parent = queue.pop(0)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform, or an extra that is not installed
            continue
        if name != "quire" and name not in found:
            found[name] = Dependency(name, package.version, licence_of(package), parent)
        needed = [_needed(requirement, wanted) for requirement in package.requires or ()]
        queue += [(*each, name) for each in needed if each is not None]
    return sorted(found.values(), key=lambda each: each.name)


def _needed(requirement: str, extras: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """(name, extras) of a requirement, if its marker holds here with one of these extras."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if parsed.marker is not None and not any(parsed.marker.evaluate({"extra": extra}) for extra in extras):
        return None
    return _normal(parsed.name), frozenset({"", *parsed.extras})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def vulnerabilities() -> str:
    """What pip-audit reports, or why it was not asked."""
    if importlib.util.find_spec("pip_audit") is None:
        return "vulnerabilities: not looked up: pip-audit is not installed (pip install pip-audit)"
    ran = subprocess.run([sys.executable, "-m", "pip_audit", "--progress-spinner", "off"],
                         capture_output=True, text=True, check=False)  # fmt: skip
    return f"vulnerabilities, by pip-audit:\n{ran.stdout or ran.stderr}".rstrip()


def main() -> int:
    """Print the table; 1 if a licence does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=["cuda", "ray", "traces"], help="an extra to include")
    parser.add_argument("--json", action="store_true", help="as JSON, and without vulnerabilities")
    args = parser.parse_args()
    found = dependencies(args.extra)
    wrong = [each for each in found if not each.fits]
    if args.json:
        print(json.dumps([asdict(each) | {"fits": each.fits} for each in found], indent=1))
        return 1 if wrong else 0
    width = max(len(each.name) for each in found)
    for each in found:
        mark = " " if each.fits else "!"
        print(f"{mark} {each.name:<{width}}  {each.version:<14}  {each.licence:<40.40}  for {each.needed_by}")
    print(f"{len(found)} packages; {len(wrong)} with a licence that does not fit, or none named (!)")
    print(vulnerabilities())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
