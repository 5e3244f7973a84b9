"""The raw corpus: the partition of its files into splits, and the documents of a split.

The names of the files tell their formats (text_formats.py). The splits depend on the files alone, so a
dataset is the same for any number of processes. Text must be UTF-8; a byte order mark at the start of a file
is dropped. Bad input is never guessed at or repaired: a bad document is passed to `on_bad`, and a damaged
file is an error. Memory is bounded: documents have a maximum size (Limits), and files are read and
decompressed in blocks."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePath
from typing import Any

from titanlite.config.component import ConfigError, check_at_least
from titanlite.data.text_formats import check_content, format_of
from titanlite.files import hash_file
from titanlite.storage import FileVersion, storage_of
from titanlite.tokenizers.chat import RenderedChat

SPLIT_BYTES = 8 << 20  # text per split: about a second of tokenising on one core
COMPRESSED_SPLITS = 64  # fewer compressed files than this are split, so that many cores have work
MAX_SPLITS = 8  # splits per compressed file: each split decompresses the whole file, 3% of the split's work
RATIO = 4  # typical compression ratio of text; only balances the work
BLOCK_LINES = 64  # a compressed file's lines are dealt out to its splits in blocks of this size
FEED_BYTES = 1 << 10  # compressed bytes per call of the decompressor: zstd can expand 1 KiB to 32 MiB
PARQUET_BYTES = 256 << 20  # maximum text per batch of rows, even if all rows share one stored value


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of memory and work for a corpus of unknown origin."""

    max_document_mib: int = 64
    """Largest document (line, row or file, uncompressed) in MiB; a larger one is bad input. Reading takes
    several times this memory."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_document_mib")

    @property
    def document_bytes(self) -> int:
        """`max_document_mib` in bytes."""
        return self.max_document_mib << 20

    def check_document(self, num_bytes: int) -> None:
        """Raise ValueError for a document of more than max_document_mib."""
        if num_bytes > self.document_bytes:
            raise ValueError(f"a document of more than {self.max_document_mib} MiB; raise max_document_mib")


@dataclass(frozen=True)
class FileSplit:
    """A unit of work: documents that one process reads. `files`: several files with one document each, or one
    file.

    `begin`, `end`: for lines, the range of bytes in which the lines start; for parquet, the range of row
    groups; for compressed lines, split number `begin` of `end` splits of the file. `size`: bytes of text,
    estimated if compressed."""

    files: tuple[PurePath, ...]
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Document:
    """A document's text and origin. `place`: its position in `file`, which `where` describes. `chat`: the
    conversation whose text it is, if documents are conversations."""

    text: str
    file: PurePath
    place: int
    chat: RenderedChat | None = None


DEFAULT_LIMITS = Limits()
_listed: dict[PurePath, FileVersion] = {}
OnBad = Callable[[PurePath, int, str], None]  # called with file, place and reason


def stop(file: PurePath, place: int, reason: str) -> None:
    """The default OnBad: raise ConfigError."""
    raise ConfigError(f"{where(file, place)}: {reason}")


# ---- files


def remember_listed(versions: Mapping[PurePath, FileVersion]) -> None:
    """Keep the versions of files in buckets as a listing has found them: the files of a preparation."""
    _listed.update(versions)


def version_of(file: PurePath, is_listed: bool = False) -> tuple[int, int | str]:
    """Return values that change when a file is edited: its size, and its time of modification or its tag.
    `is_listed`: those of the listing of a bucket, if there was one. Raises ConfigError."""
    with _reading(file):
        if isinstance(file, Path):
            status = file.stat()
            return status.st_size, status.st_mtime_ns
        if is_listed and file in _listed:
            size, tag = _listed[file]
        else:
            size, tag = storage_of(file).size(file), storage_of(file).tag(file)
    return size, tag.strip('"')


def size_of(file: PurePath) -> int:
    """Return the bytes of a file. Raises ConfigError."""
    with _reading(file):
        return _listed[file].size if file in _listed else storage_of(file).size(file)


def content_sha256(files: Iterable[Path]) -> str:
    """Return one hash of the content of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with _reading(file):
            digest.update(bytes.fromhex(hash_file(file)[1]))
    return digest.hexdigest()


def where(file: PurePath, place: int) -> str:
    """Describe a document's place: its file, and its line or row."""
    kind, compression = format_of(file)
    if kind == "text":
        return str(file)
    if kind == "parquet":
        return f"{file}: row {place}"
    if compression:
        return f"{file}:{place}"
    if not isinstance(file, Path):  # counting lines would read up to the place once more
        return f"{file}, byte {place}"
    with open(file, "rb") as f:  # the place is an offset in bytes; count lines in blocks of 1 MiB
        num_lines = sum(f.read(min(1 << 20, place - at)).count(10) for at in range(0, place, 1 << 20))
    return f"{file}:{num_lines + 1}"


# ---- splits


def split_files(files: Sequence[PurePath], field: str) -> list[FileSplit]:
    """Partition the corpus into splits of about SPLIT_BYTES, in the files' order."""
    splits = list[FileSplit]()
    num_compressed = sum(format_of(f)[1] != "" for f in files)
    for file in files:
        kind, compression = format_of(file)
        size = size_of(file) * (RATIO if compression else 1)
        if kind == "parquet":
            check_text_column(file, field)
            splits += parquet_splits(file, [field])
        elif kind == "text":
            check_content(file, beginning(file))
            before = splits[-1] if splits and format_of(splits[-1].files[0])[0] == "text" else None
            if before and before.size + size <= SPLIT_BYTES:
                splits[-1] = FileSplit((*before.files, file), 0, before.end + 1, before.size + size)
            else:
                splits.append(FileSplit((file,), 0, 1, size))
        elif compression:
            count = min(MAX_SPLITS, -(-COMPRESSED_SPLITS // num_compressed), max(1, -(-size // SPLIT_BYTES)))
            splits += [FileSplit((file,), i, count, size // count) for i in range(count)]
        else:
            for begin in range(0, max(size, 1), SPLIT_BYTES):
                end = min(begin + SPLIT_BYTES, size)
                splits.append(FileSplit((file,), begin, end, end - begin))
    return splits


def parquet_splits(file: PurePath, columns: Sequence[str]) -> list[FileSplit]:
    """Partition the row groups of a file by the size of some columns."""
    parquet = open_parquet(file)
    splits, begin, size = list[FileSplit](), 0, 0
    for group in range(parquet.metadata.num_row_groups):
        size += _uncompressed(parquet, group, columns)
        if size >= SPLIT_BYTES or group == parquet.metadata.num_row_groups - 1:
            splits.append(FileSplit((file,), begin, group + 1, size))
            begin, size = group + 1, 0
    return splits


# ---- documents


def documents(files: Sequence[PurePath], field: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[Document]:
    """Yield all documents of the files in order. Empty documents are left out."""
    for split in split_files(files, field):
        yield from read_split(split, field, limits=limits)


def read_split(
    split: FileSplit,
    field: str,
    on_bad: OnBad = stop,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Document]:
    """Yield a split's documents in order. Empty documents are left out; bad documents are passed to `on_bad`.

    Raises ConfigError for a file that cannot be read, is truncated or damaged, or lacks the column.
    """
    kind, _ = format_of(split.files[0])
    for file, place, data in _contents(split, kind, field, limits):
        try:
            text = _text_of(data, kind, field, limits)
        except ValueError as e:
            on_bad(file, place, str(e))
        else:
            if text:
                yield Document(text, file, place)


def _contents(
    split: FileSplit, kind: str, field: str, limits: Limits
) -> Iterator[tuple[PurePath, int, bytes | bytearray | None]]:
    """Yield the file, the place and the bytes of each document, None for a null. `kind`: the files' format.
    A document that is too long may be cut above the limit."""
    if kind == "text":
        for file in split.files:
            data = bytearray()
            for block in blocks(file):
                data += block
                if len(data) > limits.document_bytes:
                    break
            yield file, 0, data
        return
    (file,) = split.files
    if kind == "lines":
        yield from ((file, place, line) for place, line in lines(split, limits))
        return
    check_text_column(file, field)
    import pyarrow  # after check_text_column, which raises an error with advice if it is missing

    for first, batch in parquet_batches(split, [field]):
        rows = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
        yield from ((file, row, value) for row, value in enumerate(rows, first))


def _text_of(data: bytes | bytearray | None, kind: str, field: str, limits: Limits) -> str:
    """Return the text of a document whose file or row, or whose line of JSON, is `data`. Raises ValueError
    for a bad document."""
    if data is None:
        raise ValueError(f"field {field!r} is null")
    if kind != "lines":
        limits.check_document(len(data))
        return _decode(data.removeprefix(codecs.BOM_UTF8) if kind == "text" else data)
    record = record_of(data, limits)
    if field not in record:
        raise ValueError(f"no field {field!r} in this line")
    if not isinstance(record[field], str):
        raise ValueError(f"field {field!r} is not a string")
    return checked(record[field], f"field {field!r}")


def parquet_batches(split: FileSplit, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield columns of a split's rows in batches, each with the number of its first row. Raises
    ConfigError."""
    (file,) = split.files
    parquet = open_parquet(file)
    import pyarrow

    row = 1 + sum(parquet.metadata.row_group(g).num_rows for g in range(split.begin))
    groups = list(range(split.begin, split.end))
    size = max(_uncompressed(parquet, group, columns) for group in groups)
    batch_size = min(max(PARQUET_BYTES // max(size, 1), 1), 256)
    try:
        for batch in parquet.iter_batches(batch_size=batch_size, row_groups=groups, columns=list(columns)):
            yield row, batch
            row += batch.num_rows
    except (OSError, ValueError, pyarrow.ArrowException) as e:
        if getattr(e, "errno", None) == errno.EREMOTEIO:
            raise
        raise ConfigError(f"{where(file, row)} or later: damaged parquet: {e}") from None


def open_parquet(file: PurePath) -> Any:
    """Open a parquet file. Raises ConfigError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{file}: reading parquet needs pyarrow: pip install 'titanlite[data]'") from None
    with _reading(file):
        source = file if isinstance(file, Path) else storage_of(file).open(file)
    try:
        return parquet.ParquetFile(source, page_checksum_verification=True)
    except (OSError, ValueError, pyarrow.ArrowException) as e:
        if getattr(e, "errno", None) == errno.EREMOTEIO:
            raise
        raise ConfigError(f"{file}: not a complete parquet file: {e}") from None


def check_text_column(file: PurePath, field: str) -> None:
    """Raise ConfigError unless a parquet file has one column of this name, which holds strings."""
    schema = open_parquet(file).schema_arrow
    from pyarrow import types

    if field not in schema.names:
        raise ConfigError(f"{file}: no column {field!r} (columns: {', '.join(schema.names)})")
    if (count := schema.names.count(field)) > 1:
        raise ConfigError(f"{file}: {count} columns are called {field!r}; rename all but one")
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ConfigError(f"{file}: column {field!r} holds {kind}, not strings")


def _uncompressed(parquet: Any, group: int, columns: Sequence[str]) -> int:
    """Return the size of columns in a row group in bytes, uncompressed."""
    metadata = parquet.metadata.row_group(group)
    stored = [metadata.column(i) for i in range(metadata.num_columns)]
    return sum(
        c.total_uncompressed_size
        for c in stored
        if not {c.path_in_schema, c.path_in_schema.split(".")[0]}.isdisjoint(columns)
    )


def lines(split: FileSplit, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield a split's lines, each with its place."""
    is_compressed = format_of(split.files[0])[1] != ""
    return _blocks_of_lines(split, limits) if is_compressed else _range_of_lines(split, limits)


def _range_of_lines(split: FileSplit, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that start in [begin, end), each with its offset. A line that is too long is cut just
    above the limit."""
    with _reading(split.files[0]), storage_of(split.files[0]).open(split.files[0]) as f:
        at = split.begin
        if at:
            f.seek(at - 1)
            at += _skip_line(f) - 1
        while at < split.end and (line := f.readline(limits.document_bytes + 1)):
            if not line.isspace():
                yield at, line if at else line.removeprefix(codecs.BOM_UTF8)
            at += len(line) if line.endswith(b"\n") else len(line) + _skip_line(f)


def _skip_line(f: BufferedIOBase) -> int:
    """Read to the end of the line. Returns the number of bytes read."""
    skipped = 0
    while block := f.readline(1 << 20):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _blocks_of_lines(split: FileSplit, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Yield every `end`-th block of lines of a compressed file, from block `begin` on; each line with its
    number. A line that is too long is cut just above the limit."""
    number, rest, is_too_long, max_bytes = 0, bytearray(), False, limits.document_bytes + 1

    def is_wanted(line: bytes | bytearray) -> bool:
        return number // BLOCK_LINES % split.end == split.begin and bool(line) and not line.isspace()

    for chunk in _decompressed(split.files[0]):
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            rest += b"" if is_too_long else line[: max_bytes - len(rest)]
            if is_wanted(rest):
                yield number + 1, bytes(rest if number else rest.removeprefix(codecs.BOM_UTF8))
            rest, is_too_long, number = bytearray(), False, number + 1
        rest += b"" if is_too_long else tail[: max_bytes - len(rest)]
        if len(rest) == max_bytes:  # yielded now, because the end of the line may be far
            if is_wanted(rest):
                yield number + 1, bytes(rest)
            rest, is_too_long = bytearray(), True
    if is_wanted(rest):
        yield number + 1, bytes(rest)


def _decompressed(file: PurePath) -> Iterator[bytes]:
    """Yield the content of a .gz or .zst file of any number of members. The libraries' file objects do not
    report every truncated file, so this function checks that the last member is complete."""
    open_member = _decompressor(file)
    member, produced = open_member(), 0
    try:
        with _reading(file), storage_of(file).open(file) as f:
            while data := f.read(FEED_BYTES):
                while data and not (member.eof and not data.strip(b"\0")):  # gzip members may be padded
                    if member.eof:
                        member = open_member()
                    chunk = member.decompress(data)
                    produced += len(chunk)
                    yield chunk
                    data = member.unused_data if member.eof else b""
    except Exception as e:
        if type(e).__name__ not in ("error", "ZstdError"):  # zlib.error, zstandard.ZstdError
            raise
        raise ConfigError(f"{file}: damaged after {produced:,} bytes of its content: {e}") from None
    if not member.eof:
        raise ConfigError(f"{file}: cut off after {produced:,} bytes of its content; get the whole file")


def _decompressor(file: PurePath) -> Callable[[], Any]:
    if format_of(file)[1] == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{file}: reading .zst needs zstandard: pip install 'titanlite[data]'") from None
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj  # as written by `zstd --long`


def record_of(line: bytes | bytearray, limits: Limits) -> dict[str, Any]:
    """Return the object in a line of JSON; a line that holds another value has no fields. Raises
    ValueError."""
    limits.check_document(len(line) - line.endswith(b"\n"))
    try:
        record = json.loads(_decode(line))
    except json.JSONDecodeError as e:
        reason = e.msg.removesuffix(" at")
        raise ValueError(f"not valid JSON: {reason} at character {e.pos + 1} of the line") from None
    except RecursionError as e:
        raise ValueError(f"not valid JSON: {e}") from None
    if isinstance(record, list):
        raise ValueError("a JSON array; expected one object per line")
    return record if isinstance(record, dict) else {}


def checked(text: str, name: str) -> str:
    """Return a text. Raises ValueError for one half of a surrogate pair, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds a lone surrogate, which is not text") from None
    return text


def _decode(data: bytes | bytearray) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 at byte {e.start}: convert the file first") from None


def beginning(file: PurePath) -> bytes:
    """Return the first bytes of a file's content, without a byte order mark."""
    return next(filter(None, blocks(file)), b"").removeprefix(codecs.BOM_UTF8)


def blocks(file: PurePath) -> Iterator[bytes]:
    """Yield the content of a file, decompressed."""
    if format_of(file)[1]:
        yield from _decompressed(file)
        return
    with _reading(file), storage_of(file).open(file) as f:
        while data := f.read(1 << 20):
            yield data


@contextmanager
def _reading(file: PurePath) -> Iterator[None]:
    """Raise an OSError of the body as a ConfigError that names the file. A store that does not answer is no
    fault of the input: its OSError ends the command with exit code 1."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.EREMOTEIO:
            raise
        raise ConfigError(f"{file}: {e.strerror}") from None
