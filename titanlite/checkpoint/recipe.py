"""The recipe: what a run must share with the one it resumes, by dotted name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.log import logger


def read_recipe(path: Path) -> dict[str, Any]:
    """recipe.json of a run folder. Raises ConfigError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{path} cannot be read: {e}; there is no checkpoint beside it: delete it"
        ) from None


def check_recipe(
    theirs: dict[str, Any], ours: dict[str, Any], allow_changed: Sequence[str], where: Path
) -> None:
    """Raises ConfigError naming what differs, unless it is allowed to, itself or a part it belongs to."""
    before, now = flatten(theirs), flatten(ours)
    # What is one value first: a changed tokenizer changes each source's fingerprint, too.
    keys = sorted(before.keys() | now.keys(), key=lambda key: (key.count("."), key))
    changed: list[str] = []
    allowed: list[str] = []
    for key in keys:
        if before.get(key) != now.get(key):
            is_allowed = any(key == a or key.startswith(a + ".") for a in allow_changed)
            said = f"{key} was {before.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}"
            (allowed if is_allowed else changed).append(said)
    if changed:
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise ConfigError(
            f"{where} holds a run of another recipe: {'; '.join(changed[:3])}{more}. Choose another "
            "--job.dump_folder, delete that one, set it back, or name it in --checkpoint.allow_changed",
            "job.dump_folder",
        )
    for said in allowed:
        logger.warning(f"changed, as checkpoint.allow_changed says: {said}")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
