"""Command-line overrides: parses `--section.key=value` and puts values into the tree of a TOML file.

Values stay text until the type of their key is known, so `--model.flavor=125M` and `--job.description=7` are
strings without quotes. Of several values for one key the last counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from titanlite.config.component import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(text: str) -> dict[str, Any]:
    """Return the tree of a TOML text. Raises ValueError for a text that is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class Word(str):
    """A value as typed on the command line. It is converted once the type of its key is known."""


class Bare(Word):
    """The value `true` of an option without a value."""


def split_overrides(items: Sequence[str]) -> list[tuple[str, Word]]:
    """Parse `--a.b=c`, `--a.b c`, `--a.b` (true) and `--no-a.b` (false) into (key, value) pairs."""
    pairs, rest = list[tuple[str, Word]](), list(items)
    while rest:
        item = rest.pop(0)
        if not item.startswith("--") or item == "--":
            is_word = (item[:1].isalpha() or item[:1] in ("/", ".", "~")) and "=" not in item
            more = "; a command has one TOML file, which comes before all options" if is_word else ""
            raise ConfigError(f"command line: expected --section.key=value, got {item!r}{more}")
        key, equals, text = item[2:].partition("=")
        if (numbered := re.sub(r"\[(\d+)\]", r".\1", key)) != key:
            raise ConfigError(f"command line, --{key}: entries of a list are numbered: write --{numbered}")
        word = Word(text)
        if key.startswith("no-"):
            if equals:
                raise ConfigError(f"command line: --{key} takes no value; write --{key[3:]}={text}")
            key, word = key[3:], Word("false")
        elif not equals:
            word = Word(rest.pop(0)) if rest and not rest[0].startswith("--") else Bare("true")
        pairs.append((key.replace("-", "_"), word))
    return pairs


def split_arguments(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the TOML file with which a command line begins, or None, and the overrides."""
    return (None, argv) if not argv or argv[0].startswith("--") else (argv[0], argv[1:])


def split_words(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that are not options, and the options with their values."""
    words, options, rest = list[str](), list[str](), list(items)
    while rest:
        item = rest.pop(0)
        if not item.startswith("--"):
            words.append(item)
            continue
        options.append(item)
        if not item.startswith("--no-") and "=" not in item and rest and not rest[0].startswith("--"):
            options.append(rest.pop(0))
    return words, options


def put(tree: dict[str, Any], key: str, value: Any) -> list[str]:
    """Set the dotted `key` in `tree`; a table is merged into an existing table, and its own keys may contain
    dots. Returns the keys that are set: `key`, or the keys of the table. Numbers index lists; one past the
    end appends."""
    node: Any = tree
    *parents, leaf = key.split(".")
    try:
        for name in parents:
            node = _entry(node, name, make={})
        return _set(node, leaf, value, key)
    except IndexError:
        raise ConfigError(f"command line: --{key}: list entries are numbered from 0, without gaps") from None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"command line: --{key}: there is no such place in the configuration") from None


def _set(node: Any, name: str, value: Any, key: str) -> list[str]:
    """Set the entry `name` of a table or a list, whose dotted key is `key`. Returns the keys that are set."""
    old, table = _table(_entry(node, name, make=None)), _table(value)
    index: Any = int(name) if isinstance(node, list) else name
    if old is not None and table is not None:
        node[index] = old
        return [k_set for k, v in table.items() for k_set in _set(old, k, v, f"{key}.{k}")]
    node[index] = value
    return [key]


def _entry(node: Any, name: str, make: Any) -> Any:
    """Return an entry of a table or a list. A missing entry is set to `make`; a table in text form is
    parsed."""
    index: Any = int(name) if isinstance(node, list) else name
    if isinstance(node, list):
        if index == len(node):
            node.append(make)
    else:
        node.setdefault(name, make)
    if make is not None and (table := _table(node[index])) is not None:
        node[index] = table
    return node[index]


def _table(value: Any) -> dict[str, Any] | None:
    """Return a value that is a table, parsed if it is text; None for other values."""
    if isinstance(value, Word) and value.lstrip().startswith("{"):
        value = plain_value(value)
    return value if isinstance(value, dict) else None


def as_list(value: Any) -> Any:
    """Return a table with the keys "0", "1", ... as a list; `--list.0=x` makes such a table if there is no
    list. Other values are returned unchanged."""
    if isinstance(value, dict) and list(value) == [str(i) for i in range(len(value))]:
        return list(value.values())
    return value


def plain_value(value: Any) -> Any:
    """Parse a command-line word as a TOML value; a word that is not TOML is a string. Other values are
    returned unchanged."""
    if isinstance(value, dict):
        return {k: plain_value(v) for k, v in value.items()}
    if not isinstance(value, Word):
        return value
    if value in ("True", "False"):
        return value == "True"
    try:
        return parse(f"value = {value}")["value"]
    except ValueError:  # also for a number of thousands of digits
        return str(value)
