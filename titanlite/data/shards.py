"""Token shards: the one format that training reads.

A directory: `dataset.json`, and per shard `NNNNN.bin` (token ids, little-endian uint16, or uint32 for
vocabularies over 65,536) and `NNNNN.idx` (uint64 offsets of the documents in it, the total last).
dataset.json records counts, the tokenizer's fingerprint and each file's SHA-256. The directory is written
under another name and renamed when whole (pipeline.py), so one that has a name is complete. Documents never
span shards; readers see the concatenation of all shards.
"""

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
from titanlite.files import check_regular, named, sync, write_atomically
from titanlite.tokenizers.base import TextCodec

FORMAT = 1
MAX_MAPS = 256  # of files at a time: each map holds a file descriptor, of which a process has 1024
DATASET_KEYS: dict[str, type] = {
    "format": int, "dtype": str, "tokenizer": str, "vocab_size": int, "tokens": int, "documents": int,
    "shards": list,
}  # fmt: skip
SHARD_KEYS: dict[str, type] = {
    "name": str, "tokens": int, "documents": int, "bin_sha256": str, "idx_sha256": str
}  # fmt: skip


def token_dtype(vocab_size: int) -> np.dtype:
    """How ids below `vocab_size` are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(folder: Path, name: str, documents: Iterable[np.ndarray], dtype: np.dtype) -> dict[str, Any]:
    """Write `name`.bin and `name`.idx, hashed on the way and synced; returns the shard's entry for
    dataset.json."""
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
    folder: Path, codec: TextCodec, shards: Sequence[dict[str, Any]], prepared: dict[str, Any]
) -> None:
    """Write dataset.json over shards that `write_shard` made; `prepared` says from what, for people."""
    description = {
        "format": FORMAT,
        "dtype": token_dtype(codec.vocab_size).name,
        "tokenizer": codec.fingerprint,
        "vocab_size": codec.vocab_size,
        "bos": codec.bos,
        "eos": codec.eos,
        "tokens": sum(s["tokens"] for s in shards),
        "documents": sum(s["documents"] for s in shards),
        "prepared": prepared,
        "shards": list(shards),
    }
    write_atomically(folder / "dataset.json", json.dumps(description, indent=1) + "\n")


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
        self.prepared: dict[str, Any] = description.get("prepared", {})
        self._dtype, self._shards = np.dtype(description["dtype"]), description["shards"]
        self._starts = np.cumsum([0] + [s["tokens"] for s in self._shards]).tolist()
        hashes = "".join(s["bin_sha256"] + s["idx_sha256"] for s in self._shards)
        self.fingerprint = hashlib.sha256(f"{self.tokenizer}{self._dtype}{hashes}".encode()).hexdigest()[:16]
        self._maps: dict[str, np.ndarray] = {}
        for shard in self._shards:
            self._check_size(f"{shard['name']}.bin", shard["tokens"] * self._dtype.itemsize)
            self._check_size(f"{shard['name']}.idx", (shard["documents"] + 1) * 8)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the concatenation, as int64 [count]. Raises ConfigError for an id
        that the tokenizer does not have: in an embedding on a GPU it would end the process without a word of
        where it came from."""
        out, done = np.empty(count, dtype=np.int64), 0
        shard = bisect_right(self._starts, start) - 1
        while done < count:
            offset = start + done - self._starts[shard]
            part = self._map(shard, "bin")[offset : offset + count - done]
            if len(part) and (largest := part.max()) >= self.vocab_size:
                file, place = self.path / f"{self._shards[shard]['name']}.bin", offset + int(part.argmax())
                raise ConfigError(
                    f"{file}: token {place} is {largest}, the tokenizer has ids below {self.vocab_size}: the "
                    f"file is damaged; `titanlite data verify {self.path}` checks all, then prepare it again"
                )
            out[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return out

    def begins(self, start: int, count: int) -> np.ndarray:
        """Where in tokens [start, start + count) documents begin: int64, ascending, relative to `start`."""
        found, shard = [], bisect_right(self._starts, start) - 1
        while shard < len(self._shards) and self._starts[shard] < start + count:
            offsets = self._map(shard, "idx")[:-1]
            begin, end = int(start) - self._starts[shard], int(start) + count - self._starts[shard]
            # in the offsets' own type: any other makes searchsorted copy and convert all of them
            low, high = np.searchsorted(offsets, np.array([max(begin, 0), end], dtype=offsets.dtype))
            inside = offsets[low:high]
            found.append(inside.astype(np.int64) - begin)
            shard += 1
        begins = found[0] if len(found) == 1 else np.concatenate(found)
        return begins[np.diff(begins, prepend=-1) > 0]  # an empty document begins where the next one does

    def locate(self, token: int) -> tuple[int, int]:
        """The number of the document that a token of the concatenation is in, and its place in it."""
        shard = bisect_right(self._starts, token) - 1
        offsets = self._map(shard, "idx")
        place = token - self._starts[shard]
        document = int(np.searchsorted(offsets, place, side="right")) - 1
        return sum(self.documents_by_shard[:shard]) + document, place - int(offsets[document])

    @property
    def documents_by_shard(self) -> list[int]:
        """How many documents each shard has."""
        return [shard["documents"] for shard in self._shards]

    def token_offsets(self, shard: int) -> np.ndarray:
        """Where the shard's documents begin in the concatenation, the last one's end last: uint64
        [documents + 1]."""
        return self._map(shard, "idx") + np.uint64(self._starts[shard])

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, by its number over all shards."""
        for k, shard in enumerate(self._shards):
            if number < shard["documents"]:
                begin, end = (int(x) for x in self.token_offsets(k)[number : number + 2])
                return self.read(begin, end - begin)
            number -= shard["documents"]
        raise IndexError(number)

    def verify(self) -> None:
        """Re-hash every file; ConfigError names the first whose content is not what was written."""
        for shard in self._shards:
            for kind in ("bin", "idx"):
                file = self.path / f"{shard['name']}.{kind}"
                if file_sha256(file) != shard[f"{kind}_sha256"]:
                    raise ConfigError(
                        f"{file}: content differs from what dataset.json records; prepare it again"
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
                f"{self.path / name}: {size} bytes, dataset.json says {expected}; prepare it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}


def _read_description(path: Path) -> dict[str, Any]:
    file = path / "dataset.json"
    try:
        description = load_object(file)
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}; a directory made by `titanlite prepare` has one") from None
    except ValueError as e:
        raise ConfigError(f"{file} is no description of a dataset: {e}") from None
    try:
        _check_description(description)
    except ValueError as e:
        raise ConfigError(f"{file}: {e}; prepare it again") from None
    return description


def _check_description(description: dict[str, Any]) -> None:
    """Raises ValueError for what write_description() does not write."""
    expect(description, **DATASET_KEYS)
    if description["format"] != FORMAT:
        raise ValueError(f"format {description['format']}, this titanlite reads {FORMAT}")
    if description["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"dtype {description['dtype']!r} is neither uint16 nor uint32")
    if type(description.get("prepared", {})) is not dict:
        raise ValueError("prepared is no object")
    for shard in description["shards"]:
        expect(shard, **SHARD_KEYS)
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", shard["name"]):
            raise ValueError(f"{shard['name']!r} is no name of a shard")
        if min(shard["tokens"], shard["documents"]) < 0:
            raise ValueError(f"shard {shard['name']} has a count below 0")
    for key in ("tokens", "documents"):
        if sum(shard[key] for shard in description["shards"]) != description[key]:
            raise ValueError(f"the {key} of its shards do not add up to {description[key]}")


def file_sha256(path: Path) -> str:
    """Of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
