"""Reads JSON files that may be damaged. Each file holds one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.files import read_regular

NAMES = {
    int: "an integer",
    float: "a number with a point",
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def parse(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError for a text that is not JSON."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load_object(file: Path) -> dict[str, Any]:
    """Return the object in a file. Raises OSError for a file that cannot be opened; ValueError for a file
    that is not regular or does not hold a JSON object."""
    tree = parse(read_regular(file))
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")
    return tree


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ConfigError, which names the file."""
    try:
        return load_object(file)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def expect(tree: Any, **kinds: type) -> None:
    """Raise ValueError unless `tree` is an object with a value of exactly this type under each key."""
    if not isinstance(tree, dict):
        raise ValueError(f"{_short(tree)} is not an object")
    for key, kind in kinds.items():
        if key not in tree:
            raise ValueError(f"{key} is missing")
        if type(tree[key]) is not kind:
            raise ValueError(f"{key} is {_short(tree[key])}, not {NAMES[kind]}")


def as_json(tree: object) -> bytes:
    """Return a value as the content of a JSON file."""
    return (json.dumps(tree, ensure_ascii=False, indent=1) + "\n").encode()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
