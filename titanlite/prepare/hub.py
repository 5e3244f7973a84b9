"""Datasets of the Hugging Face hub as inputs of a preparation: `hf:NAME`.

The `datasets` library says which files a split consists of, and huggingface_hub downloads them into its
cache. The preparation reads them like local files, so the result has the bytes that a copy of the files would
give."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from titanlite.config.component import ConfigError
from titanlite.prepare.corpus import has_text

PREFIX = "hf:"  # of an input
HUB_URL = re.compile(r"hf://datasets/(?P<repo_id>[^@]+)@(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """The part of a Hugging Face dataset that is read."""

    config: str = ""
    """Configuration of a Hugging Face dataset, also called its subset; empty: the default one."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face dataset; empty: the newest commit."""


def hub_files(name: str, part: HubSplit) -> list[Path]:
    """Return the files of a split, sorted by path. `name`: of a dataset on the hub, or a directory laid out
    like one. Files that are not in huggingface_hub's cache are downloaded into it.

    Raises ConfigError if the dataset or the split cannot be found or downloaded, or if titanlite does not
    read the format of its files."""
    urls = data_files(name, part)
    if unread := sorted({Path(url).suffix or Path(url).name for url in urls if not has_text(Path(url))}):
        raise ConfigError(
            f"{PREFIX}{name}: its files are {', '.join(unread)}, which only a stream reads: "
            f"--from-stream.name=huggingface --from-stream.path={name}",
            "input",
        )
    parts = [HUB_URL.fullmatch(url) for url in urls]
    on_hub = [match for match in parts if match]
    files = [Path(url) for url, match in zip(urls, parts) if not match]
    for repo_id, revision in sorted({(match["repo_id"], match["revision"]) for match in on_hub}):
        own = [
            match["file"] for match in on_hub if (match["repo_id"], match["revision"]) == (repo_id, revision)
        ]
        folder = _download(repo_id, unquote(revision), own)
        files += [folder / file for file in own]
    return sorted(files)


def data_files(name: str, part: HubSplit) -> list[str]:
    """Return the paths or hf:// URLs of the files of a split. Raises ConfigError."""
    by_split = open_builder(name, part).config.data_files or {}
    files = {str(split): list(urls) for split, urls in by_split.items()}
    if part.split not in files:
        raise ConfigError(
            f"{PREFIX}{name} has no split {part.split!r} (splits: {', '.join(sorted(files))})", "split"
        )
    return files[part.split]


def open_builder(name: str, part: HubSplit) -> Any:
    """Return the `datasets` library's builder of a dataset, which knows its files. Raises ConfigError."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{PREFIX}{name} needs the datasets library: pip install 'titanlite[hub]'"
        ) from None
    with hub_errors(name):
        return datasets.load_dataset_builder(name, part.config or None, revision=part.revision or None)


def _download(repo_id: str, revision: str, files: list[str]) -> Path:
    """Download files of a dataset. Returns the folder that holds them."""
    from huggingface_hub import snapshot_download

    with hub_errors(repo_id):
        patterns = [glob.escape(file) for file in files]
        return Path(
            snapshot_download(repo_id, repo_type="dataset", revision=revision, allow_patterns=patterns)
        )


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raise an error of the Hugging Face libraries as a ConfigError of one line. Few of the errors that come
    from a network, a server, a full disk or a damaged dataset are documented, so all are caught."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines()
        raise ConfigError(f"{PREFIX}{name}: {lines[0] if lines else type(e).__name__}") from e
