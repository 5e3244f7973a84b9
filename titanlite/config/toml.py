"""One TOML file and dotted overrides in, a tree of frozen dataclasses out -- strictly -- and back to TOML.

Unknown keys, wrong types and unknown choices are errors that name file and line (or the command line), the
key, the nearest valid one and the valid set. The one trick: values from the command line stay text until the
field that takes them is known, so `--model.flavor=125M` and `--job.description=7` are strings without quotes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import tomli_w

from titanlite.config.component import Component, ConfigError, suggest
from titanlite.config.shipped import find_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


class Word(str):
    """A value as typed on the command line; it becomes a string, or TOML, once the field's type is known."""


def read(path: str | Path | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Locator]:
    """The raw tree of a TOML file, or of a shipped one by its name (None: an empty tree), with `overrides`
    applied, and its Locator."""
    text = ""
    if path is not None:
        path = find_config(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: cannot read the configuration: {e}") from None
    try:
        tree: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    locator = Locator("command line" if path is None else str(path), text)
    for key, value in split_overrides(overrides):
        put(tree, key, value)
        locator.overridden.add(key)
    return tree, locator


def build(schema: type[T], tree: dict[str, Any], locator: Locator) -> T:
    """`tree` as a `schema`; every complaint is prefixed with file and line, or with the override at fault."""
    try:
        return typing.cast(T, _build(schema, tree, ""))
    except ConfigError as e:
        raise locator.located(e) from None


def dump(config: Any) -> str:
    """The resolved configuration as TOML that reads back to an equal one. None is left out."""
    return tomli_w.dumps(as_tree(config))


def as_tree(value: Any) -> Any:
    """Dataclasses to plain tables, a choice's `name` first, tuples to lists, None dropped."""
    if dataclasses.is_dataclass(value):
        tree: dict[str, Any] = {"name": value.name} if isinstance(value, Component) else {}
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return tree | {k: as_tree(v) for k, v in fields if v is not None}
    if isinstance(value, dict):
        return {k: as_tree(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_tree(v) for v in value]
    return value


# ---- where a key came from


class Locator:
    """Turns a dotted key into `file.toml:12`, or into the command-line argument that set it."""

    def __init__(self, path: str, text: str):
        self.path, self.overridden = path, set[str]()
        self._lines = dict(self._scan(text))

    @staticmethod
    def _scan(text: str) -> typing.Iterator[tuple[str, int]]:
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

    def located(self, error: ConfigError) -> ConfigError:
        """The same error, with the place of its key in front."""
        if error.key is None:
            return error
        message = f"{error.key}: {error}" if error.key else str(error)
        key = error.key
        while key:
            inside = any(o.startswith(f"{key}.") for o in self.overridden)
            if key in self.overridden or (inside and key not in self._lines):
                return ConfigError(f"command line, --{message}", error.key)
            if key in self._lines:
                return ConfigError(f"{self.path}:{self._lines[key]}: {message}", error.key)
            key = key.rpartition(".")[0]
        return ConfigError(f"{self.path}: {message}", error.key)


# ---- the command line


def split_overrides(items: Sequence[str]) -> list[tuple[str, Word]]:
    """`--a.b=c`, `--a.b c`, `--a.b` (true) and `--no-a.b` (false) as (key, text) pairs."""
    pairs, rest = [], list(items)
    while rest:
        item = rest.pop(0)
        if not item.startswith("--") or item == "--":
            raise ConfigError(f"command line: expected --section.key=value, got {item!r}")
        key, equals, text = item[2:].partition("=")
        if key.startswith("no-"):
            if equals:
                raise ConfigError(f"command line: --{key} takes no value; write --{key[3:]}={text}")
            key, text = key[3:], "false"
        elif not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        pairs.append((key.replace("-", "_"), Word(text)))
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
        if "=" not in item and rest and not rest[0].startswith("--"):
            options.append(rest.pop(0))
    return words, options


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in `tree`; numbers index lists, one past the end appends."""
    node: Any = tree
    *parents, leaf = key.split(".")
    try:
        for part in parents:
            node = _entry(node, part, make={})
        if isinstance(node, list):
            _entry(node, leaf, make=None)
            node[int(leaf)] = value
        else:
            node[leaf] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"command line: --{key}: there is no such place in the configuration") from None


def _entry(node: Any, part: str, make: Any) -> Any:
    if not isinstance(node, list):
        return node.setdefault(part, make)
    if int(part) == len(node):
        node.append(make)
    return node[int(part)]


# ---- strict construction


def _build(cls: type, tree: Any, key: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a table, got {plain(tree)!r}", key)
    if issubclass(cls, Component):
        tree = dict(tree)
        name = tree.pop("name", None)
        if cls.is_kind():
            if name is None:
                raise ConfigError(f"missing `name` (known: {', '.join(sorted(cls.choices))})", key)
            cls = cls.choose(plain(name), key)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {}
    for k, v in tree.items():
        where = f"{key}.{k}" if key else k
        if k not in fields:
            raise ConfigError(f"unknown key {k!r}{suggest(k, fields)}", where)
        values[k] = _convert(hints[k], v, where, fields[k])
    for k, field in fields.items():
        if k not in tree and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing required key {k!r}", key)
    try:
        return cls(**values)
    except ConfigError as e:  # a section's own __post_init__ names its key relative to itself
        raise ConfigError(str(e), f"{key}.{e.key}" if key and e.key else e.key or key) from None


def _convert(hint: Any, value: Any, key: str, field: dataclasses.Field | None = None) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # Optional[X] only
        (inner,) = [a for a in args if a is not type(None)]
        return _convert(inner, value, key, field)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Component)):
        value = plain(value) if isinstance(value, Word) else value
        return _build(hint, _with_default_name(hint, value, field), key)
    if isinstance(value, Word):
        value = str(value) if hint is str else plain(value)
    if hint is Any:
        return plain(value)
    if origin is Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            raise ConfigError(f"{value!r} is not allowed{suggest(str(value), args)}", key)
        return value
    if origin in (list, tuple):
        value = listed(value)
        if not isinstance(value, list):
            raise ConfigError(f"expected a list, got {value!r}", key)
        return origin(_convert(args[0], v, f"{key}.{i}") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"expected a table, got {value!r}", key)
        return {k: _convert(args[1], v, f"{key}.{k}") for k, v in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # bool is not int, "8" is not 8
        raise ConfigError(f"expected {_TYPE_NAMES.get(hint, hint)}, got {value!r}", key)
    return value


_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _with_default_name(kind: type, value: Any, field: dataclasses.Field | None) -> Any:
    """A table without `name` means the field's default choice, where the field has one."""
    if not (
        isinstance(value, dict) and "name" not in value and issubclass(kind, Component) and kind.is_kind()
    ):
        return value
    if field is None or field.default_factory is dataclasses.MISSING:
        return value
    return {"name": field.default_factory().name, **value}


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
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return str(value)
