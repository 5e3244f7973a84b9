"""The raw corpus: which files it is made of, cut into units of work, and the documents of a unit.

Files may be .jsonl (a document a line, under a field; .ndjson and .json are read alike), .parquet (a document
a row, under a column), or anything else (one document); all but parquet may be compressed (.gz, .zst). The
cut depends on the files alone, never on who works on it, so whatever is made of the units in their order is
the same on any number of processes. Text must be UTF-8. Nothing is guessed or patched: bad input is an error
with its place, or, where it is one line or row, handed to `bad`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.data.shards import file_sha256

UNIT_BYTES = 8 << 20  # of text: about a second of one core's tokenising
COMPRESSED_UNITS = 64  # a corpus of fewer compressed files is cut finer, to occupy as many cores
PARTS = 8  # at most, of one compressed file: each part decompresses all of it, 3% of a part's work
RATIO = 4  # typical of compressed text; only balances the work
BLOCK_LINES = 64  # lines that a part of a compressed file takes in turn
LINES, COMPRESSIONS = (".jsonl", ".ndjson", ".json"), (".gz", ".zst")
IN_FOLDERS = (".txt", *LINES, ".parquet")  # read where a directory is named; also compressed
ABOUT = ("dataset_info.json", "dataset_infos.json")  # files that Hugging Face puts beside a dataset's text


@dataclass(frozen=True)
class Unit:
    """A piece of the corpus. `files`: several where each is one document, otherwise one.

    `begin`, `end`: of lines, the range of bytes in which they start; of parquet, the row groups; of
    compressed lines, part `begin` of `end`. `size`: bytes of text, estimated where compressed.
    """

    files: tuple[Path, ...]
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Document:
    """One document's text, and where it came from: `where(file, place)`."""

    text: str
    file: Path
    place: int


Bad = Callable[[Path, int, str], None]  # file, place, reason


def stop(file: Path, place: int, reason: str) -> None:
    """What to do with a bad line unless told otherwise."""
    raise ConfigError(f"{where(file, place)}: {reason}")


# ---- files


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """Files named by paths, directories (all text, lines and parquet below) and globs, sorted by path, each
    once."""
    files: dict[Path, Path] = {}  # by what they resolve to: one file under two names is read once
    for pattern in patterns:
        literal = Path(pattern)  # a name may hold a glob's characters
        found = [literal] if literal.exists() else [Path(p) for p in glob.glob(pattern, recursive=True)]
        if not found:
            raise ConfigError(f"no such file: {pattern!r} (relative paths start at {Path.cwd()})", key)
        for path in found:
            below = [path]
            if path.is_dir():  # through links too, not into hidden folders
                below = [Path(p) for p in glob.iglob(f"{glob.escape(str(path))}/**", recursive=True)]
            wanted = (p for p in below if p.is_file() and (p == path or _in_folder(p)))
            files |= {p.resolve(): p for p in wanted}
    if not files:
        raise ConfigError(
            f"no text files in {', '.join(map(repr, patterns))}; of a directory, {', '.join(IN_FOLDERS)} "
            "files are read, also compressed (.gz, .zst), but none in hidden folders; name any other file",
            key,
        )
    return sorted(files.values())


def format_of(file: Path) -> tuple[str, str]:
    """How a file is read, by its name: ("lines" | "parquet" | "text", compression suffix or "")."""
    compression = file.suffix if file.suffix in COMPRESSIONS else ""
    suffix = file.with_suffix("").suffix if compression else file.suffix
    return "lines" if suffix in LINES else "parquet" if suffix == ".parquet" else "text", compression


def _in_folder(file: Path) -> bool:
    if file.suffix in COMPRESSIONS:  # parquet compresses itself
        return file.with_suffix("").suffix in IN_FOLDERS and format_of(file)[0] != "parquet"
    return file.suffix in IN_FOLDERS and file.name not in ABOUT


def content_sha256(files: Iterable[Path]) -> str:
    """One hash over the content of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(bytes.fromhex(file_sha256(file)))
        except OSError as e:
            raise ConfigError(f"{file}: {e.strerror}") from None
    return digest.hexdigest()


def where(file: Path, place: int) -> str:
    """A document's place in words: the file, and the line or row in it."""
    kind, compression = format_of(file)
    if kind == "text":
        return str(file)
    if kind == "parquet":
        return f"{file}: row {place}"
    if compression:
        return f"{file}:{place}"
    with open(file, "rb") as f:  # the place is an offset: lines are counted only for who is told of one
        return (
            f"{file}:{sum(f.read(min(1 << 20, place - at)).count(10) for at in range(0, place, 1 << 20)) + 1}"
        )


# ---- units


def plan_units(files: Sequence[Path], field: str) -> list[Unit]:
    """The corpus in pieces of about UNIT_BYTES, in the files' order."""
    units = list[Unit]()
    compressed = sum(format_of(f)[1] != "" for f in files)
    for file in files:
        kind, compression = format_of(file)
        size = _size(file) * (RATIO if compression else 1)
        if kind == "parquet":
            units += _parquet_units(file, field)
        elif kind == "text":
            before = units[-1] if units and format_of(units[-1].files[0])[0] == "text" else None
            if before and before.size + size <= UNIT_BYTES:
                units[-1] = Unit((*before.files, file), 0, before.end + 1, before.size + size)
            else:
                units.append(Unit((file,), 0, 1, size))
        elif compression:
            parts = min(PARTS, -(-COMPRESSED_UNITS // compressed), max(1, -(-size // UNIT_BYTES)))
            units += [Unit((file,), part, parts, size // parts) for part in range(parts)]
        else:
            ends = [*range(UNIT_BYTES, size, UNIT_BYTES), size]
            units += [Unit((file,), b, e, e - b) for b, e in zip([0, *ends], ends)]
    return units


def _parquet_units(file: Path, field: str) -> list[Unit]:
    metadata = _open_parquet(file, field).metadata
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    units, begin, size = list[Unit](), 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).column(columns.index(field)).total_uncompressed_size
        if size >= UNIT_BYTES or group == metadata.num_row_groups - 1:
            units.append(Unit((file,), begin, group + 1, size))
            begin, size = group + 1, 0
    return units


# ---- documents


def documents(files: Sequence[Path], field: str, bad: Bad = stop) -> Iterator[Document]:
    """All documents of the files, in order; empty ones are left out."""
    for unit in plan_units(files, field):
        yield from read_unit(unit, field, bad)


def read_unit(unit: Unit, field: str, bad: Bad = stop) -> Iterator[Document]:
    """A unit's documents in order; empty ones are left out, and what `bad` was told of.

    Raises ConfigError for a file that cannot be read, is cut off or damaged, or lacks the column.
    """
    file = unit.files[0]
    kind, compression = format_of(file)
    if kind == "text":
        yield from _whole_files(unit.files, bad)
    elif kind == "parquet":
        yield from _rows(unit, field, bad)
    else:
        for place, line in _part_of_lines(unit) if compression else _range_of_lines(unit):
            try:
                text = _text_of(line, field)
            except ValueError as e:
                bad(file, place, str(e))
            else:
                if text:
                    yield Document(text, file, place)


def _whole_files(files: Iterable[Path], bad: Bad) -> Iterator[Document]:
    for file in files:
        data = b"".join(_decompressed(file)) if format_of(file)[1] else _read(file)
        try:
            text = _decode(data)
        except ValueError as e:
            bad(file, 0, str(e))
        else:
            if text:
                yield Document(text, file, 0)


def _rows(unit: Unit, field: str, bad: Bad) -> Iterator[Document]:
    import pyarrow  # _open_parquet says how to get it

    (file,) = unit.files
    parquet = _open_parquet(file, field)
    row = 1 + sum(parquet.metadata.row_group(g).num_rows for g in range(unit.begin))
    groups = list(range(unit.begin, unit.end))
    try:
        for batch in parquet.iter_batches(batch_size=256, row_groups=groups, columns=[field]):
            for data in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                try:
                    text = _decode(data) if data is not None else None
                except ValueError as e:
                    bad(file, row, str(e))
                else:
                    if text is None:
                        bad(file, row, f"field {field!r} is null")
                    elif text:
                        yield Document(text, file, row)
                row += 1
    except (OSError, ValueError, pyarrow.ArrowException) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{where(file, row)} or later: damaged parquet: {e}") from None


def _open_parquet(file: Path, field: str) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{file}: reading parquet needs pyarrow: pip install 'titanlite[data]'") from None
    try:
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
    except (OSError, ValueError, pyarrow.ArrowException) as e:
        raise ConfigError(f"{file}: not a whole parquet file: {e}") from None
    schema = opened.schema_arrow
    if field not in schema.names:
        raise ConfigError(f"{file}: no column {field!r} (columns: {', '.join(schema.names)})")
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ConfigError(f"{file}: column {field!r} holds {kind}, not strings")
    return opened


def _range_of_lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """Lines that start in [begin, end), each with its offset."""
    try:
        with open(unit.files[0], "rb") as f:
            at = unit.begin
            if at:
                f.seek(at - 1)
                at += len(f.readline()) - 1
            while at < unit.end and (line := f.readline()):
                if not line.isspace():
                    yield at, line
                at += len(line)
    except OSError as e:
        raise ConfigError(f"{unit.files[0]}: {e.strerror}") from None


def _part_of_lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """Every `end`-th block of lines of a compressed file, from block `begin` on; each line with its
    number."""
    number, rest = 0, b""

    def wanted(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        nonlocal number
        for line in lines:
            if number // BLOCK_LINES % unit.end == unit.begin and line and not line.isspace():
                yield number + 1, line
            number += 1

    for chunk in _decompressed(unit.files[0]):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from wanted(lines)
    yield from wanted([rest])


def _decompressed(file: Path) -> Iterator[bytes]:
    """The content of a .gz or .zst file of any number of members. Neither library's own file object tells of
    every truncated file (zstandard's ends as if it were whole), so the end is checked here."""
    open_member = _decompressor(file)
    member, produced = open_member(), 0
    try:
        with open(file, "rb") as f:
            while data := f.read(1 << 20):
                while data and not (member.eof and not data.strip(b"\0")):  # gzip members may be padded
                    if member.eof:
                        member = open_member()
                    chunk = member.decompress(data)
                    produced += len(chunk)
                    yield chunk
                    data = member.unused_data if member.eof else b""
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None
    except Exception as e:
        if type(e).__name__ not in ("error", "ZstdError"):  # zlib.error, zstandard.ZstdError
            raise
        raise ConfigError(f"{file}: damaged after {produced:,} bytes of its content: {e}") from None
    if not member.eof:
        raise ConfigError(f"{file}: cut off after {produced:,} bytes of its content; get the whole file")


def _decompressor(file: Path) -> Callable[[], Any]:
    if file.suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{file}: reading .zst needs zstandard: pip install 'titanlite[data]'") from None
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj  # as written by `zstd --long`


def _text_of(line: bytes, field: str) -> str:
    """The document in a line of JSON. Raises ValueError."""
    try:
        record = json.loads(_decode(line))
    except (json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"not valid JSON: {e}") from None
    if not isinstance(record, dict) or field not in record:
        raise ValueError(f"no field {field!r} in this line")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is not a string")
    try:
        text.encode()  # JSON can spell half a character
    except UnicodeEncodeError:
        raise ValueError(f"field {field!r} holds a lone surrogate, which is no text") from None
    return text


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 at byte {e.start}: convert it first, nothing is guessed") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None
