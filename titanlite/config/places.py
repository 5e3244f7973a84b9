"""Where things stand in a TOML file: the line of a key, for messages, and what a syntax error means."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

from titanlite.config.component import ConfigError

CURLY = tuple("\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u201b")
QUOTES = ('"""', "'''", '"', "'")
# Whole strings and comments; a quote by itself is one that no other closes.
STRINGS = re.compile(
    r'''""".*?"""|\'\'\'.*?\'\'\'|"""|\'\'\'|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|["']''', re.DOTALL
)


def keys_of(text: str) -> Iterator[tuple[str, int]]:
    """Every table and key of a TOML text, as its dotted name and its line."""
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
    """Turns a dotted key into `file.toml:12`, or into the command-line argument that set it."""

    def __init__(self, path: str, text: str):
        self.path, self.overridden = path, set[str]()
        self._lines = dict(keys_of(text))

    def overrides(self, key: str) -> bool:
        """Whether the command line sets a dotted key, or one inside it."""
        return any(f"{o}.".startswith(f"{key}.") for o in self.overridden)

    def located(self, error: ConfigError) -> ConfigError:
        """The same error, with the place of its key in front."""
        if error.key is None:
            return error
        key, place = error.key, self._place(error.key)[0]
        return ConfigError(f"{place}{key}: {error}" if key else f"{place}{error}", key)

    def all_located(self, errors: Sequence[ConfigError]) -> ConfigError:
        """Several errors as one, with a line for each, in the order of their places."""
        ordered = sorted(errors, key=lambda error: self._place(error.key or "")[1])
        lines = dict.fromkeys(str(self.located(error)) for error in ordered)
        return ConfigError("\n".join(lines), errors[0].key, errors)

    def _place(self, key: str) -> tuple[str, float]:
        """Where a key stands, and its rank in a report: the lines of the file, the command line, the rest."""
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
    """What is wrong with a TOML file, from its parser's complaint: the line, and what to write instead."""
    at = re.search(r" \(at line (\d+), column (\d+)\)", complaint)
    opened = _unclosed(text)
    if opened and "Invalid value" not in complaint and (not at or int(at[1]) == opened[0]):
        number, column, quote = opened
        reason = f"the string that begins at column {column} has no end; close it with a straight {quote}"
        return ConfigError(f"{path}:{number}: not valid TOML: {reason}")
    if not at:
        return ConfigError(f"{path}: not valid TOML: {complaint}")
    number, column = int(at[1]), int(at[2])
    line = text.splitlines()[number - 1]
    reason = complaint.replace(at[0], "")
    if reason.startswith(("Cannot overwrite", "Cannot declare")):
        reason = _twice(text, number) or reason
    elif line[column - 1 : column] in CURLY:
        reason = f"column {column} is a curly quote, {line[column - 1]}; write straight ones, \" or '"
    else:
        reason += _hint(line) or f" (column {column})"
    return ConfigError(f"{path}:{number}: not valid TOML: {reason}")


def _unclosed(text: str) -> tuple[int, int, str] | None:
    """Line, column and quote of the first string that has no end."""
    for token in STRINGS.finditer(text):
        if token[0] in QUOTES:
            before = text[: token.start()]
            return before.count("\n") + 1, token.start() - before.rfind("\n"), token[0]
    return None


def _twice(text: str, number: int) -> str:
    """Which key stands in this line and in an earlier one."""
    keys = list(keys_of(text))
    for key, line in keys:
        first = next(at for name, at in keys if name == key)
        if line == number and first < number:
            return f"{key} stands twice, first in line {first}; keep one of them"
    return ""


def _hint(line: str) -> str:
    """What to write instead of a value that is not TOML, where that can be told."""
    pair = re.match(r"\s*([\w.\-\"]+)\s*=\s*([^#]*?)\s*(#.*)?$", line)
    if not pair:
        return ""
    key, value = pair[1], pair[2]
    if value in ("None", "null", "nil"):
        return f": TOML has no {value}; leave the key out, and it stays unset"
    if value in ("True", "False", "TRUE", "FALSE"):
        return f": write {key} = {value.lower()}"
    if number := re.fullmatch(r"([+-]?)(\d*)\.(\d*)", value):
        whole = f"{number[1]}{number[2] or 0}.{number[3] or 0}"
        return f": a number needs digits on both sides of its point; write {key} = {whole}"
    if half := re.fullmatch(r"([\w/~.][^\"']*)[\"']", value):
        return f": a string needs a quote at both ends; write {key} = {json.dumps(half[1])}"
    if re.fullmatch(r"[A-Za-z_/~.][^\"'\[\]{},]*", value):
        return f": a string needs quotes; write {key} = {json.dumps(value)}"
    return ""
