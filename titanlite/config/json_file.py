"""JSON files that go to other programs and come from them: each is one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError


def read_object(file: Path) -> dict[str, Any]:
    """What is in the file. Raises ConfigError, which names it, for what cannot be read and what is no
    object."""
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is no JSON object")
    return tree


def as_json(tree: object) -> bytes:
    """The content of a file."""
    return (json.dumps(tree, ensure_ascii=False, indent=1) + "\n").encode()
