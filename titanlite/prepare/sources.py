"""Sources whose text is tokenised on first use."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import ConfigError
from titanlite.data.shards import TokenShards
from titanlite.data.sources import Source
from titanlite.prepare.corpus import Limits, content_sha256, find_files, format_of
from titanlite.prepare.pipeline import prepare
from titanlite.prepare.stages import VERSION, Recipe
from titanlite.tokenizers.base import Tokenizer


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

    def check(self, tokenizer: Tokenizer) -> bool:
        find_files(self.path, "path")
        return False

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        files = find_files(self.path, "path")
        recipe = Recipe(
            field=self.field,
            max_document_mib=self.max_document_mib,
            max_compression_ratio=self.max_compression_ratio,
        )
        return _cached(files, "text", tokenizer, cache_dir, recipe)


@dataclass(frozen=True, kw_only=True)
class PythonStdlib(Source, name="python_stdlib"):
    """The .py files of the running interpreter's standard library, tests left out: real text on every machine
    that runs titanlite, about 3 million tokens. Which text depends on the Python version."""

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        return _cached(stdlib_files(), "python_stdlib", tokenizer, cache_dir, Recipe(field=""))


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
    files: Sequence[Path], kind: str, tokenizer: Tokenizer, cache_dir: Path, recipe: Recipe
) -> TokenShards:
    # the same bytes read another way are other documents
    ways = "".join("".join(format_of(f)) + " " for f in files)
    content = f"{VERSION} {kind} {recipe.field} {ways}{content_sha256(files)} {tokenizer.fingerprint}"
    path = cache_dir / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if path.exists():
        return TokenShards(path)
    # After bad input the text has to change, and with it the name: nothing is kept for another try.
    shards = prepare(files, path, tokenizer, recipe, keep=False)
    assert shards is not None  # there is one part
    return shards
