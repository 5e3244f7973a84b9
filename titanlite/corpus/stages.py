"""The stages of a preparation. Each stage is a function of its inputs that writes files to the work folder:

    scan every split -> resolve duplicates  (only if a filter compares documents)
    encode a shard's splits -> assemble the shard

Last, a stage writes its marker: a JSON file with a key that is a hash of all inputs. A stage whose marker has
the current key is done. If the output is in a bucket, scans, duplicates and shards are sent there, and a
stage is done once its result is in the bucket (shared_work.py)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from titanlite.config import toml
from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.json_file import load_object
from titanlite.corpus.conversations import check_files, read_conversations, split_conversations
from titanlite.corpus.dedup import first_of_each
from titanlite.corpus.filters import Filter, LshSignature
from titanlite.corpus.report import Place, Report, merge
from titanlite.corpus.shared_work import SharedWork
from titanlite.data.shards import token_dtype, write_shard
from titanlite.data.text_files import (
    Document,
    FileSplit,
    Limits,
    OnBad,
    read_split,
    split_files,
    stop,
    version_of,
)
from titanlite.data.tokenize_files import VERSION, batches, check_ids, group_splits, shuffle_documents
from titanlite.files import named, sync
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.chat import ChatFormat

ARRAYS = ("removed", "original", "offsets")  # of resolved duplicates
KINDS = ("bin", "idx", "mask")  # of a shard's files


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Limits):
    """The options that determine a dataset, besides its files and tokenizer."""

    documents: Literal["text", "chat"] = "text"
    """`text`, or `chat`: every line of JSON, item of a JSON array or row of .parquet is a conversation, which
    the tokenizer's chat template renders; only the assistant's tokens count in the loss."""
    field: str = "text"
    """The field or column that holds the text."""
    seed: int = 0
    """Seed of the documents' shuffle."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Action for lines that are not JSON, lack the field, are not UTF-8 or exceed max_document_mib: `stop`,
    or `skip` and count. A damaged file or JSON array is always an error."""
    max_tokens: int = 0
    """Leave out and count conversations of more than this many tokens; 0: none. Training cuts a conversation
    of more than training.seq_len + 1 tokens, whose later part has no question."""
    ignore_fields: list[str] = dataclasses.field(default_factory=list)
    """Fields of conversations and messages to leave out. Another field that neither the chat template nor
    titanlite reads is bad input, unless it is empty or a description such as `id`."""
    filters: list[Filter] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "max_tokens")
        for key in ("max_tokens", "ignore_fields"):
            if getattr(self, key) and self.documents != "chat":
                raise ConfigError('only conversations have this key: documents = "chat"', key)
        if self.documents == "chat" and self.field != "text":
            raise ConfigError("leave it out: conversations are in `messages` or `conversations`", "field")

    def chat_format(self, tokenizer: Tokenizer, files: Sequence[PurePath]) -> ChatFormat | None:
        """Return the chat template if documents are conversations. Raises ConfigError if the tokenizer or a
        file cannot have any."""
        if self.documents == "text":
            return None
        check_files(files)
        return tokenizer.chat_format()


class JobState:
    """The work of one preparation, a function of its input. Picklable: every process has a copy.

    `splits`: the splits of the corpus. `shards`: for each shard, the indices of its splits. `compares`:
    whether a filter compares documents. `chat`: the template, if documents are conversations. `shared`: the
    work in a bucket, if the output is there."""

    def __init__(
        self, files: Sequence[PurePath], folder: Path, tokenizer: Tokenizer, options: PrepareOptions
    ):
        self.files, self.folder, self.tokenizer, self.options = files, folder, tokenizer, options
        self.chat = options.chat_format(tokenizer, files)
        self.splits = split_conversations(files) if self.chat else split_files(files, options.field)
        self.shards = group_splits(self.splits, options.seed)
        filters = toml.as_tree(options.filters)
        self.identities = identities = [_identity(split, is_listed=True) for split in self.splits]
        settings = [options.field, options.bad_lines, options.max_document_mib, filters]
        settings += [self.chat.fingerprint] if self.chat else []
        settings += [options.max_tokens] if options.max_tokens else []
        settings += [options.ignore_fields] if options.ignore_fields else []
        self.scan_keys = [_key(VERSION, identity, *settings) for identity in identities]
        self.filters = [f.build() for f in options.filters]
        self.compares = any(isinstance(f, LshSignature) for f in self.filters)
        self.resolve_key = _key(*self.scan_keys) if self.compares else ""
        self.split_keys = [_key(key, tokenizer.fingerprint, self.resolve_key) for key in self.scan_keys]
        self.shard_keys = [
            _key(options.seed, i, *(self.split_keys[index] for index in splits))
            for i, splits in enumerate(self.shards)
        ]
        self.key = _key(*self.shard_keys)
        self.shared: SharedWork | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"filters": []}  # closures cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.filters = [f.build() for f in self.options.filters]

    # ---- markers

    def marker(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the marker of stage `name` if the stage is done for `key`, else None."""
        try:
            marker = load_object(self.folder / f"{name}.json")
        except (OSError, ValueError):
            return None
        return marker if marker.get("key") == key else None

    def mark(self, name: str, key: str, result: dict[str, Any]) -> dict[str, Any]:
        """Write the marker of stage `name` with its result, after syncing the folder. Returns the result."""
        sync(self.folder)
        with self._written(f"{name}.json") as path:
            path.write_text(json.dumps({"key": key, **result}))
        return result

    def _unmark(self, name: str) -> None:
        """Delete the marker of a stage before its files are replaced."""
        marker = self.folder / f"{name}.json"
        if marker.exists():
            marker.unlink(missing_ok=True)
            sync(self.folder)

    @contextmanager
    def _written(self, name: str) -> Iterator[Path]:
        """Yield a temporary path for a new file, which is synced and renamed to `name` when the body ends."""
        path = self.folder / f".{name}-{uuid.uuid4().hex[:8]}"
        try:
            with named(self.folder / name):
                yield path
            sync(path)
            os.replace(path, self.folder / name)
        finally:
            path.unlink(missing_ok=True)

    # ---- finished stages

    def is_scanned(self, index: int) -> bool:
        """Return whether a split is scanned."""
        if self.shared:
            return self._shared_scan(index) in self.shared.names
        return self.marker(f"scan-{index:06}", self.scan_keys[index]) is not None

    def is_resolved(self) -> bool:
        """Return whether duplicates are resolved, after copying the result from a bucket."""
        if self.shared and self._shared_array(ARRAYS[-1]) in self.shared.names:
            if self.marker("resolve", self.resolve_key) is None:
                self._unmark("resolve")
                for name in ARRAYS:
                    with self._written(f"{name}.npy") as path:
                        self.shared.fetch(self._shared_array(name), path)
                self.mark("resolve", self.resolve_key, {})
            return True
        return not self.shared and self.marker("resolve", self.resolve_key) is not None

    def is_assembled(self, shard: int) -> bool:
        """Return whether a shard is complete."""
        if self.shared:
            return self.shared_shard(shard) in self.shared.names
        return self.marker(f"shard-{shard:05}", self.shard_keys[shard]) is not None

    def shared_names(self) -> list[str]:
        """Return the names of all work of this job in a bucket."""
        names = [self.shared_shard(shard) for shard in range(len(self.shards))]
        if self.compares:
            names += map(self._shared_scan, range(len(self.splits)))
            names += map(self._shared_array, ARRAYS)
        return names

    def shared_shard(self, shard: int) -> str:
        """Return the name of a shard's record in a bucket."""
        return f"shard-{shard:05}-{self.shard_keys[shard]}.json"

    def _shared_scan(self, index: int) -> str:
        return f"scan-{index:06}-{self.scan_keys[index]}.npz"

    def _shared_array(self, name: str) -> str:
        return f"{name}-{self.resolve_key}.npy"

    # ---- stages

    def scan(self, index: int) -> dict[str, Any]:
        """Write which filter function removes each document of a split, and the signatures of the others."""
        name = f"scan-{index:06}"
        if self.shared and self.shared.has(self._shared_scan(index)):
            return {"documents": 0, "tokens": 0}
        if done := self.marker(name, self.scan_keys[index]):  # done by another worker meanwhile
            self._send_scan(index)
            return done
        self._unmark(name)
        split = self.splits[index]
        num_bands = sum(f.num_bands for f in self.filters if isinstance(f, LshSignature))
        removed, places, signatures = list[int](), list[tuple[int, int]](), list[np.ndarray]()
        numbers = {file: i for i, file in enumerate(split.files)}
        for document in self._read(index, Report([])):
            removed.append(self._first_removing(document.text)[0])
            places.append((numbers[document.file], document.place))
            signatures.append(self._signature(document.text, removed[-1], num_bands))
        self._check_unchanged(index)
        columns = np.array(signatures, dtype=np.uint64).reshape(-1, num_bands).T
        arrays: dict[str, Any] = {f"band{b}": np.ascontiguousarray(c) for b, c in enumerate(columns)}
        arrays["removed"] = np.array(removed, np.uint8)
        arrays["places"] = np.array(places, np.int64).reshape(-1, 2)
        with self._written(f"{name}.npz") as path, open(path, "wb") as f:
            np.savez(f, **arrays)
        result = self.mark(name, self.scan_keys[index], {"documents": len(removed), "tokens": 0})
        self._send_scan(index)
        return result

    def _send_scan(self, index: int) -> None:
        if self.shared:
            self.shared.send(self.folder / f"scan-{index:06}.npz", self._shared_scan(index))

    def resolve(self, progress: Callable[[str], None]) -> None:
        """Find duplicates in all splits. Writes for each document the filter that removes it, and the earlier
        document that it duplicates."""
        self._unmark("resolve")
        if self.shared:
            progress("scans of other workers")
            self.shared.for_all(self._scan_file, range(len(self.splits)))
        removed_by_split = self._scanned("removed")
        offsets, removed = np.cumsum([0, *map(len, removed_by_split)]), np.concatenate(removed_by_split)
        original, band = np.full(len(removed), -1, dtype=np.int64), 0
        for i, signature in enumerate(self.filters):
            if not isinstance(signature, LshSignature):
                continue
            candidates = np.flatnonzero((removed == 0) | (removed > i + 1))
            bands = range(band, band + signature.num_bands)
            progress(f"duplicates of filter {self.options.filters[i].name}")
            first = first_of_each(len(candidates), self._values(bands, candidates))
            later = np.flatnonzero(first != np.arange(len(first)))
            removed[candidates[later]] = i + 1
            original[candidates[later]] = candidates[first[later]]
            band = bands.stop
        for name, array in zip(ARRAYS, (removed, original, offsets)):
            with self._written(f"{name}.npy") as path, open(path, "wb") as f:
                np.save(f, array)
        self.mark("resolve", self.resolve_key, {})
        if self.shared:
            for name in ARRAYS:
                self.shared.send(self.folder / f"{name}.npy", self._shared_array(name))

    def encode(self, index: int) -> dict[str, Any]:
        """Write the token ids of a split's remaining documents, in order."""
        name = f"split-{index:06}"
        self._unmark(name)
        max_tokens, filters = self.options.max_tokens, [f.name for f in self.options.filters]
        report = Report([*filters, "max_tokens"] if max_tokens else filters)
        dtype, vocab_size = token_dtype(self.tokenizer.vocab_size), self.tokenizer.vocab_size
        documents, lengths, masks = self._remaining(index, report), list[int](), list[np.ndarray]()
        with self._written(f"{name}.bin") as path, open(path, "wb") as f:
            for batch in batches(documents, lambda document: len(document.text)):
                for document, ids, mask in self._encoded(batch, report):
                    check_ids(ids, vocab_size, document.file, document.place)
                    if max_tokens and len(ids) > max_tokens:
                        report.removed(-1, document, f"{len(ids):,} tokens")
                        continue
                    f.write(ids.astype(dtype).tobytes())
                    lengths.append(len(ids))
                    masks += [] if mask is None else [mask]
                    report.kept(document, len(ids))
        with self._written(f"{name}.npy") as path, open(path, "wb") as f:
            np.save(f, np.array(lengths, np.int64))
        if self.chat:
            with self._written(f"{name}.mask") as path:
                path.write_bytes(b"".join(mask.astype(np.uint8).tobytes() for mask in masks))
        result = {"documents": len(lengths), "tokens": sum(lengths), "report": report.tree}
        return self.mark(name, self.split_keys[index], result)

    def assemble(self, shard: int) -> dict[str, Any]:
        """Write a shard of its splits' documents, shuffled, and delete the splits' files. Sends it if the
        output is in a bucket."""
        if not self.shared:
            return self._assemble(shard)["entry"]
        marker = self.marker(f"shard-{shard:05}", self.shard_keys[shard]) or self._assemble(shard)
        self._send_shard(shard, marker)
        return marker["entry"]

    def _send_shard(self, shard: int, marker: dict[str, Any]) -> None:
        """Send a shard's files, then its record, and delete them here."""
        assert self.shared
        files = [self.folder / f"{shard:05}.{kind}" for kind in (KINDS if self.chat else KINDS[:2])]
        tags = {file.name: self.shared.send_file(file) for file in files}
        content = {"entry": marker["entry"], "report": marker["report"], "tags": tags}
        self.shared.record(self.shared_shard(shard), content)
        self._delete([f"shard-{shard:05}.json"])  # the marker first
        self._delete([file.name for file in files])

    def _assemble(self, shard: int) -> dict[str, Any]:
        dtype, splits = token_dtype(self.tokenizer.vocab_size), self.shards[shard]
        names = [f"split-{index:06}" for index in splits]
        reports = [self.marker(name, self.split_keys[index]) for name, index in zip(names, splits)]
        lengths = [np.load(self.folder / f"{name}.npy") for name in names]
        tokens = [_mapped(self.folder / f"{name}.bin", dtype) for name in names]
        masks = [_mapped(self.folder / f"{name}.mask", np.dtype(np.uint8)) for name in names if self.chat]
        stored = [tokens, masks] if self.chat else [tokens]
        if None in reports or any(
            [len(a) for a in arrays] != [n.sum() for n in lengths] for arrays in stored
        ):
            raise RuntimeError(f"{self.folder}: files of shard {shard} were replaced; run it again")
        self._unmark(f"shard-{shard:05}")
        seed = self.options.seed
        shuffled = shuffle_documents(tokens, lengths, seed, shard)
        shuffled_masks = shuffle_documents(masks, lengths, seed, shard) if self.chat else None
        entry = write_shard(self.folder, f"{shard:05}", shuffled, dtype, shuffled_masks)
        report = merge(r["report"] for r in reports if r is not None)
        result = {"entry": entry, "report": report}
        self.mark(f"shard-{shard:05}", self.shard_keys[shard], result)
        self._delete([f"{name}.json" for name in names])  # the markers first
        self._delete([f"{name}.{suffix}" for name in names for suffix in ("npy", "bin", "mask")])
        return result

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files of the work folder after syncing the folder. Otherwise a power loss might keep the
        deletion but lose the files that replace these."""
        sync(self.folder)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    # ---- documents

    def _read(self, index: int, report: Report) -> Iterator[Document]:
        split, on_bad = self.splits[index], self._on_bad(report)
        try:
            if self.chat:
                ignore = self.options.ignore_fields
                yield from read_conversations(split, self.chat, on_bad, self.options, ignore)
            else:
                yield from read_split(split, self.options.field, on_bad, self.options)
        except ConfigError:
            self._check_unchanged(index)  # then the file is to blame, and not what half of it seems to say
            raise

    def _on_bad(self, report: Report) -> OnBad:
        return stop if self.options.bad_lines == "stop" else report.bad

    def _encoded(
        self, batch: Sequence[Document], report: Report
    ) -> Iterator[tuple[Document, np.ndarray, np.ndarray | None]]:
        """Yield each document with its token ids, and the loss mask of a conversation. A conversation that
        the tokenizer cannot encode is a bad line, which has not been read."""
        if not self.chat:
            yield from zip(batch, self.tokenizer.encode_documents([d.text for d in batch]), repeat(None))
            return
        for document in batch:
            assert document.chat is not None
            try:
                tokens = self.chat.encode(document.chat)
            except ValueError as e:
                self._on_bad(report)(document.file, document.place, str(e))
                report.unread(document)
            else:
                yield document, tokens.ids, tokens.loss_mask

    def _remaining(self, index: int, report: Report) -> Iterator[Document]:
        """Yield a split's documents that no filter removes, and count all documents in `report`."""
        number, scanned = 0, self._resolved(index)
        for number, document in enumerate(self._read(index, report), 1):
            report.read(document)
            if scanned is None:
                removed, reason = self._first_removing(document.text)
            else:
                removed, reason = int(scanned[number - 1]) if number <= len(scanned) else 0, ""
            if not removed:
                yield document
                continue
            original = None
            if scanned is not None and report.wants_sample(removed - 1):
                reason, original = self._reason(removed, document.text, index, number - 1)
            report.removed(removed - 1, document, reason, original)
        self._check_unchanged(index)
        if scanned is not None and number != len(scanned):
            raise ConfigError(f"{self.splits[index].files[0]}: its documents changed since they were scanned")

    def _check_unchanged(self, index: int) -> None:
        split = self.splits[index]
        if _identity(split) != self.identities[index]:
            raise ConfigError(f"{split.files[0]}: changed while it was being prepared; run it again")

    def _first_removing(self, text: str) -> tuple[int, str]:
        """Return the number, from 1, of the first filter function that removes the text, and its reason;
        (0, "") if none does."""
        for i, function in enumerate(self.filters, 1):
            if not isinstance(function, LshSignature) and (reason := function(text)):
                return i, reason
        return 0, ""

    def _signature(self, text: str, removed: int, num_bands: int) -> np.ndarray:
        """Return the bands of all signatures; 0 for filters after the one that removes the document."""
        bands, band = np.zeros(num_bands, dtype=np.uint64), 0
        for i, f in enumerate(self.filters, 1):
            if isinstance(f, LshSignature):
                if not removed or i < removed:
                    bands[band : band + f.num_bands] = f.compute(text)
                band += f.num_bands
        return bands

    def _scanned(self, name: str) -> list[np.ndarray]:
        """Load an array of every split's scan."""
        return [np.load(self._scan_file(index))[name] for index in range(len(self.splits))]

    def _scan_file(self, index: int) -> Path:
        """Return the scan of a split, after copying it from a bucket if another worker has made it."""
        name, key = f"scan-{index:06}", self.scan_keys[index]
        if self.shared and self.marker(name, key) is None:
            self._unmark(name)
            with self._written(f"{name}.npz") as path:
                self.shared.fetch(self._shared_scan(index), path)
            self.mark(name, key, {"documents": 0, "tokens": 0})
        return self.folder / f"{name}.npz"

    def _values(self, bands: Iterable[int], documents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield each band of these documents; one band is in memory at a time."""
        return (np.concatenate(self._scanned(f"band{band}"))[documents] for band in bands)

    def _resolved(self, index: int) -> np.ndarray | None:
        """Return for each document of a split the number of the filter that removes it, or 0. None if no
        filter compares documents."""
        if not self.compares:
            return None
        start, stop = np.load(self.folder / "offsets.npy", mmap_mode="r")[index : index + 2]
        return np.array(np.load(self.folder / "removed.npy", mmap_mode="r")[start:stop])

    def _reason(self, removed: int, text: str, index: int, number: int) -> tuple[str, Place | None]:
        """Return why filter `removed` removes document `number` of split `index`, and the document that it
        duplicates."""
        function = self.filters[removed - 1]
        if not isinstance(function, LshSignature):
            return function(text) or "", None
        offsets = np.load(self.folder / "offsets.npy", mmap_mode="r")
        kept = int(np.load(self.folder / "original.npy", mmap_mode="r")[offsets[index] + number])
        split = int(np.searchsorted(offsets, kept, side="right")) - 1
        file, place = np.load(self._scan_file(split))["places"][kept - offsets[split]]
        return "duplicate of", (self.splits[split].files[file], int(place))


def _identity(split: FileSplit, is_listed: bool = False) -> list[object]:
    """Return values that change when a split's files are edited. `is_listed`: as of `version_of`."""
    return [[(str(f), *version_of(f, is_listed)) for f in split.files], split.begin, split.end]


def _key(*inputs: object) -> str:
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype, mode="r")) if file.stat().st_size else np.empty(0, dtype)
