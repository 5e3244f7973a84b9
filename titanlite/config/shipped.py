"""Finds files that come with titanlite: train_configs/ and the small tokenizer in assets/. An installed
package holds copies of these folders; in a checkout they are next to the package.
"""

from __future__ import annotations

from pathlib import Path

from titanlite.config.component import ConfigError, suggest

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(path: str) -> Path:
    """Return the path of a file or folder that comes with titanlite, such as "train_configs"."""
    inside = PACKAGE / path
    return inside if inside.exists() else PACKAGE.parent / path


def find_file(path: str) -> Path:
    """Return the file at `path`, relative to the current directory; if it does not exist, the file of that
    path that comes with titanlite, such as assets/tokenizer/stdlib.tiktoken."""
    here = Path(path)
    if here.is_absolute() or here.exists() or ".." in here.parts:
        return here
    own = shipped(path)
    return own if own.is_file() else here


def shipped_configs() -> dict[str, Path]:
    """The TOML files in train_configs/ by their names."""
    return {p.stem: p for p in sorted(shipped("train_configs").glob("*.toml"))}


def find_config(path: str | Path) -> Path:
    """Return the TOML file at `path`, or the file of that name in train_configs/. Raises ConfigError if there
    is neither."""
    here = Path(path)
    if here.is_file():
        return here
    names, file = shipped_configs(), Path(f"{path}.toml")
    if file.is_file() and not here.exists() and str(path) not in names:
        raise ConfigError(f"{path}: no such file; did you mean {file}?")
    if here.suffix or len(here.parts) != 1:
        if here.stem in names and not here.exists():
            raise ConfigError(
                f"{here}: no such file; for the configuration that comes with titanlite write {here.stem}, "
                "without folder and .toml"
            )
        return here
    if here.name in names:
        return names[here.name]
    raise ConfigError(
        f"no configuration {here.name!r}: there is no such file, and no shipped configuration has that name"
        f"{suggest(here.name, names)}"
    )
