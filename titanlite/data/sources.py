"""Sources: where rows come from. Whatever a source reads, what it gives is TokenShards.

`tokens` opens shards made by `titanlite prepare`. `text` and `python_stdlib` tokenise on first use into a
cache whose key is the content and the tokenizer, so an edited file or another tokenizer never meets old
tokens.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import Component, ConfigError, label
from titanlite.data.corpus import Limits, content_sha256, find_files, format_of
from titanlite.data.pipeline import prepare
from titanlite.data.shards import TokenShards
from titanlite.data.stages import VERSION, Recipe
from titanlite.data.tokenizer import TextCodec


@dataclass(frozen=True, kw_only=True)
class Source(Component):
    """Kind: `[[data.sources]] name = ...`. Keys of its ConfigErrors are its own, such as `path`."""

    weight: float = 1.0
    """Share of the training tokens that come from here, relative to the other sources' weights."""
    max_epochs: float = 0.0
    """How often the run may pass through the source, at most; 0: without limit."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1e9:
            raise ConfigError(
                f"{self.weight} is not above 0 and finite (up to 1e9); to leave a source out, delete it",
                "weight",
            )
        if not 0 <= self.max_epochs < float("inf"):
            raise ConfigError(f"{self.max_epochs} is below 0, or not finite", "max_epochs")

    def build(self, codec: TextCodec, cache_dir: Path) -> TokenShards:
        """The source's tokens. Raises ConfigError for missing, unreadable or empty input."""
        raise NotImplementedError

    def check(self, codec: TextCodec) -> bool:
        """Raises ConfigError for input that can be seen to be missing or wrong without reading all of it.
        Returns whether `build` only opens files and tokenises nothing."""
        return False


@dataclass(frozen=True, kw_only=True)
class Tokens(Source, name="tokens"):
    """A directory of shards made by `titanlite prepare`."""

    path: str
    """The directory that holds dataset.json."""

    def check(self, codec: TextCodec) -> bool:
        self.build(codec, Path())
        return True

    def build(self, codec: TextCodec, cache_dir: Path) -> TokenShards:
        shards = TokenShards(self.path)
        if shards.tokenizer != codec.fingerprint:
            made, ours = shards.prepared.get("tokenizer"), codec.config.label if codec.config else ""
            theirs = label(str(made["name"]), str(made.get("path", ""))) if made else ""
            raise ConfigError(
                f"{self.path} was made with tokenizer {theirs} ({shards.tokenizer}), this job's is {ours} "
                f"({codec.fingerprint}): use the same [tokenizer], or prepare the data again"
            )
        if shards.vocab_size != codec.vocab_size:
            raise ConfigError(
                f"{self.path}/dataset.json says vocab_size {shards.vocab_size}, its tokenizer has "
                f"{codec.vocab_size}: the file is damaged; prepare the data again"
            )
        return shards


@dataclass(frozen=True, kw_only=True)
class Text(Limits, Source, name="text"):
    """Text files, tokenised on first use: .jsonl, .ndjson and .json have one document per line, .parquet one
    per row, any other file is one document. For more than a few gigabytes run `titanlite prepare` first."""

    path: list[str]
    """Files, directories (their .txt, .jsonl, .ndjson, .json and .parquet files, compressed ones too) and
    globs."""
    field: str = "text"
    """The field of a JSON line, or the column of a .parquet file, that holds the text."""

    def __post_init__(self) -> None:
        Source.__post_init__(self)
        Limits.__post_init__(self)

    def check(self, codec: TextCodec) -> bool:
        find_files(self.path, "path")
        return False

    def build(self, codec: TextCodec, cache_dir: Path) -> TokenShards:
        files = find_files(self.path, "path")
        recipe = Recipe(
            field=self.field,
            max_document_mib=self.max_document_mib,
            max_compression_ratio=self.max_compression_ratio,
        )
        return _cached(files, "text", codec, cache_dir, recipe)


@dataclass(frozen=True, kw_only=True)
class PythonStdlib(Source, name="python_stdlib"):
    """The .py files of the running interpreter's standard library, tests left out: real text on every machine
    that runs titanlite, about 3 million tokens. Which text depends on the Python version."""

    def build(self, codec: TextCodec, cache_dir: Path) -> TokenShards:
        return _cached(stdlib_files(), "python_stdlib", codec, cache_dir, Recipe(field=""))


def stdlib_files() -> list[Path]:
    """UTF-8 .py files of the standard library, without tests and packages, ordered by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = (p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    files = sorted((p for p in found if _is_utf8(p)), key=lambda p: p.relative_to(root).as_posix())
    if not files:
        raise ConfigError(
            f"source python_stdlib: no .py files under {root}; this Python ships without their source"
        )
    return files


def _is_utf8(path: Path) -> bool:
    # Python source may declare another encoding; the two or three files that use it are not worth a decoder
    # here.
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _cached(
    files: Sequence[Path], kind: str, codec: TextCodec, cache_dir: Path, recipe: Recipe
) -> TokenShards:
    # the same bytes read another way are other documents
    ways = "".join("".join(format_of(f)) + " " for f in files)
    content = f"{VERSION} {kind} {recipe.field} {ways}{content_sha256(files)} {codec.fingerprint}"
    path = cache_dir / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if path.exists():
        return TokenShards(path)
    # After bad input the text has to change, and with it the name: nothing is kept for another try.
    shards = prepare(files, path, codec, recipe, keep=False)
    assert shards is not None  # there is one part
    return shards
