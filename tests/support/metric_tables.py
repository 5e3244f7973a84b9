"""The tables of metrics on docs/metrics.md, from the sections `Metrics:` of docstrings in the package.

`python -m tests.support.metric_tables` writes them into the page. A comment on the page names the classes and
functions whose metrics a table has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/metrics.md"
TABLE = re.compile(r"(<!-- metrics of ([^\n]+) -->\n).*?(<!-- end of metrics -->)", re.DOTALL)
ENTRY = re.compile(r"((?:[\w/]+/\w+, )*[\w/]+/\w+)(?: \((.+?)\))?: (.+)")


class Entry(NamedTuple):
    """Metrics that a docstring describes together."""

    names: list[str]
    unit: str
    meaning: str


def entries(docstring: str) -> list[Entry]:
    """The metrics in the section `Metrics:` of a docstring; [] without one. Raises ValueError for an entry
    that cannot be read."""
    section = re.search(r"^ *Metrics:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    lines = section[1].splitlines() if section else []
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    texts: list[str] = []
    for line in filter(str.strip, lines):
        begins = len(line) - len(line.lstrip()) == indent
        texts = [*texts, line.strip()] if begins else [*texts[:-1], f"{texts[-1]} {line.strip()}"]
    matches = [(text, ENTRY.fullmatch(text)) for text in texts]
    if wrong := [text for text, match in matches if match is None]:
        raise ValueError(f"not `name (unit): meaning`: {wrong[0]}")
    return [Entry(match[1].split(", "), match[2] or "", match[3]) for _, match in matches if match]


def documented(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, list[Entry]]]:
    """Qualified names of the classes and functions of a module that describe metrics, with the entries."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = f"{prefix}{node.name}"
            if described := entries(ast.get_docstring(node) or ""):
                yield name, described
            yield from documented(node, f"{name}.")


def all_entries() -> dict[str, list[Entry]]:
    """The entries of the whole package, by qualified name."""
    paths = sorted((ROOT / "titanlite").rglob("*.py"))
    return dict(pair for path in paths for pair in documented(ast.parse(path.read_text(encoding="utf-8"))))


def is_described(name: str) -> bool:
    """Whether an entry describes a metric. A word in capitals in an entry stands for any text."""
    names = [name for described in all_entries().values() for entry in described for name in entry.names]
    return any(re.fullmatch(re.sub(r"[A-Z]{2,}", ".+", known), name) for known in names)


def refreshed(page: str) -> str:
    """The page with the present tables."""
    known = all_entries()

    def table(match: re.Match[str]) -> str:
        rows = [entry for name in match[2].split(", ") for entry in known[name]]
        cells = [(", ".join(f"`{name}`" for name in row.names), row.unit, row.meaning) for row in rows]
        lines = [f"| {names} | {unit} | {meaning} |".replace("|  |", "| |") for names, unit, meaning in cells]
        return "\n".join(
            [f"{match[1]}| metric | unit | meaning |", "| --- | --- | --- |", *lines, "", match[3]]
        )

    return TABLE.sub(table, page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
