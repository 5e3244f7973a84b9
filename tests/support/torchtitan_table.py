"""The table of torchtitan's keys in docs/coming-from.md, made from the tables that `titanlite migrate` uses.

`python -m tests.support.torchtitan_table` writes it into the page."""

from __future__ import annotations

import json
from pathlib import Path

from titanlite.contrib.migrate import reason_without_counterpart
from titanlite.contrib.torchtitan_keys import CONVERTED, HARMLESS, RENAMED

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/coming-from.md"
BEGIN, END = "<!-- keys of torchtitan, generated -->\n", "<!-- end of the keys -->\n"
KEYS: dict[str, dict[str, object]] = json.loads((ROOT / "tests/golden/torchtitan_keys.json").read_text())


def row(key: str) -> str:
    """The table's entry for a key of torchtitan."""
    if key in RENAMED:
        return f"`{RENAMED[key]}`"
    if key in CONVERTED:
        return f"`{CONVERTED[key].key}`: {CONVERTED[key].note}"
    if reason := reason_without_counterpart(key):
        return f"none: {reason}{'; any other value than the default is a TO DO' if key in HARMLESS else ''}"
    return "the same"


def table() -> str:
    """Every key of torchtitan 0.1.0 to 0.3.0 that is not the same in titanlite. Keys with the same entry
    share a row; keys without a counterpart and without a remark are lists."""
    rows = {key: row(key) for key in sorted(set().union(*KEYS.values()))}
    lines = ["| torchtitan | titanlite |", "| --- | --- |"]
    without = {"none: not supported": "Not supported: ", "none: always so": "Always so in titanlite: "}
    for text in dict.fromkeys(rows.values()):
        if text not in {"the same", *without}:
            lines.append(f"| {', '.join(f'`{k}`' for k in rows if rows[k] == text)} | {text} |")
    for text, title in without.items():
        lines += ["", title + ", ".join(f"`{k}`" for k in rows if rows[k] == text) + "."]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the current table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
