"""Converts a TOML file and dotted overrides to a tree of frozen dataclasses, and back to TOML.

Syntax errors, unknown keys, wrong types and unknown choices are errors that name file and line (or the
command line), the key, the nearest valid key and all valid keys. All errors are reported together.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

import tomli_w

from titanlite.config.amount import Amount
from titanlite.config.component import Component, ConfigError, full_name
from titanlite.config.imports import import_own_components
from titanlite.config.locator import Locator, syntax_error
from titanlite.config.overrides import parse as parse
from titanlite.config.overrides import put, split_overrides
from titanlite.config.paths import check_local
from titanlite.config.schema import ChoiceError, Node, convert, describe, imports_of, type_hints
from titanlite.config.shipped import find_config
from titanlite.files import FileFault, read_regular

T = TypeVar("T")


def read(path: str | Path | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Locator]:
    """Return the tree of a TOML file, with `overrides` applied, and its Locator. `path`: a file, the name of
    a shipped configuration, or None for an empty tree."""
    text = ""
    if path is not None:
        check_local(str(path))
        path = find_config(path)
        try:
            text = read_regular(path).decode("utf-8-sig")  # some editors begin a file with a byte order mark
        except (OSError, FileFault, UnicodeDecodeError) as e:
            hint = "; save it as UTF-8" if isinstance(e, UnicodeDecodeError) else ""
            raise ConfigError(f"{path}: cannot read the configuration: {e}{hint}") from None
    try:
        tree = parse(text)
    except ValueError as e:
        raise syntax_error(path, text, str(e)) from None
    locator = Locator("command line" if path is None else str(path), text, tree)
    for key, value in split_overrides(overrides):
        locator.overridden.update(put(tree, key, value))
    return tree, locator


def check(table: Node, tree: dict[str, Any], locator: Locator) -> None:
    """Raise ConfigError for all errors of a tree against a schema, before any class is imported. Choices that
    the tree's imports may add are checked by `build`."""
    _, errors = convert(table, tree, bool(imports_of(tree)[1]), locator)
    if errors:
        raise locator.all_located(errors)


def build(schema: type[T], tree: dict[str, Any], locator: Locator) -> T:
    """Return `tree` as an object of the class `schema`. Raises ConfigError; every error is prefixed with file
    and line, or with the override at fault."""
    converted, errors = convert(describe(schema), tree, locator=locator)
    if any(isinstance(e, ChoiceError) for e in errors) and import_own_components():
        locator.left_out.clear()
        converted, errors = convert(describe(schema), tree, locator=locator)
    made = None if errors else _make(schema, converted, "", errors)
    if errors:
        raise locator.all_located(errors)
    return typing.cast(T, made)


def _make(hint: Any, value: Any, key: str, errors: list[ConfigError]) -> Any:
    """Return a converted value as an object of the class `hint`. ConfigErrors that classes raise are added to
    `errors`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # Optional[X] only
        (hint,) = [a for a in args if a is not type(None)]
        return _make(hint, value, key, errors)
    if origin in (list, tuple):
        return origin(_make(args[0], v, f"{key}.{i}", errors) for i, v in enumerate(value))
    kind = hint
    if isinstance(hint, type) and issubclass(hint, Component):
        hint = hint.choices[value[kind.key]]
        value = {k: v for k, v in value.items() if k != kind.key}
        if missing := sorted(hint.__abstractmethods__):
            errors.append(ConfigError(f"{full_name(hint)} lacks {', '.join(missing)}", key))
            return None
    if not dataclasses.is_dataclass(hint):
        return value
    hints, before = type_hints(typing.cast(type, hint)), len(errors)
    made = {k: _make(hints[k], v, f"{key}.{k}" if key else k, errors) for k, v in value.items()}
    if len(errors) > before:
        return None
    try:
        return make_section(kind, typing.cast(type, hint), made, key)
    except ConfigError as e:
        errors.append(e)


def make_section(kind: Any, cls: type[T], fields: dict[str, Any], key: str) -> T:
    """Return the section of a dotted key as an object of the class `cls`. `kind`: the kind of a component,
    otherwise `cls`. Raises ConfigError, with the full key, for values that the section refuses."""
    try:
        section: Any = cls(**fields)
        if isinstance(section, Component):
            section = section.resolved()
            kind.__post_init__(section)  # a choice's own __post_init__ need not call it
        return section
    except ConfigError as e:  # a __post_init__ names its key relative to its section
        raise ConfigError(str(e), f"{key}.{e.key}" if key and e.key else e.key or key) from None


def dump(config: Any) -> str:
    """Return a configuration as TOML that reads back to an equal configuration. None values are left out."""
    return tomli_w.dumps(as_tree(config))


def as_tree(value: Any) -> Any:
    """Convert dataclasses to plain tables, with the key that selects a choice first, tuples to lists, and
    amounts to text. None values are left out."""
    if isinstance(value, Amount):
        return str(value)
    if dataclasses.is_dataclass(value):
        tree: dict[str, Any] = {value.key: value.name} if isinstance(value, Component) else {}
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return tree | {k: as_tree(v) for k, v in fields if v is not None}
    if isinstance(value, dict):
        return {k: as_tree(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_tree(v) for v in value]
    return value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as one table with dotted keys. Tables in lists are numbered from 0."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
