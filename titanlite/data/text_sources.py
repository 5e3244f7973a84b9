"""Data sources that tokenise documents on first use and cache the token shards in data.cache_dir."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import ConfigError
from titanlite.config.paths import PathText, check_writable
from titanlite.data.shards import TokenShards
from titanlite.data.sources import Source
from titanlite.data.text_files import Limits, content_sha256
from titanlite.data.text_formats import find_files, format_of
from titanlite.data.tokenize_files import VERSION, tokenize_files
from titanlite.tokenizers.base import Tokenizer


class CachedSource(Source):
    """Base of sources that are tokenised on first use. The first run with a fingerprint and a tokenizer
    tokenises the documents into a directory of data.cache_dir; later runs open that directory. With several
    ranks, one rank tokenises while the other ranks wait."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents change, such as a file's SHA-256 or a dataset's
        revision, with every key of this source that selects documents. If the text does not change with the
        documents, runs train on stale tokens."""

    @abstractmethod
    def write(self, path: Path, tokenizer: Tokenizer) -> TokenShards:
        """Tokenise the documents into the directory `path`. Raises ConfigError for missing or unreadable
        input."""

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        key = f"{self.fingerprint()} {self._tokenization(tokenizer)}"
        path = cache_dir / f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        if path.exists():
            return TokenShards(path)
        check_writable(cache_dir, "data.cache_dir")
        return self.write(path, tokenizer)

    def _tokenization(self, tokenizer: Tokenizer) -> str:
        """Return a text that changes whenever the same documents would have other tokens."""
        return tokenizer.fingerprint


@dataclass(frozen=True, kw_only=True)
class Text(Limits, CachedSource, name="text"):
    """Text files, tokenised on first use: one document per line of .jsonl, .ndjson and .json, per row of
    .parquet, or per other file. Above a few gigabytes, use `titanlite prepare`."""

    path: list[PathText]
    """Files, globs and directories, of which .txt, .jsonl, .ndjson, .json and .parquet files are read, also
    compressed."""
    field: str = "text"
    """Field of a JSON line, or column of .parquet, with the text."""

    def __post_init__(self) -> None:
        CachedSource.__post_init__(self)
        Limits.__post_init__(self)

    def check(self, tokenizer: Tokenizer) -> bool:
        find_files(self.path, "path")
        return False

    def fingerprint(self) -> str:
        return fingerprint_of_files(find_files(self.path, "path"), self.name, self.field)

    def write(self, path: Path, tokenizer: Tokenizer) -> TokenShards:
        files = find_files(self.path, "path", is_told=True)
        return tokenize_files(files, path, tokenizer, self.field, self)


@dataclass(frozen=True, kw_only=True)
class PythonStdlib(CachedSource, name="python_stdlib"):
    """The .py files of the running Python's standard library, without tests: about 3 million tokens, which
    depend on the Python version."""

    def fingerprint(self) -> str:
        return fingerprint_of_files(stdlib_files(), self.name, "")

    def write(self, path: Path, tokenizer: Tokenizer) -> TokenShards:
        return tokenize_files(stdlib_files(), path, tokenizer, field="")


def stdlib_files() -> list[Path]:
    """Return the UTF-8 .py files of the standard library, without tests and packages, ordered by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = list[Path]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = (
            set(subfolders) - skip
        )  # are not visited; packages may have tens of thousands of files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted((p for p in paths if _is_utf8(p)), key=lambda p: p.relative_to(root).as_posix())
    if not files:
        raise ConfigError(f"python_stdlib: no .py files under {root}; this Python lacks the library's source")
    return files


def _is_utf8(path: Path) -> bool:
    # Python source may declare another encoding. The two or three such files are left out.
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def fingerprint_of_files(files: Sequence[Path], name: str, field: str) -> str:
    """Return a text that changes with the files' contents and formats, with the source that reads them, and
    with `field`, its keys that select documents."""
    # The formats belong to the fingerprint: the same bytes in another format are other documents.
    formats = "".join("".join(format_of(file)) + " " for file in files)
    return f"{VERSION} {name} {field} {formats}{content_sha256(files)}"
