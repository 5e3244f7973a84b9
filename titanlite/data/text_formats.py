"""The files of a corpus and their formats, which their names tell, in upper or lower case.

Files may be .jsonl (one document per line, under a field; .ndjson, .json, .jsonlines and .jl are read alike),
.parquet (one document per row, in a column), or any other format (one document per file). All but parquet may
be compressed (.gz, .zst). A file whose content is clearly of another format than its name is an error."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from titanlite.config.component import ConfigError
from titanlite.config.paths import URL
from titanlite.files import if_on_hub
from titanlite.log import tell

LINES = (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl")
COMPRESSIONS = {".gz": ".gz", ".gzip": ".gz", ".zst": ".zst", ".zstd": ".zst"}
IN_FOLDERS = (".txt", *LINES, ".parquet")  # formats that are read if a directory is given; also compressed
METADATA = ("dataset_info.json", "dataset_infos.json")  # Hugging Face's metadata beside a dataset's text
PLAIN_TEXT = (".txt", ".text", ".md")  # one document, even if it looks like JSON or CSV
CONVERT, EXTRACT = "convert it to .jsonl or .parquet", "extract its text"
# Content that is not plain text: a pattern of its first bytes, its format, and advice.
SIGNATURES = (
    (rb"\x1f\x8b", "gzip", "name it .gz"),
    (rb"\x28\xb5\x2f\xfd", "zstd", "name it .zst"),
    (rb"BZh[1-9]|\xfd7zXZ", "bzip2 or xz", "decompress it, or compress it with gzip or zstd"),
    (rb"PAR1", "parquet", "name it .parquet"),
    (rb"PK\x03\x04|7z\xbc\xaf|%PDF-", "a binary format", EXTRACT),
)
STRUCTURES = (
    (rb"(?!\xff\xfe|\xfe\xff)[^\0]{,1000}\0", "a binary format", EXTRACT),  # except UTF-16
    (rb'\s*(\[\s*)?\{\s*"', "JSON", "name it .jsonl if it has one object per line"),
    (rb'"?\w+"?([,\t]"?\w+"?)+\r?\n', "CSV or TSV", CONVERT),
)


def find_files(patterns: Sequence[str], key: str, is_told: bool = False) -> list[Path]:
    """Return the files that paths, directories and globs name, sorted by path, without duplicates. A
    directory stands for its files of the formats in IN_FOLDERS, at any depth. `is_told`: count its
    other files on standard error. Raises ConfigError if there are none, and for a dataset of tokens."""
    files: dict[Path, Path] = {}  # by resolved path: a file with two names is read once
    passed_over = Counter[str]()
    for pattern in patterns:
        if URL.match(pattern):
            raise ConfigError(
                f"{pattern}: texts are read from a local disk here; `titanlite prepare` reads them from a "
                'bucket into a dataset for the source name = "tokens"',
                key,
            )
        literal = Path(pattern)  # a name may contain a glob's characters
        paths = [literal] if literal.exists() else [Path(p) for p in glob.glob(pattern, recursive=True)]
        if not paths:
            start = f" (relative paths start at {Path.cwd()})"
            raise ConfigError(f"no such file: {pattern!r}{start}{if_on_hub(pattern, 'dataset')}", key)
        for path in paths:
            below = [path]
            if path.is_dir():  # follows links, skips hidden folders
                below = [Path(p) for p in glob.iglob(f"{glob.escape(str(path))}/**", recursive=True)]
            for file in filter(Path.is_file, below):
                if file.name == "dataset.json" and file.with_name("00000.idx").exists():
                    raise is_dataset(file.parent, key)
                if file == path or has_text(file):
                    files[file.resolve()] = file
                else:
                    passed_over[file.suffix.lower() or "without a suffix"] += file.name not in METADATA
    if is_told:
        tell_passed_over(patterns, passed_over)
    if not files:
        raise no_files(patterns, key)
    return sorted(files.values())


def tell_passed_over(patterns: Sequence[str], passed_over: Mapping[str, int]) -> None:
    """Print how many files of each suffix are not read."""
    if counts := [f"{number} {suffix}" for suffix, number in passed_over.items() if number]:
        tell(f"in {', '.join(patterns)}, files are passed over by their suffix: {', '.join(sorted(counts))}")


def no_files(patterns: Sequence[str], key: str) -> ConfigError:
    """Return the error that the input has no text files."""
    return ConfigError(
        f"no text files in {', '.join(map(repr, patterns))}; of a directory, {', '.join(IN_FOLDERS)} "
        "files are read, also compressed (.gz, .zst), except in hidden folders; name other files one by "
        "one",
        key,
    )


def is_dataset(folder: PurePath, key: str) -> ConfigError:
    """Return the error that an input directory is a dataset."""
    return ConfigError(
        f'{folder} is not text but a dataset, whose tokens a run reads with the source name = "tokens"',
        key,
    )


def format_of(file: PurePath) -> tuple[str, str]:
    """Return a file's format, by its name: ("lines" | "parquet" | "text", compression suffix or "")."""
    compression = COMPRESSIONS.get(file.suffix.lower(), "")
    suffix = (file.with_suffix("") if compression else file).suffix.lower()
    return "lines" if suffix in LINES else "parquet" if suffix == ".parquet" else "text", compression


def has_text(file: PurePath) -> bool:
    """Return whether a file, by its name, is one that is read if its directory is given."""
    kind, compression = format_of(file)
    inner = file.with_suffix("") if compression else file
    is_parquet_compressed = kind == "parquet" and compression  # parquet compresses itself
    return inner.suffix.lower() in IN_FOLDERS and not is_parquet_compressed and file.name not in METADATA


def check_content(file: PurePath, beginning: bytes) -> None:
    """Raise ConfigError for a file that is not plain text, by its name or by how its content begins."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    inner = file.with_suffix("") if format_of(file)[1] else file
    is_plain = inner.suffix.lower() in PLAIN_TEXT
    known = SIGNATURES if is_plain else (*SIGNATURES, *STRUCTURES)
    formats = [(name, advice) for pattern, name, advice in known if re.match(pattern, beginning)]
    if not is_plain and {".csv", ".tsv"} & set(suffixes[-2:]):
        formats = [("CSV or TSV", CONVERT)]
    if formats:
        (name, advice), *_ = formats
        plain = ", or .txt to read the file as one document" if name == "JSON" else ""
        raise ConfigError(f"{file} looks like {name}, which its name does not say: {advice}{plain}")
