"""Expands and checks paths that a configuration or a command line names, without creating anything."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from titanlite.config.component import ConfigError
from titanlite.files import if_on_hub

IS_PATH, TAKES_URL = "path", "url"
PathText = Annotated[str, IS_PATH]  # the type of a key that names a local file or folder; `~` is expanded
UrlText = Annotated[str, IS_PATH, TAKES_URL]  # of a key that may also be the URL of a storage
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def check_local(path: str) -> None:
    """Raise ConfigError, without a key, for a URL."""
    if URL.match(path):
        raise ConfigError(f"{path}: this takes a path on a local disk, not a URL")


def expand_home(path: str) -> str:
    """Return a path with the home folder for a leading `~` or `~user`, and the path of a URL file:///PATH.
    Raises ConfigError, without a key, if there is no such folder."""
    if path.startswith("file://"):
        if not path.startswith("file:///"):
            raise ConfigError(f"{path}: expected file:///PATH, with a path that begins at the root")
        return path.removeprefix("file://")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise ConfigError(
            f"{path!r}: the home folder {name} is not known; for a file of that name write ./{name}"
        )
    return expanded


def check_name(path: str, key: str) -> None:
    """Raise ConfigError for a path that no file system allows or that a TOML file cannot record."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is not UTF-8, so no TOML file can record it", key) from None
    if "\0" in path:
        raise ConfigError(f"{path!r} contains a NUL character", key)


def check_folder(path: Path, hint: str = "") -> None:
    """Raise ConfigError unless a folder to read exists. `hint`: added to the message if there is nothing."""
    if path.is_file():
        is_job = path.suffix == ".toml"
        rather = "the run folder, its job.dump_folder" if is_job else f"its directory: {path.parent}"
        raise ConfigError(f"{path} is a file; give {rather}")
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory{if_on_hub(path)}{hint}")


def check_writable(folder: Path, key: str) -> None:
    """Raise ConfigError unless the folder can be made and written. `key`: the key or option that names it."""
    path = folder.absolute()
    try:
        existing = next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())
    except OSError as e:  # for example a name that is too long
        raise ConfigError(f"{folder} cannot be made: {e.strerror}", key) from None
    if not existing.exists():
        raise ConfigError(f"{folder} cannot be made: {existing} is a link that leads nowhere", key)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written: {existing} is not a writable directory", key)


def check_new(path: Path, key: str) -> None:
    """Raise ConfigError if `path` exists or cannot be made."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists; choose another, or delete it", key)
    check_writable(path.parent, key)


def check_output_file(path: Path) -> None:
    """Raise ConfigError if a command cannot write the file: its folder is missing, or it is a folder."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: there is no such folder")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the file to write")
