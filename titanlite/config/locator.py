"""Finds the line of a key in a TOML file, for error messages."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titanlite.config.component import ConfigError


def keys_of(text: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted name and the line number of every table and key in a TOML text."""
    table, arrays = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\-\"]+)\s*\]\]?", line):
            table = header[2].replace('"', "")
            if header[1] == "[[":
                arrays[table] = arrays.get(table, -1) + 1
                table = f"{table}.{arrays[table]}"
            yield table, number
        elif pair := re.match(r"\s*([\w.\-\"]+)\s*=", line):
            key = pair[1].replace('"', "")
            yield (f"{table}.{key}" if table else key), number


class Locator:
    """Finds the place of a dotted key: `file.toml:12`, or the command-line argument that set it.

    `left_out`: lines on the keys of the file that were left out, because the command line chose a component
    without them."""

    def __init__(self, path: str, text: str, tree: Mapping[str, Any] | None = None):
        self.path, self.overridden, self.left_out = path, set[str](), list[str]()
        self._lines, self._tree = dict(keys_of(text)), copy.deepcopy(tree or {})

    def overrides(self, key: str) -> bool:
        """Return whether the command line sets a dotted key, or a key inside it."""
        return any(f"{o}.".startswith(f"{key}.") for o in self.overridden)

    def table_in_file(self, key: str) -> dict[str, Any]:
        """Return the table of a dotted key as the file has it; an empty one if the file has none."""
        node: Any = self._tree
        for name in key.split("."):
            if isinstance(node, list):
                node = dict(zip(map(str, range(len(node))), node))
            node = node.get(name) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    def located(self, error: ConfigError) -> ConfigError:
        """Return the error with the place of its key in front."""
        if error.key is None:
            return error
        key = self._blamed(error)
        place = self._place(key)[0]
        return ConfigError(f"{place}{key}: {error}" if key else f"{place}{error}", key)

    def all_located(self, errors: Sequence[ConfigError]) -> ConfigError:
        """Return one error with a line for each error, in the order of their places."""
        ordered = sorted(errors, key=lambda error: self._place(self._blamed(error))[1])
        lines = dict.fromkeys(str(self.located(error)) for error in ordered)
        return ConfigError("\n".join(lines), errors[0].key, errors)

    def _blamed(self, error: ConfigError) -> str:
        """Return the key of an error; for a table, the key inside it that the command line sets and that the
        message names, if there is one."""
        table = error.key or ""
        inside = sorted(o for o in self.overridden if o.startswith(f"{table}."))
        named = (o for o in inside if re.search(rf"\b{re.escape(o.rpartition('.')[2])}\b", str(error)))
        return next(named, table)

    def _place(self, key: str) -> tuple[str, float]:
        """Return the place of a key, and its position in a report: lines of the file come first."""
        if any(f"{key}.".startswith(f"{o}.") for o in self.overridden):
            return "command line, --", math.inf
        while key:
            if self.overrides(key) and key not in self._lines:
                return "command line, --", math.inf
            if key in self._lines:
                return f"{self.path}:{self._lines[key]}: ", self._lines[key]
            key = key.rpartition(".")[0]
        return f"{self.path}: ", math.inf


def syntax_error(path: object, text: str, complaint: str) -> ConfigError:
    """Return the error for a file whose text is not TOML, with the line and a hint. `complaint`: the parser's
    message."""
    complaint = re.sub(
        r"\(('[^)]*?'),?\)", lambda m: f"[{m[1]}]".replace("', '", ".").replace("'", ""), complaint
    )
    at = re.search(r" \(at line (\d+), column (\d+)\)", complaint)
    if not at:
        return ConfigError(f"{path}: not valid TOML: {complaint}")
    line, hint = text.split("\n")[int(at[1]) - 1], ""
    if "Cannot overwrite a value" in complaint:
        hint = f"; {line.partition('=')[0].strip()} is set twice"
    if not str(path).endswith(".toml"):
        hint = "; is it a TOML file? Its name does not end in .toml"
    elif "Invalid value" in complaint:
        hint = "; strings need straight quotes, write true, 0.5 (not True, .5), and leave out None"
    reason = f"{complaint.replace(at[0], '')} (column {at[2]}){hint}"
    return ConfigError(f"{path}:{at[1]}: not valid TOML: {reason}")
