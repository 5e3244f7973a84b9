"""The input of a preparation in a bucket: URLs of files, of folders, and with wildcards."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from titanlite.config.component import ConfigError
from titanlite.config.paths import URL
from titanlite.data.text_files import remember_listed
from titanlite.data.text_formats import METADATA, find_files, has_text, is_dataset, no_files, tell_passed_over
from titanlite.storage import FileVersion, parse_path, storage_of

WILDCARDS = "*?["


def find_inputs(patterns: Sequence[str], key: str) -> list[PurePath]:
    """Return the files that paths, directories, globs and URLs name, sorted by path, without duplicates. URLs
    are read as paths are (`find_files`). Raises ConfigError."""
    urls = [pattern for pattern in patterns if URL.match(pattern)]
    local = [pattern for pattern in patterns if pattern not in urls]
    files = set[PurePath](find_files(local, key, is_told=True) if local else [])
    passed_over = Counter[str]()
    for url in urls:
        files |= _found(url, key, passed_over)
    tell_passed_over(urls, passed_over)
    if not files:
        raise no_files(patterns, key)
    # Before Python 3.12, a path of s3:// is neither less nor more than the same path of gs://.
    return sorted(files, key=lambda file: (not isinstance(file, Path), storage_of(file).name, file))


def _found(url: str, key: str, passed_over: Counter[str]) -> set[PurePath]:
    """Return the files that a URL names, and add those that are not read to `passed_over`."""
    path = parse_path(url, key)
    storage = storage_of(path)
    wild = next((i for i, part in enumerate(path.parts) if set(part) & set(WILDCARDS)), len(path.parts))
    if wild == 0:
        raise ConfigError(f"{url}: a bucket is named without wildcards", key)
    try:
        if wild < len(path.parts) and storage.exists(path):  # a name may contain a glob's characters
            wild = len(path.parts)
        if wild == len(path.parts) and not storage.is_folder(path):
            remember_listed({path: FileVersion(storage.size(path), storage.tag(path))})
            return {path}
        folder = path
        while len(folder.parts) > wild:
            folder = folder.parent
        below = storage.files_below(folder)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {url!r}", key) from None
    except OSError as e:
        if e.errno == errno.EREMOTEIO:  # a store that does not answer: exit code 1
            raise
        raise ConfigError(f"{url} cannot be read: {e.strerror or e}", key) from None
    found, others, names = set[PurePath](), Counter[str](), path.parts[wild:]
    for file, version in below.items():
        parts = file.parts[wild:]
        is_named = bool(names) and _matches(parts, names)
        depth = next((n for n in range(len(parts)) if _matches(parts[:n], names)), None)  # of a folder
        is_below = depth is not None and not any(part.startswith(".") for part in parts[depth:])
        if not is_named and not is_below:
            continue
        if file.name == "dataset.json" and file.with_name("00000.idx") in below:
            raise is_dataset(file.parent, key)
        is_folder = not version.size and not file.suffix  # as consoles make them
        if (is_named and not is_folder) or has_text(file):
            found.add(file)
        else:
            others[file.suffix.lower() or "without a suffix"] += file.name not in METADATA
    if not found and not others:
        raise ConfigError(f"no such file: {url!r}", key)
    passed_over.update(others)
    remember_listed({file: below[file] for file in found})
    return found


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a glob, of which `**` matches any number."""
    if not names:
        return not parts
    if names[0] == "**":
        visible = [not part.startswith(".") for part in parts]
        return any(all(visible[:n]) and _matches(parts[n:], names[1:]) for n in range(len(parts) + 1))
    is_hidden = bool(parts) and parts[0].startswith(".") and not names[0].startswith(".")
    return (
        bool(parts) and not is_hidden and fnmatchcase(parts[0], names[0]) and _matches(parts[1:], names[1:])
    )
