"""Converts the amounts of training in a configuration to numbers of steps."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar, Union

from titanlite.config.amount import Amount, Conversion, step_count
from titanlite.config.component import ConfigError
from titanlite.config.schema import type_hints
from titanlite.config.toml import make_section

T = TypeVar("T")


def amounts(config: Any) -> dict[str, Amount]:
    """Return the amounts in a configuration that are not resolved, by their dotted keys."""
    return dict(_amounts(config, ""))


def _amounts(value: Any, key: str) -> Iterator[tuple[str, Amount]]:
    if isinstance(value, Amount):
        yield key, value
        return
    for name, inner in _entries(value):
        yield from _amounts(inner, _join(key, name))


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a configuration."""
    for name in key.split("."):
        config = dict(_entries(config))[name]
    return config


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a section, a table or a list."""
    if dataclasses.is_dataclass(value):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), inner) for i, inner in enumerate(value))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def resolve(config: T, conversion: Conversion) -> T:
    """Return a configuration with its amounts as numbers of steps. Epochs remain if their length is not
    known. Raises ConfigError for an amount of less than one step, and for a number of steps that its section
    refuses."""
    return _resolved(type(config), config, "", conversion)


def _resolved(hint: Any, value: Any, key: str, conversion: Conversion) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # Optional[X] only
        (hint,) = [arg for arg in args if arg is not type(None)]
        return _resolved(hint, value, key, conversion)
    if isinstance(value, Amount):
        return _number(hint, value, key, conversion)
    if not amounts(value):
        return value
    if dataclasses.is_dataclass(value):
        hints = type_hints(typing.cast(type, type(value)))
        fields = {k: _resolved(hints[k], v, _join(key, k), conversion) for k, v in _entries(value)}
        return make_section(hint, type(value), _rounded(fields, hints, value), key)
    item = args[1] if origin is dict else args[0]
    made = {k: _resolved(item, v, _join(key, k), conversion) for k, v in _entries(value)}
    return made if origin is dict else type(value)(made.values())


def _number(hint: Any, amount: Amount, key: str, conversion: Conversion) -> Any:
    """Return an amount as a number of the type that its key has."""
    mark = step_count(hint)
    assert mark is not None, f"{key} = {amount}: only fields with this annotation take amounts"
    if not conversion.converts(amount):
        return amount
    try:
        steps = conversion.num_steps(amount, mark.is_interval)
    except ConfigError as e:
        raise ConfigError(str(e), key) from None
    number_type, *_ = typing.get_args(hint)
    return number_type(steps)


def _rounded(fields: dict[str, Any], hints: dict[str, Any], section: Any) -> dict[str, Any]:
    """Return the resolved fields of a section, with amounts rounded down to multiples of other fields as
    their annotations ask for."""
    rounded = dict(fields)
    for key, steps in fields.items():
        mark = step_count(hints[key])
        if mark is None or not mark.multiple_of or not isinstance(getattr(section, key), Amount):
            continue
        interval = fields[mark.multiple_of]
        if isinstance(steps, Amount) or isinstance(interval, Amount):
            rounded[key] = getattr(section, key)
        else:
            rounded[key] = max(steps // interval, 1) * interval
    return rounded
