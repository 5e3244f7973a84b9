"""The list of modules on docs/architecture.md: the first sentence of each module's docstring, by folder.

`python -m tests.support.module_list` writes it into the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = (
    "<!-- modules, from their docstrings: python -m tests.support.module_list -->\n",
    "<!-- end of modules -->",
)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    text = " ".join(
        (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split()
    )
    return re.split(r"(?<!et al)\.\s+(?=[A-Z`])", text)[0].rstrip(".")


def listing() -> str:
    """Markdown: a table of modules for each folder of the package, the top level first."""
    package = ROOT / "titanlite"
    lines = []
    for folder in [
        package,
        *sorted(path.parent for path in package.rglob("*/__init__.py") if path.parent != package),
    ]:
        modules = [
            path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")
        ]
        name = f"{folder.relative_to(ROOT).as_posix()}/"
        lines += [f"### {name}", "", f"{first_sentence(folder / '__init__.py')}.", ""]
        if folder == package / "tools":
            names = ", ".join(f"`{path.name}`" for path in modules)
            lines += [f"{names}: `titanlite VERB --help` describes each.", ""]
            continue
        lines += ["| module | contents |", "| --- | --- |"]
        lines += [f"| `{path.name}` | {first_sentence(path).replace('|', '&#124;')} |" for path in modules]
        lines.append("")
    return "\n".join(lines)


def refreshed(page: str) -> str:
    """The page with the present list."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{listing()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
