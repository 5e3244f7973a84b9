"""The stages of a preparation. Each is a function of its inputs that writes files into the work folder:

    scan every split -> resolve duplicates  (only if a filter compares documents)
    encode a shard's splits -> assemble the shard

A stage writes its marker last: a JSON file with a key that is a hash of all inputs. A stage whose marker has
the current key is done."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.json_file import load_object
from titanlite.data.order import key_of, permute
from titanlite.data.shards import token_dtype, write_shard
from titanlite.files import named, sync
from titanlite.prepare.corpus import Document, FileSplit, Limits, read_split, split_files, stop, where
from titanlite.prepare.dedup import first_of_each
from titanlite.prepare.filters import Filter, LshSignature
from titanlite.prepare.report import Place, Report, merge
from titanlite.tokenizers.base import Tokenizer

T = TypeVar("T")
VERSION = 2  # raise it when the same input gives other bytes
SHARD_BYTES = 256 << 20  # of text, from 32 splits: about 128 MiB of uint16 tokens
BATCH, BATCH_CHARACTERS = 64, 8 << 20  # largest batch for the tokenizer


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Limits):
    """The options that determine a dataset, besides its files and tokenizer."""

    field: str = "text"
    seed: int = 0
    bad_lines: Literal["stop", "skip"] = "stop"
    filters: Sequence[Filter] = ()


class JobState:
    """What one preparation has to do. It is the same for the same input in every process.

    `splits`: the splits of the corpus. `shards`: for each shard, the numbers of its splits. `compares`:
    whether a filter compares documents. Picklable: every process has a copy."""

    def __init__(self, files: Sequence[Path], folder: Path, tokenizer: Tokenizer, options: PrepareOptions):
        self.files, self.folder, self.tokenizer, self.options = files, folder, tokenizer, options
        self.splits = split_files(files, options.field)
        self.shards = _grouped(self.splits, options.seed)
        filters = toml.as_tree(list(options.filters))
        self.identities = identities = [_identity(u) for u in self.splits]
        self.scan_keys = [
            _key(VERSION, identity, options.field, options.bad_lines, options.max_document_mib, filters)
            for identity in identities
        ]
        self.filters = [f.build() for f in options.filters]
        self.compares = any(isinstance(f, LshSignature) for f in self.filters)
        self.resolve_key = _key(*self.scan_keys) if self.compares else ""
        self.split_keys = [_key(k, tokenizer.fingerprint, self.resolve_key) for k in self.scan_keys]
        self.shard_keys = [
            _key(options.seed, i, *map(self.split_keys.__getitem__, s)) for i, s in enumerate(self.shards)
        ]
        self.key = _key(*self.shard_keys)

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
        """Write the marker of stage `name` with its result, after syncing the names of the stage's files.
        Returns the result."""
        sync(self.folder)
        with self._written(f"{name}.json") as path:
            path.write_text(json.dumps({"key": key, **result}))
        return result

    def _unmark(self, name: str) -> None:
        """Delete the marker of a stage before its files are replaced: it does not hold for new files."""
        marker = self.folder / f"{name}.json"
        if marker.exists():
            marker.unlink(missing_ok=True)
            sync(self.folder)

    @contextmanager
    def _written(self, name: str) -> Iterator[Path]:
        """Yield another name for a new file, which is synced and renamed when the body ends."""
        path = self.folder / f".{name}-{uuid.uuid4().hex[:8]}"
        try:
            with named(self.folder / name):
                yield path
            sync(path)
            os.replace(path, self.folder / name)
        finally:
            path.unlink(missing_ok=True)

    # ---- stages

    def scan(self, u: int) -> dict[str, Any]:
        """Write which filter function removes each document of a split, and the signatures of the rest."""
        if done := self.marker(f"scan-{u:06}", self.scan_keys[u]):  # meanwhile, by another worker
            return done
        self._unmark(f"scan-{u:06}")
        split = self.splits[u]
        num_bands = sum(f.num_bands for f in self.filters if isinstance(f, LshSignature))
        removed, places, signatures = list[int](), list[tuple[int, int]](), list[np.ndarray]()
        numbers = {file: i for i, file in enumerate(split.files)}
        for document in self._read(split, Report([])):
            removed.append(self._first_removing(document.text)[0])
            places.append((numbers[document.file], document.place))
            signatures.append(self._signature(document.text, removed[-1], num_bands))
        self._check_unchanged(u)
        columns = np.array(signatures, dtype=np.uint64).reshape(-1, num_bands).T
        arrays: dict[str, Any] = {f"band{b}": np.ascontiguousarray(c) for b, c in enumerate(columns)}
        with self._written(f"scan-{u:06}.npz") as path, open(path, "wb") as f:
            np.savez(
                f,
                removed=np.array(removed, np.uint8),
                places=np.array(places, np.int64).reshape(-1, 2),
                **arrays,
            )
        return self.mark(f"scan-{u:06}", self.scan_keys[u], {"documents": len(removed), "tokens": 0})

    def resolve(self, progress: Callable[[str], None]) -> None:
        """Find duplicates in all splits. Writes for each document the filter that removes it, and the earlier
        document that it is a duplicate of."""
        self._unmark("resolve")
        counts = [self._scanned(u)["removed"].size for u in range(len(self.splits))]
        offsets = np.cumsum([0, *counts])
        removed = np.concatenate([self._scanned(u)["removed"] for u in range(len(self.splits))])
        original, done = np.full(len(removed), -1, dtype=np.int64), 0
        for i, signature in enumerate(self.filters):
            if not isinstance(signature, LshSignature):
                continue
            candidates = np.flatnonzero((removed == 0) | (removed > i + 1))

            def band(
                b: int,
                *,
                name: str = self.options.filters[i].name,
                start: int = done,
                among: np.ndarray = candidates,
            ) -> np.ndarray:
                progress(f"{name}, band {b + 1}")
                return np.concatenate(
                    [self._scanned(u)[f"band{start + b}"] for u in range(len(self.splits))]
                )[among]

            first = first_of_each(len(candidates), signature.num_bands, band)
            later = np.flatnonzero(first != np.arange(len(first)))
            removed[candidates[later]] = i + 1
            original[candidates[later]] = candidates[first[later]]
            done += signature.num_bands
        for name, array in {"removed": removed, "original": original, "offsets": offsets}.items():
            with self._written(f"{name}.npy") as path, open(path, "wb") as f:
                np.save(f, array)
        self.mark("resolve", self.resolve_key, {})

    def encode(self, u: int) -> dict[str, Any]:
        """Write the token ids of a split's remaining documents, in order."""
        self._unmark(f"unit-{u:06}")
        report = Report([f.name for f in self.options.filters])
        dtype, vocab_size = token_dtype(self.tokenizer.vocab_size), self.tokenizer.vocab_size
        documents, lengths = self._remaining(u, report), list[int]()
        with self._written(f"unit-{u:06}.bin") as path, open(path, "wb") as f:
            for batch in batches(documents, lambda document: len(document.text)):
                for document, ids in zip(batch, self.tokenizer.encode_documents([d.text for d in batch])):
                    if len(ids) and ids.max() >= vocab_size:
                        place = where(document.file, document.place)
                        raise ConfigError(
                            f"{place}: token id {ids.max()} outside the vocabulary of {vocab_size}"
                        )
                    f.write(ids.astype(dtype).tobytes())
                    lengths.append(len(ids))
                    report.kept(document, len(ids))
        with self._written(f"unit-{u:06}.npy") as path, open(path, "wb") as f:
            np.save(f, np.array(lengths, np.int64))
        result = {"documents": len(lengths), "tokens": sum(lengths), "report": report.tree}
        return self.mark(f"unit-{u:06}", self.split_keys[u], result)

    def assemble(self, s: int) -> dict[str, Any]:
        """Write a shard of its splits' documents, shuffled, and delete the splits' files."""
        dtype, splits = token_dtype(self.tokenizer.vocab_size), self.shards[s]
        reports = [self.marker(f"unit-{u:06}", self.split_keys[u]) for u in splits]
        lengths = [np.load(self.folder / f"unit-{u:06}.npy") for u in splits]
        tokens = [_mapped(self.folder / f"unit-{u:06}.bin", dtype) for u in splits]
        if None in reports or [len(t) for t in tokens] != [n.sum() for n in lengths]:
            raise RuntimeError(f"{self.folder}: files were replaced while shard {s} was made; run it again")
        self._unmark(f"shard-{s:05}")
        ends = [np.cumsum(n) for n in lengths]
        split = np.repeat(np.arange(len(splits)), [len(n) for n in lengths])
        begin, end = np.concatenate([e - n for e, n in zip(ends, lengths)]), np.concatenate(ends)
        order = permute(np.arange(len(split)), len(split), key_of("documents", self.options.seed, s))
        shuffled = (tokens[split[i]][begin[i] : end[i]] for i in order)
        entry = write_shard(self.folder, f"{s:05}", shuffled, dtype)
        report = merge(r["report"] for r in reports if r is not None)
        self.mark(f"shard-{s:05}", self.shard_keys[s], {"entry": entry, "report": report})
        self._delete([f"unit-{u:06}.json" for u in splits])  # the markers first
        self._delete([f"unit-{u:06}.{suffix}" for u in splits for suffix in ("npy", "bin")])
        return entry

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files of the work folder after syncing the folder: a power loss might otherwise keep the
        deletion and lose the files' replacements."""
        sync(self.folder)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    # ---- documents

    def _read(self, split: FileSplit, report: Report) -> Iterator[Document]:
        on_bad = stop if self.options.bad_lines == "stop" else report.bad
        return read_split(split, self.options.field, on_bad, self.options)

    def _remaining(self, u: int, report: Report) -> Iterator[Document]:
        """Yield the documents that no filter removes, and count the others in `report`."""
        number, scanned = 0, self._resolved(u)
        for number, document in enumerate(self._read(self.splits[u], report), 1):
            report.read(document)
            if scanned is None:
                index, reason = self._first_removing(document.text)
            else:
                index, reason = int(scanned[number - 1]) if number <= len(scanned) else 0, ""
            if not index:
                yield document
                continue
            original = None
            if scanned is not None and report.wants_sample(index - 1):
                reason, original = self._reason(index, document.text, u, number - 1)
            report.removed(index - 1, document, reason, original)
        self._check_unchanged(u)
        if scanned is not None and number != len(scanned):
            raise ConfigError(f"{self.splits[u].files[0]}: its documents changed since they were scanned")

    def _check_unchanged(self, u: int) -> None:
        if _identity(self.splits[u]) != self.identities[u]:
            raise ConfigError(f"{self.splits[u].files[0]}: changed while it was being prepared; run it again")

    def _first_removing(self, text: str) -> tuple[int, str]:
        """Return the number, from 1, of the first filter function that removes the text and its reason; else
        0."""
        for i, function in enumerate(self.filters, 1):
            if not isinstance(function, LshSignature) and (reason := function(text)):
                return i, reason
        return 0, ""

    def _signature(self, text: str, removed: int, num_bands: int) -> np.ndarray:
        """Return the bands of all signatures; 0 for filters after the one that removes the document."""
        out, done = np.zeros(num_bands, dtype=np.uint64), 0
        for i, f in enumerate(self.filters, 1):
            if isinstance(f, LshSignature):
                if not removed or i < removed:
                    out[done : done + f.num_bands] = f.compute(text)
                done += f.num_bands
        return out

    def _scanned(self, u: int) -> Any:
        return np.load(self.folder / f"scan-{u:06}.npz")

    def _resolved(self, u: int) -> np.ndarray | None:
        if not self.compares:
            return None
        begin, end = np.load(self.folder / "offsets.npy", mmap_mode="r")[u : u + 2]
        return np.array(np.load(self.folder / "removed.npy", mmap_mode="r")[begin:end])

    def _reason(self, index: int, text: str, u: int, number: int) -> tuple[str, Place | None]:
        """Return why filter `index` removed document `number` of split `u`, and the document that it
        duplicates."""
        function = self.filters[index - 1]
        if not isinstance(function, LshSignature):
            return function(text) or "", None
        offsets = np.load(self.folder / "offsets.npy", mmap_mode="r")
        kept = int(np.load(self.folder / "original.npy", mmap_mode="r")[offsets[u] + number])
        split = int(np.searchsorted(offsets, kept, side="right")) - 1
        file, place = self._scanned(split)["places"][kept - offsets[split]]
        return "duplicate of", (self.splits[split].files[file], int(place))


def batches(documents: Iterable[T], length_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group documents into batches that are handed to the tokenizer at once."""
    batch, size = list[T](), 0
    for document in documents:
        batch.append(document)
        size += length_of(document)
        if len(batch) == BATCH or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _grouped(splits: Sequence[FileSplit], seed: int) -> list[list[int]]:
    """Draw splits at random into groups of about SHARD_BYTES."""
    groups, size = list[list[int]](), SHARD_BYTES
    for u in permute(np.arange(len(splits)), len(splits), key_of("splits", seed)).tolist():
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(u)
        size += splits[u].size
    return groups


def _identity(split: FileSplit) -> list[object]:
    """Return what changes when a split's files are edited."""
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in split.files]
    return [stats, split.begin, split.end]


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype, mode="r")) if file.stat().st_size else np.empty(0, dtype)
