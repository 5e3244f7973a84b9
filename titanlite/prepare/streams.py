"""Streams of documents, which `[from_stream]` of a preparation and the source `stream` select.

A preparation reads a stream from its beginning to its end, in one process. `fetch` writes its documents to
files, and records the stream's state after each file, so that an interrupted preparation continues there. The
preparation then reads these files like any others, on all cores."""

from __future__ import annotations

import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from titanlite.config import toml
from titanlite.config.component import Component, ConfigError, check_at_least, keys_in
from titanlite.config.json_file import expect, load_object
from titanlite.config.paths import PathText
from titanlite.files import named, sync, write_atomically
from titanlite.log import logger
from titanlite.prepare.hub import COMMIT, HubSplit, commit_of, data_files, hub_errors, open_builder
from titanlite.prepare.pipeline import locked, work_folder
from titanlite.progress import Progress

SECTION = "from_stream"  # of a preparation's keys
RECORD = "stream.json"
FILE_BYTES = 64 << 20  # of JSON per file; an interruption loses at most the work of one file

Document = str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DocumentStream(Component, kind="stream", makes=(Iterable,)):
    """Base of streams: `[from_stream] name = "..."` of a preparation, and `stream = { name = "..." }` of a
    source, select a subclass by its name. A subclass implements `build`."""

    max_documents: int = 0
    """Number of documents after which the stream is left, or begins again as a source of training; 0: read it
    to its end."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_documents")

    @abstractmethod
    def build(self) -> Iterable[Document]:
        """Return the documents from the first one on: texts, or mappings that have their text under `field`.
        Every call must give the same documents in the same order.

        If the iterable has the methods `state_dict()`, which returns JSON, and `load_state_dict(state)`, it
        continues at once after an interruption. Any other iterable is read again from the beginning.

        If it has `num_shards` and `shard(num_shards, index)`, as a Hugging Face dataset has, ranks and loader
        workers that train on the stream read only their own shards. Raises ConfigError for missing or
        unreadable input."""

    def pinned(self) -> DocumentStream:
        """Return a stream that reads today's documents at any later time, such as one that names the newest
        commit; by default, this stream. A preparation that was interrupted continues with its result, and so
        does a run, if the key that changes is `revision`, which is empty for the newest documents."""
        return self

    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents change: by default, the stream's keys."""
        return repr(toml.as_tree(self))


@dataclass(frozen=True, kw_only=True)
class HuggingFace(HubSplit, DocumentStream, name="huggingface"):
    """A dataset of the Hugging Face hub in streaming mode, in any format that the `datasets` library streams,
    such as Parquet, JSON, CSV, Arrow and the .tar files of WebDataset. A preparation keeps only the texts on
    disk, a run nothing."""

    path: PathText
    """Name on the hub, or a directory with a dataset's files."""

    @cached_property
    def _builder(self) -> Any:
        """The dataset's builder. It asks the hub for the files once, also for the loader workers."""
        return open_builder(self.path, self)

    def build(self) -> Iterable[Document]:
        builder = self._builder
        with hub_errors(self.path):
            dataset = builder.as_streaming_dataset(self.split)
            if dataset.features:  # the types of the columns are known
                dataset = dataset.decode(False)  # images and sounds stay bytes
            files = (builder.config.data_files or {}).get(self.split, ())
            return _HubStream(self.path, dataset, frozenset(map(str, files)))

    def pinned(self) -> HuggingFace:
        return replace(self, revision=commit_of(data_files(self.path, self)) or self.revision)

    def fingerprint(self) -> str:
        if COMMIT.fullmatch(self.revision) and not os.path.isdir(self.path):
            return super().fingerprint()  # a commit never changes, and the hub may be unreachable now
        files = data_files(self.path, self)  # with the commit, if on the hub
        sizes = [os.stat(file).st_size if os.path.exists(file) else 0 for file in files]
        return repr((toml.as_tree(self), files, sizes))


class _HubStream:
    """A streamed Hugging Face dataset whose errors are one line, with the file if it is one of `files`."""

    def __init__(self, path: str, dataset: Any, files: frozenset[str]):
        self._path, self._dataset, self._files = path, dataset, files
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Document]:
        # In a loader worker, `iter(dataset)` would deal out the files once more, by the worker's number.
        with hub_errors(self._path, self._files):
            for batch in self._dataset.iter(batch_size=1):
                yield {column: values[0] for column, values in batch.items()}

    @property
    def num_shards(self) -> int:
        return self._dataset.num_shards

    def shard(self, num_shards: int, index: int) -> _HubStream:
        with hub_errors(self._path):
            dataset = self._dataset.shard(num_shards=num_shards, index=index)
            return _HubStream(self._path, dataset, self._files)


@dataclass(frozen=True)
class Fetched:
    """The documents of a stream in files. `stream`: the stream that was read, with its commit."""

    files: list[Path]
    stream: DocumentStream


def fetch(stream: DocumentStream, output: Path, field: str, bad_lines: str = "stop") -> Fetched:
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
        record = load_object(file)
        expect(record, keys=dict, field=str, fingerprint=str, stream=dict)
        expect(record, files=int, documents=int, complete=bool)
    except FileNotFoundError:
        with keys_in(SECTION):
            stream = stream.pinned()
            origin = {"fingerprint": stream.fingerprint(), "stream": toml.as_tree(stream)}
        progress = {"files": 0, "documents": 0, "state": None, "complete": False}
        return stream, {"keys": keys, "field": field, **origin, **progress}
    except ValueError as e:
        raise ConfigError(f"{file}: {e}: delete the folder", "output") from None
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
    """Write the documents that follow those of `record`, which is brought up to date after every file.
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


def text_of(document: Document, field: str, place: str, is_strict: bool = True) -> Any:
    """Return the text of a document. `place`: names the document in messages. Raises ConfigError for anything
    else; for a null, or text that is not Unicode, only if `is_strict`."""
    if isinstance(document, Mapping) and field not in document:
        raise ConfigError(f"{place} has no {field!r} (it has: {', '.join(document)})", "field")
    text = document[field] if isinstance(document, Mapping) else document
    where = f" under {field!r}" if isinstance(document, Mapping) else ""
    if not isinstance(text, str) and (is_strict or text is not None):
        kind = "null" if text is None else type(text).__name__
        raise ConfigError(f"{place} holds {kind}{where}, not text", "field")
    if is_strict and isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{place} holds a lone surrogate{where}, which is not text", "field") from None
    return text


def _file(folder: Path, number: int) -> Path:
    return folder / f"documents-{number:06}.jsonl"
