"""Token shards: the only dataset format that training reads.

A dataset is a directory with `dataset.json` and, per shard, `NNNNN.bin` (token ids: little-endian uint16, or
uint32 for vocabularies over 65,536) and `NNNNN.idx` (uint64: the offset of each document in the shard, then
the shard's number of tokens). dataset.json records counts, the tokenizer's fingerprint and each file's
SHA-256. The directory is written under a temporary name and renamed when it is complete. No document spans
two shards. Token positions count over the concatenation of all shards."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import expect, load_object
from titanlite.files import check_regular, hash_file, named, sync, write_atomically
from titanlite.tokenizers.base import Tokenizer

FORMAT = 1
MAX_MAPS = 256  # files mapped at a time: each uses a file descriptor, and a process may have only 1024
DATASET_KEYS: dict[str, type] = {
    "format": int, "dtype": str, "tokenizer": str, "vocab_size": int, "tokens": int, "documents": int,
    "shards": list,
}  # fmt: skip
SHARD_KEYS: dict[str, type] = {
    "name": str, "tokens": int, "documents": int, "bin_sha256": str, "idx_sha256": str
}  # fmt: skip


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the storage type of ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(folder: Path, name: str, documents: Iterable[np.ndarray], dtype: np.dtype) -> dict[str, Any]:
    """Write and sync `name`.bin and `name`.idx. `documents`: an array of token ids per document, of any
    integer type. Returns the shard's entry for dataset.json."""
    digest, offsets = hashlib.sha256(), [0]
    with named(folder / f"{name}.bin"), open(folder / f"{name}.bin", "wb") as f:
        for tokens in documents:
            data = tokens.astype(dtype, copy=False).tobytes()
            f.write(data)
            digest.update(data)
            offsets.append(offsets[-1] + len(tokens))
    index = np.asarray(offsets, dtype="<u8").tobytes()
    with named(folder / f"{name}.idx"):
        (folder / f"{name}.idx").write_bytes(index)
    sync(folder / f"{name}.bin")
    sync(folder / f"{name}.idx")
    return {
        "name": name,
        "tokens": offsets[-1],
        "documents": len(offsets) - 1,
        "bin_sha256": digest.hexdigest(),
        "idx_sha256": hashlib.sha256(index).hexdigest(),
    }


def write_description(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[dict[str, Any]], prepared: dict[str, Any]
) -> None:
    """Write dataset.json. `shards`: the results of `write_shard`. `prepared`: a human-readable record of the
    input."""
    description = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
        "tokens": sum(s["tokens"] for s in shards),
        "documents": sum(s["documents"] for s in shards),
        "prepared": prepared,
        "shards": list(shards),
    }
    write_atomically(folder / "dataset.json", json.dumps(description, indent=1) + "\n")


class TokenShards:
    """A dataset on disk as one array of `num_tokens` token ids. Files are memory-mapped on first use.

    Opening checks dataset.json and every file's size; raises ConfigError, which names the file. `verify()`
    compares hashes. Picklable: each loader worker maps the files itself.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        description = _read_description(self.path)
        self.num_tokens, self.num_documents = description["tokens"], description["documents"]
        self.tokenizer_fingerprint = description["tokenizer"]
        self.vocab_size: int = description["vocab_size"]
        self.prepared: dict[str, Any] = description.get("prepared", {})
        self._dtype, self._shards = np.dtype(description["dtype"]), description["shards"]
        self._starts = np.cumsum([0] + [s["tokens"] for s in self._shards]).tolist()
        hashes = "".join(s["bin_sha256"] + s["idx_sha256"] for s in self._shards)
        content = f"{self.tokenizer_fingerprint}{self._dtype}{hashes}"
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        self._maps: dict[str, np.ndarray] = {}
        for shard in self._shards:
            self._check_size(f"{shard['name']}.bin", shard["tokens"] * self._dtype.itemsize)
            self._check_size(f"{shard['name']}.idx", (shard["documents"] + 1) * 8)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) of the concatenated shards: int64 [count]. Raises ConfigError
        for an id outside the vocabulary, because an embedding on a GPU would abort the process without naming
        the file."""
        out, done = np.empty(count, dtype=np.int64), 0
        shard = bisect_right(self._starts, start) - 1
        while done < count:
            offset = start + done - self._starts[shard]
            tokens = self._map(shard, "bin")[offset : offset + count - done]
            if len(tokens) and (largest := tokens.max()) >= self.vocab_size:
                file, place = self.path / f"{self._shards[shard]['name']}.bin", offset + int(tokens.argmax())
                raise ConfigError(
                    f"{file}: token {place} is {largest}, the tokenizer has ids below {self.vocab_size}: the "
                    f"file is damaged. Check all files with `titanlite data verify {self.path}`, then "
                    "prepare the dataset again"
                )
            out[done : done + len(tokens)] = tokens
            done, shard = done + len(tokens), shard + 1
        return out

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Return the positions in tokens [start, start + count) at which documents start: int64, ascending,
        relative to `start`."""
        by_shard, shard = [], bisect_right(self._starts, start) - 1
        while shard < len(self._shards) and self._starts[shard] < start + count:
            offsets = self._map(shard, "idx")[:-1]
            begin, end = int(start) - self._starts[shard], int(start) + count - self._starts[shard]
            # The bounds have the offsets' dtype: otherwise searchsorted converts a copy of all offsets.
            low, high = np.searchsorted(offsets, np.array([max(begin, 0), end], dtype=offsets.dtype))
            inside = offsets[low:high]
            by_shard.append(inside.astype(np.int64) - begin)
            shard += 1
        starts = by_shard[0] if len(by_shard) == 1 else np.concatenate(by_shard)
        return starts[np.diff(starts, prepend=-1) > 0]  # an empty document starts where the next one does

    def locate(self, token: int) -> tuple[int, int]:
        """Return the number of the document that contains a token, and the token's position in it."""
        shard = bisect_right(self._starts, token) - 1
        offsets = self._map(shard, "idx")
        place = token - self._starts[shard]
        document = int(np.searchsorted(offsets, place, side="right")) - 1
        return sum(self.documents_by_shard[:shard]) + document, place - int(offsets[document])

    @property
    def documents_by_shard(self) -> list[int]:
        """The number of documents in each shard."""
        return [shard["documents"] for shard in self._shards]

    def token_offsets(self, shard: int) -> np.ndarray:
        """Return the positions in the concatenated shards at which the shard's documents start, and the end
        of the last document: uint64 [documents + 1]."""
        return self._map(shard, "idx") + np.uint64(self._starts[shard])

    def document(self, number: int) -> np.ndarray:
        """Return the token ids of a document, by its number over all shards: int64 [tokens]. Raises
        IndexError."""
        for k, shard in enumerate(self._shards):
            if number < shard["documents"]:
                begin, end = (int(x) for x in self.token_offsets(k)[number : number + 2])
                return self.read(begin, end - begin)
            number -= shard["documents"]
        raise IndexError(number)

    def verify(self) -> None:
        """Compare the SHA-256 of every file with dataset.json. Raises ConfigError, which names the first file
        that differs."""
        for shard in self._shards:
            for kind in ("bin", "idx"):
                file = self.path / f"{shard['name']}.{kind}"
                if hash_file(file)[1] != shard[f"{kind}_sha256"]:
                    raise ConfigError(
                        f"{file}: its SHA-256 differs from that in dataset.json; prepare the dataset again"
                    )

    def _map(self, shard: int, kind: str) -> np.ndarray:
        name = f"{self._shards[shard]['name']}.{kind}"
        if name not in self._maps:
            dtype = self._dtype if kind == "bin" else np.dtype("<u8")
            empty = kind == "bin" and not self._shards[shard]["tokens"]  # an empty file cannot be mapped
            mapped = np.empty(0, dtype) if empty else np.memmap(self.path / name, dtype, mode="r")
            if len(self._maps) >= MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[name] = np.asarray(mapped)  # slicing a memmap itself costs microseconds
        return self._maps[name]

    def _check_size(self, name: str, expected: int) -> None:
        try:
            check_regular(self.path / name)
            size = (self.path / name).stat().st_size
        except (OSError, ValueError) as e:
            raise ConfigError(f"{self.path / name}: {getattr(e, 'strerror', e)}") from None
        if size != expected:
            raise ConfigError(
                f"{self.path / name} has {size} bytes, dataset.json says {expected}; prepare the "
                "dataset again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}


def _read_description(path: Path) -> dict[str, Any]:
    file = path / "dataset.json"
    try:
        description = load_object(file)
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}; expected a directory made by `titanlite prepare`") from None
    except ValueError as e:
        raise ConfigError(f"{file} does not describe a dataset: {e}") from None
    try:
        _check_description(description)
    except ValueError as e:
        raise ConfigError(f"{file}: {e}; prepare the dataset again") from None
    return description


def _check_description(description: dict[str, Any]) -> None:
    """Raise ValueError for a description that write_description() could not have written."""
    expect(description, **DATASET_KEYS)
    if description["format"] != FORMAT:
        raise ValueError(f"its format is {description['format']}, this titanlite reads format {FORMAT}")
    if description["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"dtype {description['dtype']!r} is neither uint16 nor uint32")
    if type(description.get("prepared", {})) is not dict:
        raise ValueError("`prepared` is not an object")
    for shard in description["shards"]:
        expect(shard, **SHARD_KEYS)
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", shard["name"]):
            raise ValueError(f"{shard['name']!r} is not a valid name of a shard")
        if min(shard["tokens"], shard["documents"]) < 0:
            raise ValueError(f"shard {shard['name']} has a count below 0")
    for key in ("tokens", "documents"):
        if sum(shard[key] for shard in description["shards"]) != description[key]:
            raise ValueError(f"the {key} of its shards do not add up to {description[key]}")
