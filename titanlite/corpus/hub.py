"""Datasets of the Hugging Face hub as inputs of a preparation: `hf:NAME`.

The `datasets` library says which files a split consists of, and huggingface_hub downloads them into its
cache. The preparation reads them like local files, so the result has the bytes that a copy of the files would
give."""

from __future__ import annotations

import glob
import os
import re
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from titanlite.config.component import ConfigError, Unreadable
from titanlite.data.text_formats import has_text
from titanlite.files import is_inside
from titanlite.log import without_warnings_of

PREFIX = "hf:"  # of an input
HUB_URL = re.compile(r"hf://datasets/(?P<repo_id>[^@]+)@(?P<revision>[^/]+)/(?P<file>.+)")
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """The part of a Hugging Face dataset that is read."""

    config: str = ""
    """Configuration (subset) of a Hugging Face dataset; empty: the default."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face dataset; empty: the newest."""


def hub_files(name: str, split: HubSplit) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a split, sorted by path, and a record of the split with its commit. `name`: of a
    dataset on the hub, or a directory laid out like one. Files that are not in huggingface_hub's cache are
    downloaded into it.

    Raises ConfigError if the dataset or the split cannot be found or downloaded, or if titanlite does not
    read the format of its files."""
    urls = data_files(name, split, PREFIX)
    if unread := sorted({Path(url).suffix or Path(url).name for url in urls if not has_text(Path(url))}):
        raise ConfigError(
            f"{PREFIX}{name}: its files are {', '.join(unread)}, which only a stream reads: "
            f"--from-stream.name=huggingface --from-stream.path={name}",
            "input",
        )
    files, on_hub = list[Path](), defaultdict[tuple[str, str], list[str]](list)
    for url in urls:
        if match := HUB_URL.fullmatch(url):
            on_hub[match["repo_id"], unquote(match["revision"])].append(match["file"])
        else:
            files.append(Path(url))
    for (repo_id, revision), names in on_hub.items():
        folder = _download(repo_id, revision, names)
        files += [folder / file for file in names]
    record = {"path": name, "config": split.config, "split": split.split, "revision": commit_of(urls)}
    return sorted(files), {key: value for key, value in record.items() if value}


def data_files(name: str, split: HubSplit, prefix: str = "") -> list[str]:
    """Return the paths or hf:// URLs of the files of a split. `prefix`: of the name in messages. Raises
    ConfigError."""
    by_split = open_builder(name, split, prefix).config.data_files or {}
    files = {str(key): list(urls) for key, urls in by_split.items()}
    if split.split not in files:
        raise ConfigError(
            f"{prefix}{name} has no split {split.split!r} (splits: {', '.join(sorted(files))})", "split"
        )
    return files[split.split]


def commit_of(urls: Sequence[str]) -> str:
    """Return the commit of files on the hub; "" for local files."""
    revisions = {unquote(match["revision"]) for url in urls if (match := HUB_URL.fullmatch(url))}
    commit = revisions.pop() if len(revisions) == 1 else ""
    return commit if COMMIT.fullmatch(commit) else ""


def open_builder(name: str, split: HubSplit, prefix: str = "") -> Any:
    """Return the `datasets` library's builder of a dataset, which knows its files. `prefix`: of the name in
    messages. Raises ConfigError."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{prefix}{name} needs the datasets library: pip install 'titanlite[hub]'"
        ) from None
    is_local = os.path.isdir(name)
    if not is_local and (not name or name[0] in "./~" or name.count("/") > 1):
        raise ConfigError(f"{prefix}{name}: there is no such directory, and the hub has no such names")
    if is_local and split.revision:
        raise ConfigError(f"{prefix}{name} is a directory, which has no revisions; leave it out", "revision")
    with hub_errors(f"{prefix}{name}"), without_warnings_of("huggingface_hub"):
        try:
            builder = datasets.load_dataset_builder(
                name, split.config or None, revision=split.revision or None
            )
        except ValueError:
            names = datasets.get_dataset_config_names(name, revision=split.revision or None)
            if not split.config or split.config in names:
                raise
            raise ConfigError(
                f"{prefix}{name} has no configuration {split.config!r} (configurations: {', '.join(names)})",
                "config",
            ) from None
        except ConnectionError as e:
            raise Unreadable(
                f"{prefix}{name}: there is no such directory, and the hub cannot be reached or has no such "
                "dataset; check its name, the network (HF_ENDPOINT, a proxy), and HF_TOKEN if it is private"
            ) from e
    if is_local:
        _check_inside(builder, Path(name), prefix)
    return builder


def _check_inside(builder: Any, folder: Path, prefix: str) -> None:
    """Raise ConfigError if a directory, which may be somebody else's, names files that it does not hold."""
    for urls in (builder.config.data_files or {}).values():
        for url in urls:
            if "://" in url:
                raise ConfigError(
                    f"{prefix}{folder}: its README.md names {url}, but only files of the directory are read: "
                    "download the file, and give it itself as input"
                )
            if not is_inside(Path(url), folder):
                raise ConfigError(
                    f"{prefix}{folder}: its file {url} is outside of the directory: its README.md names the "
                    "file, or it is a link; to read it, give the file itself as input"
                )


def _download(repo_id: str, revision: str, files: list[str]) -> Path:
    """Download files of a dataset. Returns the folder that holds them."""
    from huggingface_hub import snapshot_download

    with hub_errors(f"{PREFIX}{repo_id}"):
        patterns = [glob.escape(file) for file in files]
        return Path(
            snapshot_download(repo_id, repo_type="dataset", revision=revision, allow_patterns=patterns)
        )


@contextmanager
def hub_errors(name: str, files: Collection[str] = ()) -> Iterator[None]:
    """Raise an error of the Hugging Face libraries as Unreadable, in one line that begins with `name`, or
    with the file at fault if it is one of `files`. Few of the errors that come from a network, a server, a
    full disk or a damaged dataset are documented, so all are caught."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines()
        raise Unreadable(
            f"{_file_being_read(e, files) or name}: {lines[0] if lines else type(e).__name__}"
        ) from e


def _file_being_read(error: BaseException, files: Collection[str]) -> str:
    """Return which of `files` an error is about: the innermost function that the error went through and that
    has the name of one file in a variable. The errors of the libraries that read the formats often do not
    name the file. Returns "" if there is none."""
    file = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        strings = (value for value in frame.f_locals.values() if isinstance(value, str))
        values = (string.rpartition("::")[2] for string in strings)  # of gzip://a.jsonl::a.jsonl.gz
        if len(named := {value for value in values if value in files}) == 1:
            (file,) = named
    return file
