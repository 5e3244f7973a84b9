"""Token shards: the dataset format of `titanlite prepare`.

A dataset is a directory with `dataset.json` and, per shard, `NNNNN.bin` (token ids: little-endian uint16, or
uint32 for vocabularies over 65,536) and `NNNNN.idx` (uint64: the offset of each document in the shard, then
the shard's number of tokens). Conversations also have `NNNNN.mask` (a byte per token: 1 if it counts as a
target, else 0); such a dataset has format 2, so that a reader that does not know masks refuses it.
dataset.json records counts, the tokenizer's fingerprint and each file's SHA-256. The directory is written
under a temporary name and renamed when it is complete. No document spans two shards. Token positions count
over the concatenation of all shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import expect, load_object
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.files import check_regular, hash_file, named, sync, write_atomically
from titanlite.tokenizers.base import Tokenizer

FORMAT, FORMAT_WITH_MASKS = 1, 2
DATASET_KEYS: dict[str, type] = {
    "format": int, "dtype": str, "tokenizer": str, "vocab_size": int, "tokens": int, "documents": int,
    "shards": list,
}  # fmt: skip
SHARD_KEYS: dict[str, type] = {
    "name": str, "tokens": int, "documents": int, "bin_sha256": str, "idx_sha256": str
}  # fmt: skip

MASK_KEYS: dict[int, dict[str, type]] = {FORMAT: {}, FORMAT_WITH_MASKS: {"mask_sha256": str}}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the storage type of ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(
    folder: Path,
    name: str,
    documents: Iterable[np.ndarray],
    dtype: np.dtype,
    loss_masks: Iterable[np.ndarray] | None = None,
) -> dict[str, Any]:
    """Write and sync `name`.bin and `name`.idx, and `name`.mask if there are loss masks. `documents`: an
    array of token ids per document, of any integer type. `loss_masks`: for each document, which tokens count
    as targets, bool [tokens]. Returns the shard's entry for dataset.json."""
    lengths, bin_sha256 = _write_arrays(folder / f"{name}.bin", documents, dtype)
    offsets = np.cumsum([0, *lengths])
    _, idx_sha256 = _write_arrays(folder / f"{name}.idx", [offsets], np.dtype("<u8"))
    entry = {
        "name": name,
        "tokens": int(offsets[-1]),
        "documents": len(lengths),
        "bin_sha256": bin_sha256,
        "idx_sha256": idx_sha256,
    }
    if loss_masks is None:
        return entry
    num_trained = list[int]()

    def counted() -> Iterator[np.ndarray]:
        for mask in loss_masks:
            num_trained.append(int(np.count_nonzero(mask)))
            yield mask

    masked, mask_sha256 = _write_arrays(folder / f"{name}.mask", counted(), np.dtype(np.uint8))
    assert masked == lengths
    return entry | {"mask_sha256": mask_sha256, "trained_tokens": sum(num_trained)}


def _write_arrays(file: Path, arrays: Iterable[np.ndarray], dtype: np.dtype) -> tuple[list[int], str]:
    """Write and sync a file of concatenated arrays. Returns their lengths, and the file's SHA-256."""
    digest, lengths = hashlib.sha256(), list[int]()
    with named(file), open(file, "wb") as f:
        for array in arrays:
            data = array.astype(dtype, copy=False).tobytes()
            f.write(data)
            digest.update(data)
            lengths.append(len(array))
    sync(file)
    return lengths, digest.hexdigest()


def write_description(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[dict[str, Any]], prepared: dict[str, Any]
) -> None:
    """Write dataset.json. `shards`: the results of `write_shard`. `prepared`: a human-readable record of the
    input."""
    description = {
        "format": FORMAT_WITH_MASKS if any("mask_sha256" in s for s in shards) else FORMAT,
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


class PreparedTokens(ShardedTokens):
    """A dataset that dataset.json describes, wherever its files are. `description`: a checked one."""

    def __init__(self, path: PurePath, description: dict[str, Any]):
        self._shards, self._dtype = description["shards"], np.dtype(description["dtype"])
        super().__init__(
            path,
            description["vocab_size"],
            tokens_by_shard=[shard["tokens"] for shard in self._shards],
            documents_by_shard=[shard["documents"] for shard in self._shards],
        )
        self.tokenizer_fingerprint: str = description["tokenizer"]
        self.prepared: dict[str, Any] = description.get("prepared", {})
        self.warning = str(self.prepared.get("warning", ""))
        self.has_loss_mask = description["format"] == FORMAT_WITH_MASKS
        self._kinds = ("bin", "idx", "mask") if self.has_loss_mask else ("bin", "idx")
        trained = [shard.get("trained_tokens") for shard in self._shards]  # older datasets lack it
        self.num_trained = sum(trained) if self.has_loss_mask and None not in trained else None
        hashes = "".join(s[f"{kind}_sha256"] for s in self._shards for kind in self._kinds)
        content = f"{self.tokenizer_fingerprint}{self._dtype}{hashes}"
        self._fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def bin_file(self, shard: int) -> PurePath:
        return self.path / f"{self._shards[shard]['name']}.bin"

    def sizes(self) -> dict[str, int]:
        """Return the bytes that each file must have, by its name."""
        of_tokens = {"bin": self._dtype.itemsize, "mask": 1}
        return {
            f"{shard['name']}.{kind}": (
                (shard["documents"] + 1) * 8 if kind == "idx" else shard["tokens"] * of_tokens[kind]
            )
            for shard in self._shards
            for kind in self._kinds
        }

    def _advice(self) -> str:
        return (
            f"the file is damaged. Check all files with `titanlite data verify {self.path}`, then "
            "prepare the dataset again"
        )


class TokenShards(PreparedTokens):
    """A dataset directory on the local disk.

    Opening checks dataset.json and every file's size; raises ConfigError, which names the file. `verify()`
    compares hashes.
    """

    path: Path

    def __init__(self, path: str | Path):
        super().__init__(Path(path), _read_description(Path(path)))
        for name, size in self.sizes().items():
            self._check_size(name, size)

    def verify(self) -> None:
        """Compare the SHA-256 of every file with dataset.json. Raises ConfigError, which names the first file
        that differs."""
        for shard in self._shards:
            for kind in self._kinds:
                file = self.path / f"{shard['name']}.{kind}"
                if hash_file(file)[1] != shard[f"{kind}_sha256"]:
                    raise ConfigError(
                        f"{file}: its SHA-256 differs from that in dataset.json; prepare the dataset again"
                    )

    def _open_tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.bin_file(shard), self._dtype, mode="r"))

    def _open_offsets(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.bin_file(shard).with_suffix(".idx"), np.dtype("<u8"), mode="r"))

    def _open_loss_mask(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.bin_file(shard).with_suffix(".mask"), np.uint8, mode="r"))

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


def _read_description(path: Path) -> dict[str, Any]:
    file = path / "dataset.json"
    try:
        description = load_object(file)
    except OSError as e:
        if path.is_file():
            raise ConfigError(
                f'{path} is a file, not a dataset: the source name = "text" reads texts, "chat" conversations'
            ) from None
        raise ConfigError(f"{file}: {e.strerror}; expected a directory made by `titanlite prepare`") from None
    except ValueError as e:
        raise ConfigError(f"{file} does not describe a dataset: {e}") from None
    return checked_description(description, file)


def checked_description(description: dict[str, Any], file: PurePath) -> dict[str, Any]:
    """Return the content of a dataset.json. Raises ConfigError if it is not valid."""
    try:
        _check_description(description)
    except ValueError as e:
        raise ConfigError(f"{file}: {e}; prepare the dataset again") from None
    return description


def _check_description(description: dict[str, Any]) -> None:
    """Raise ValueError for a description that write_description() could not have written."""
    expect(description, **DATASET_KEYS)
    if description["format"] not in (FORMAT, FORMAT_WITH_MASKS):
        raise ValueError(
            f"its format is {description['format']}, this titanlite reads formats {FORMAT} and "
            f"{FORMAT_WITH_MASKS}"
        )
    if description["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"dtype {description['dtype']!r} is neither uint16 nor uint32")
    if type(description.get("prepared", {})) is not dict:
        raise ValueError("`prepared` is not an object")
    for shard in description["shards"]:
        expect(shard, **SHARD_KEYS, **MASK_KEYS[description["format"]])
        if type(shard.get("trained_tokens", 0)) is not int:
            raise ValueError("`trained_tokens` of a shard is not an integer")
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", shard["name"]):
            raise ValueError(f"{shard['name']!r} is not a valid name of a shard")
        if min(shard["tokens"], shard["documents"]) < 0:
            raise ValueError(f"shard {shard['name']} has a count below 0")
    for key in ("tokens", "documents"):
        if sum(shard[key] for shard in description["shards"]) != description[key]:
            raise ValueError(f"the {key} of its shards do not add up to {description[key]}")
