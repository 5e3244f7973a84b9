"""The documents of a stream as files, for a preparation with `[from_stream]`.

A preparation reads a stream from its beginning to its end, in one process. `fetch` writes its documents to
files, and records the stream's state after each file, so that an interrupted preparation continues there. The
preparation then reads these files like any others, on all cores."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from titanlite.config import toml
from titanlite.config.component import ConfigError, keys_in
from titanlite.corpus.pipeline import locked, work_folder
from titanlite.data.stream_source import Document, DocumentStream, text_of
from titanlite.files import named, sync, write_atomically
from titanlite.log import logger
from titanlite.progress import Progress

SECTION = "from_stream"  # of a preparation's keys
RECORD = "stream.json"
FILE_BYTES = 64 << 20  # of JSON per file; an interruption loses at most the work of one file


@dataclass(frozen=True)
class Fetched:
    """The documents of a stream in files. `stream`: the stream that was read, with its commit."""

    files: list[Path]
    stream: DocumentStream


def fetch(stream: DocumentStream, output: PurePath, field: str, bad_lines: str = "stop") -> Fetched:
    """Write the documents of a stream to files in the folder of unfinished work for `output`. After an
    interruption the same call continues after the last complete file, with the commit of the first call.
    `bad_lines`: as in PrepareOptions.

    Raises ConfigError if the folder holds documents of another stream, and for a document without text."""
    folder = work_folder(output)
    is_new = not folder.exists()
    with locked(folder, output, (0, 1)) as unfinished:
        if not unfinished:
            raise ConfigError(f"{output} exists; choose another, or delete it", "output")
        record: dict[str, Any] = {}
        try:
            stream, record = _begun(stream, folder, field)
            if not record["complete"]:
                _fetch_rest(stream, folder, record, bad_lines == "stop")
        except ConfigError:
            if is_new and not record.get("files"):
                shutil.rmtree(folder)
            raise
    return Fetched([_file(folder, i) for i in range(record["files"])], stream)


def _begun(stream: DocumentStream, folder: Path, field: str) -> tuple[DocumentStream, dict[str, Any]]:
    """Return the stream to read, and the record of what was read of it, which is new if there is none. Raises
    ConfigError for the record of another stream."""
    file, keys = folder / RECORD, toml.as_tree(stream)
    try:
        record = json.loads(file.read_bytes())
    except FileNotFoundError:
        with keys_in(SECTION):
            stream = stream.pinned()
            origin = {"fingerprint": stream.fingerprint(), "stream": toml.as_tree(stream)}
        progress = {"files": 0, "documents": 0, "state": None, "complete": False}
        return stream, {"keys": keys, "field": field, **origin, **progress}
    is_same = record["field"] == field and keys in (record["keys"], record["stream"])
    if is_same:
        pinned = {key: value for key, value in record["stream"].items() if keys.get(key) != value}
        with keys_in(SECTION):
            stream = replace(stream, **pinned)
            is_same = record["fingerprint"] == stream.fingerprint()
    if not is_same:
        raise ConfigError(
            f"{folder} holds documents of another stream, or the stream has changed since: delete the "
            "folder, or choose another output",
            "output",
        )
    return stream, record


def _fetch_rest(stream: DocumentStream, folder: Path, record: dict[str, Any], is_strict: bool) -> None:
    """Write the documents that follow the ones in `record`, which is brought up to date after every file.
    `is_strict`: as in `_line`."""
    number = record["documents"]
    with keys_in(SECTION):
        opened = stream.build()
    has_state = hasattr(opened, "state_dict")
    if number and has_state:
        opened.load_state_dict(record["state"])  # type: ignore[attr-defined]
    elif number:
        logger.info(
            f"the stream {stream.label} has no state_dict: reading its first {number:,} documents again"
        )
    rest = islice(opened, 0 if has_state else number, None)
    num_left = stream.max_documents - number if stream.max_documents else None
    lines = (
        _line(i, document, record["field"], is_strict)
        for i, document in _numbered(islice(rest, num_left), number)
    )
    with Progress(desc="reading the stream", unit="doc", unit_scale=True, initial=number) as bar:
        while not record["complete"]:
            count, is_last = _write(_file(folder, record["files"]), lines, bar)
            if not count and not record["files"]:
                raise ConfigError(f"the stream {stream.label} has no documents", SECTION)
            state = opened.state_dict() if has_state else None  # type: ignore[attr-defined]
            record["files"] += count > 0
            record |= {"documents": record["documents"] + count, "state": state, "complete": is_last}
            try:
                text = json.dumps(record)
            except (TypeError, ValueError) as e:
                raise ConfigError(f"the state_dict of the stream {stream.label} is not JSON: {e}") from None
            write_atomically(folder / RECORD, text)


def _write(file: Path, lines: Iterator[bytes], bar: Progress) -> tuple[int, bool]:
    """Write a file of about FILE_BYTES, unless there are no lines. Returns the number of lines, and whether
    they were the last ones."""
    count, unfinished = 0, file.with_name(f".{file.name}")
    with named(file), open(unfinished, "wb") as f:
        for line in lines:
            f.write(line)
            count += 1
            bar.update()
            if f.tell() >= FILE_BYTES:
                break
        is_last = f.tell() < FILE_BYTES
    if count:
        sync(unfinished)
        os.replace(unfinished, file)
        sync(file.parent)
    return count, is_last


def _numbered(documents: Iterable[Document], number: int) -> Iterator[tuple[int, Document]]:
    """Yield documents with their numbers, from `number` on. An error of the stream gets the number of
    documents that were read."""
    try:
        for document in documents:
            yield number, document
            number += 1
    except ConfigError as e:
        raise ConfigError(f"{e} (after {number:,} documents)", e.key and f"{SECTION}.{e.key}") from None


def _line(number: int, document: Document, field: str, is_strict: bool) -> bytes:
    """Return a document as a line of JSON. Raises ConfigError; for a null, or text that is not Unicode, only
    if `is_strict`. Otherwise these are found and counted when the line is read, as in any file."""
    text = text_of(document, field, f"document {number} of the stream", is_strict)
    return json.dumps({field: text}, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _file(folder: Path, number: int) -> Path:
    return folder / f"documents-{number:06}.jsonl"
