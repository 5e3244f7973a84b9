"""Token shards: the one format that training reads.

A directory: `dataset.json`, and per shard `NNNNN.bin` (token ids, little-endian uint16, or uint32 for
vocabularies over 65,536) and `NNNNN.idx` (uint64 offsets of the documents in it, the total last).
dataset.json records counts, the tokenizer's fingerprint and each file's SHA-256. The directory is written
under another name and renamed when whole, so one that has a name is complete. Documents never span shards;
readers see the concatenation of all shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.tokenizer import TextCodec

FORMAT = 1
DATASET_KEYS = {"format", "dtype", "tokenizer", "vocab_size", "tokens", "documents", "shards"}
SHARD_KEYS = {"name", "tokens", "documents", "bin_sha256", "idx_sha256"}
SHARD_TOKENS = (
    1 << 27
)  # 256 MiB of uint16: large enough to be few, small enough to hash and copy one at a time


class ShardWriter:
    """Context manager: `add` documents of token ids; on a clean exit the directory appears whole under
    `path`.

    On an exception nothing is left. If `path` exists by then (another process was faster), this copy is
    dropped.
    """

    def __init__(self, path: Path, codec: TextCodec, shard_tokens: int = SHARD_TOKENS):
        self.path, self.codec, self.shard_tokens = path, codec, shard_tokens
        self.dtype = np.dtype("<u2" if codec.vocab_size <= 1 << 16 else "<u4")
        self.num_tokens = self.num_documents = 0
        self._shards: list[dict[str, Any]] = []
        self._partial = path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> ShardWriter:
        self._partial.mkdir(parents=True)
        self._open_shard()
        return self

    def add(self, ids: Sequence[int]) -> None:
        """Append one document. Raises ConfigError for an id outside the vocabulary."""
        tokens = np.asarray(ids, dtype=np.int64)
        outside = (tokens < 0) | (tokens >= self.codec.vocab_size)
        if outside.any():
            bad = tokens[outside][0]
            raise ConfigError(f"token id {bad} outside the vocabulary of {self.codec.vocab_size}")
        if self._offsets[-1] and self._offsets[-1] + len(tokens) > self.shard_tokens:
            self._close_shard()
            self._open_shard()
        data = tokens.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.num_tokens += len(tokens)
        self.num_documents += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._close_shard()
                self._write_description()
                self._appear()
        finally:
            self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _appear(self) -> None:
        for file in [*self._partial.iterdir(), self._partial]:
            _sync(file)
        try:
            if not self.path.exists():
                os.rename(self._partial, self.path)
                _sync(self.path.parent)
        except OSError:
            if not self.path.exists():  # otherwise another process was faster, and has made the same
                raise

    def _open_shard(self) -> None:
        self._file = open(self._partial / f"{len(self._shards):05}.bin", "wb")  # noqa: SIM115 -- closed with the shard
        self._hash, self._offsets = hashlib.sha256(), [0]

    def _close_shard(self) -> None:
        self._file.close()
        index = np.asarray(self._offsets, dtype="<u8").tobytes()
        name = f"{len(self._shards):05}"
        (self._partial / f"{name}.idx").write_bytes(index)
        self._shards.append(
            {
                "name": name,
                "tokens": self._offsets[-1],
                "documents": len(self._offsets) - 1,
                "bin_sha256": self._hash.hexdigest(),
                "idx_sha256": hashlib.sha256(index).hexdigest(),
            }
        )

    def _write_description(self) -> None:
        description = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "tokenizer": self.codec.fingerprint,
            "vocab_size": self.codec.vocab_size,
            "bos": self.codec.bos,
            "eos": self.codec.eos,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "shards": self._shards,
        }
        (self._partial / "dataset.json").write_text(json.dumps(description, indent=1) + "\n")


class TokenShards:
    """A directory of shards as one sequence of `num_tokens` token ids. Files are mapped on first use.

    Opening checks the description and every file's size (ConfigError names the file); `verify()` re-hashes.
    Picklable: a loader worker maps the files anew.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        description = _read_description(self.path)
        self.num_tokens, self.num_documents = description["tokens"], description["documents"]
        self.tokenizer, self.vocab_size = description["tokenizer"], description["vocab_size"]
        self._dtype, self._shards = np.dtype(description["dtype"]), description["shards"]
        self._starts = np.cumsum([0] + [s["tokens"] for s in self._shards]).tolist()
        hashes = "".join(s["bin_sha256"] + s["idx_sha256"] for s in self._shards)
        self.fingerprint = hashlib.sha256(f"{self.tokenizer}{self._dtype}{hashes}".encode()).hexdigest()[:16]
        self._maps: dict[int, np.ndarray] = {}
        for shard in self._shards:
            self._check_size(f"{shard['name']}.bin", shard["tokens"] * self._dtype.itemsize)
            self._check_size(f"{shard['name']}.idx", (shard["documents"] + 1) * 8)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the concatenation, as int64 [count]."""
        out, done = np.empty(count, dtype=np.int64), 0
        shard = bisect_right(self._starts, start) - 1
        while done < count:
            offset = start + done - self._starts[shard]
            part = self._map(shard)[offset : offset + count - done]
            out[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return out

    def document_offsets(self, shard: int) -> np.ndarray:
        """Offsets of the shard's documents within it, the total last: uint64 [documents + 1]."""
        return np.fromfile(self.path / f"{self._shards[shard]['name']}.idx", dtype="<u8")

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, by its number over all shards."""
        for k, shard in enumerate(self._shards):
            if number < shard["documents"]:
                begin, end = (int(x) for x in self.document_offsets(k)[number : number + 2])
                return self.read(self._starts[k] + begin, end - begin)
            number -= shard["documents"]
        raise IndexError(number)

    def verify(self) -> None:
        """Re-hash every file; ConfigError names the first whose content is not what was written."""
        for shard in self._shards:
            for kind in ("bin", "idx"):
                file = self.path / f"{shard['name']}.{kind}"
                if _file_sha256(file) != shard[f"{kind}_sha256"]:
                    raise ConfigError(
                        f"{file}: content differs from what dataset.json records; prepare it again"
                    )

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            file = self.path / f"{self._shards[shard]['name']}.bin"
            empty = not self._shards[shard]["tokens"]  # an empty file cannot be mapped
            self._maps[shard] = np.empty(0, self._dtype) if empty else np.memmap(file, self._dtype, mode="r")
        return self._maps[shard]

    def _check_size(self, name: str, expected: int) -> None:
        try:
            size = (self.path / name).stat().st_size
        except OSError as e:
            raise ConfigError(f"{self.path / name}: {e.strerror}") from None
        if size != expected:
            raise ConfigError(
                f"{self.path / name}: {size} bytes, dataset.json says {expected}; prepare it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}


def _read_description(path: Path) -> dict[str, Any]:
    file = path / "dataset.json"
    try:
        description = json.loads(file.read_text())
        tables = [(description, DATASET_KEYS), *((shard, SHARD_KEYS) for shard in description["shards"])]
        if missing := {key for table, keys in tables for key in keys - table.keys()}:
            raise ConfigError(f"{file}: no {', '.join(sorted(missing))} in it")
        if description["format"] != FORMAT:
            raise ConfigError(f"{file}: format {description['format']}, this titanlite reads {FORMAT}")
        if description["dtype"] not in ("uint16", "uint32"):
            raise ConfigError(f"{file}: dtype {description['dtype']!r} is neither uint16 nor uint32")
        for key in ("tokens", "documents"):
            if sum(shard[key] for shard in description["shards"]) != description[key]:
                raise ConfigError(f"{file}: the {key} of its shards do not add up to {description[key]}")
        return description
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}; a directory made by `titanlite prepare` has one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{file}: not a dataset description: {e!r}") from None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
