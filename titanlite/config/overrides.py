"""The command line of a configuration: `--section.key=value` in its forms, put into the tree of a TOML file.

Values stay text until the type of their key is known, so `--model.flavor=125M` and `--job.description=7` are
strings without quotes. Of several values for one key the last counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from titanlite.config.component import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Word(str):
    """A value as typed on the command line; it becomes a string, or TOML, once the key's type is known."""


class Bare(Word):
    """The value of an option that was given none: true, for a key that may be."""


def split_overrides(items: Sequence[str]) -> list[tuple[str, Word]]:
    """`--a.b=c`, `--a.b c`, `--a.b` (true) and `--no-a.b` (false) as (key, text) pairs."""
    pairs, rest = list[tuple[str, Word]](), list(items)
    while rest:
        item = rest.pop(0)
        if not item.startswith("--") or item == "--":
            raise ConfigError(f"command line: expected --section.key=value, got {item!r}")
        key, equals, text = item[2:].partition("=")
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
    """A command line's TOML file, if it begins with one, and its overrides."""
    return (None, argv) if not argv or argv[0].startswith("--") else (argv[0], argv[1:])


def split_words(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that stand alone, and options with their values."""
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
    """Set the dotted `key` in `tree`; a table is merged into one that is there. Returns the keys that are
    set: `key`, or those of the table. Numbers index lists; one past the end appends."""
    node: Any = tree
    *parents, leaf = key.split(".")
    try:
        for part in parents:
            node = _entry(node, part, make={})
        old, table = _table(_entry(node, leaf, make=None)), _table(value)
        index: Any = int(leaf) if isinstance(node, list) else leaf
        if old is not None and table is not None:
            node[index] = old
            return [found for k, v in table.items() for found in put(tree, f"{key}.{k}", v)]
        node[index] = value
        return [key]
    except IndexError:
        raise ConfigError(
            f"command line: --{key}: a list's entries are numbered from 0, without gaps"
        ) from None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"command line: --{key}: there is no such place in the configuration") from None


def _entry(node: Any, part: str, make: Any) -> Any:
    """An entry of a table or a list, made where there is none; a table that is still text is read."""
    index: Any = int(part) if isinstance(node, list) else part
    if isinstance(node, list):
        if index == len(node):
            node.append(make)
    else:
        node.setdefault(part, make)
    if make is not None and (table := _table(node[index])) is not None:
        node[index] = table
    return node[index]


def _table(value: Any) -> dict[str, Any] | None:
    """A value that is a table, or spells one."""
    if isinstance(value, Word) and value.lstrip().startswith("{"):
        value = plain(value)
    return value if isinstance(value, dict) else None


def listed(value: Any) -> Any:
    """A table with the keys "0", "1", ..., which `--list.0=x` makes where there is no list, as a list."""
    if isinstance(value, dict) and list(value) == [str(i) for i in range(len(value))]:
        return list(value.values())
    return value


def plain(value: Any) -> Any:
    """A command-line word as the TOML value it spells, else as a string; anything else as it is."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if not isinstance(value, Word):
        return value
    if value in ("True", "False"):
        return value == "True"
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # a syntax error, a number of thousands of digits, too many brackets
        return str(value)
