"""The source `megatron`: reads the datasets of Megatron-LM's `preprocess_data.py` in place.

`PREFIX.bin` holds token ids without a header. `PREFIX.idx` is little-endian: `MMIDIDX` and two zero bytes,
version 1 (uint64), a code of the ids' type (uint8), the number of sequences and the length of the list of
documents (uint64 each); then the sequences' lengths in tokens (int32), their offsets in bytes (int64), and
for each document its first sequence (int64), followed by the number of sequences. A document is one or more
sequences, such as sentences. Multimodal datasets have one more byte per sequence and are refused.

The format has no hashes. So that a run's identity contains the content, the first use reads every byte, on
all cores, and records a hash and the largest id in the cache directory, under a name that depends on the
files' paths, sizes and times of change."""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, expect, load_object
from titanlite.config.paths import PathText, check_writable
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.sources import Source
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import check_regular, hash_file, new_folder, open_regular
from titanlite.log import logger
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # of token ids, by code
HASHED_BYTES = 16 << 20  # of a .bin file, hashed at a time by one core
CHECKED_SEQUENCES = 1 << 20  # of an index, checked at a time


@dataclass(frozen=True)
class Content:
    """The content of a file as its first use records it: a hash of tokens and documents, and the largest
    id."""

    sha256: str
    largest_id: int


class MegatronFile:
    """`prefix`.bin and `prefix`.idx. Opening checks the header and both sizes; raises ConfigError.

    `dtype`: of the ids as they are read, which is unsigned, so that an id below 0 is too large for the
    vocabulary."""

    def __init__(self, prefix: str):
        self.bin, self.idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._is_new = False  # the files were read for the first time, and not verified since
        try:
            with open_regular(self.idx) as file:
                header, idx_bytes = file.read(HEADER.size), os.fstat(file.fileno()).st_size
            check_regular(self.bin)
            bin_bytes = self.bin.stat().st_size
        except OSError as e:
            hint = "expected the path of Megatron's files without .bin and .idx"
            if prefix.endswith((".bin", ".idx")):
                hint = f"write {prefix[:-4]}, without .bin and .idx"
            elif self.bin.exists() or self.idx.exists():
                hint = "a .bin and an .idx are read together"
            raise ConfigError(f"{e.filename}: {e.strerror}; {hint}", "path") from None
        except ValueError as e:
            raise ConfigError(f"{prefix}.bin or {prefix}.idx: {e}", "path") from None
        try:
            self._read_header(header, idx_bytes)
            self._read_sizes(bin_bytes)
        except ValueError as e:
            raise ConfigError(f"{self.idx}: {e}", "path") from None

    def _read_header(self, header: bytes, idx_bytes: int) -> None:
        if not header.startswith(MAGIC):
            raise ValueError("not an index of Megatron's mmap format: it does not begin with MMIDIDX")
        if len(header) < HEADER.size:
            raise ValueError(f"it has {idx_bytes} bytes, the header alone has {HEADER.size}: it is truncated")
        _, version, code, self.num_sequences, num_bounds = HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"its version is {version}, expected {VERSION}")
        if code not in TYPES:
            types = ", ".join(f"{key} ({name})" for key, name in TYPES.items())
            raise ValueError(f"its type of token ids has the code {code}, expected one of {types}")
        stored = np.dtype(TYPES[code])
        self.is_signed, self.dtype = stored.kind == "i", np.dtype(f"<u{stored.itemsize}")
        self.num_documents = num_bounds - 1
        expected = HEADER.size + 12 * self.num_sequences + 8 * num_bounds
        if idx_bytes == expected + self.num_sequences > expected:
            raise ValueError("a multimodal dataset, with a mode for each sequence; only text is supported")
        if idx_bytes != expected:
            raise ValueError(
                f"it has {idx_bytes} bytes, {expected} are right for its {self.num_sequences} sequences and "
                f"{self.num_documents} documents: it is truncated or damaged"
            )
        if self.num_sequences < 1 or self.num_documents < 1:
            raise ValueError("the dataset is empty")

    def _read_sizes(self, bin_bytes: int) -> None:
        first, last = int(self.documents()[0]), int(self.documents()[-1])
        if (first, last) != (0, self.num_sequences):
            raise ValueError(
                f"its documents are sequences {first} to {last}, but it has {self.num_sequences} sequences; "
                "it is damaged, or its writer was interrupted"
            )
        expected = int(self.pointers()[-1]) + int(self.lengths()[-1]) * self.dtype.itemsize
        if bin_bytes != expected:
            raise ValueError(f"the index belongs to {expected} bytes of tokens, {self.bin} has {bin_bytes}")
        self.num_tokens = bin_bytes // self.dtype.itemsize
        if not self.num_tokens:
            raise ValueError("the dataset is empty")

    # numpy maps a file again for each of these arrays. They are not aligned in memory.
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence: int32 [num_sequences]."""
        return self._index_array("<i4", HEADER.size, self.num_sequences)

    def pointers(self) -> np.ndarray:
        """The offset of each sequence in the .bin file, in bytes: int64 [num_sequences]."""
        return self._index_array("<i8", HEADER.size + 4 * self.num_sequences, self.num_sequences)

    def documents(self) -> np.ndarray:
        """The first sequence of each document, then the number of sequences: int64 [num_documents + 1]."""
        return self._index_array("<i8", HEADER.size + 12 * self.num_sequences, self.num_documents + 1)

    def _index_array(self, dtype: str, offset: int, size: int) -> np.ndarray:
        return np.asarray(np.memmap(self.idx, dtype, mode="r", offset=offset, shape=(size,)))

    def content(self, cache_dir: Path) -> Content:
        """Return what was recorded about the files' content, or read the files and record it. Raises
        ConfigError for an index that contradicts itself, and for ids below 0."""
        folder = self.record(cache_dir)
        if not folder.exists():
            check_writable(cache_dir, "data.cache_dir")
            self.check_index()
            content, self._is_new = self.read_content(), True
            with new_folder(folder) as unfinished:
                (unfinished / "content.json").write_bytes(as_json(asdict(content)))
        try:
            tree = load_object(folder / "content.json")
            expect(tree, sha256=str, largest_id=int)
        except (OSError, ValueError) as e:
            raise ConfigError(f"{folder / 'content.json'}: {e}; delete {folder}") from None
        return Content(tree["sha256"], tree["largest_id"])

    def verify(self, cache_dir: Path) -> Content:
        """Compare the files with the content that was recorded, or record it. Returns the content. Raises
        ConfigError."""
        recorded = self.content(cache_dir)
        if self._is_new:  # `content` has just read it
            self._is_new = False
            return recorded
        self.check_index()
        if self.read_content() != recorded:
            raise ConfigError(
                f"{self.bin} and {self.idx.name}: the content differs from the content of their first use, "
                "although their times of change are the same. Restore the files, or delete "
                f"{self.record(cache_dir)} to use them as they are"
            )
        return recorded

    def read_content(self) -> Content:
        """Read both files completely, on all cores. Raises ConfigError for ids below 0."""
        starts = range(0, self.bin.stat().st_size, HASHED_BYTES)
        read = partial(_read_block, self.bin, self.dtype, HASHED_BYTES)
        digest, largest = hashlib.sha256(hash_file(self.idx)[1].encode()), 0
        with (
            worker_pool(min(num_cores(), -(-len(starts) // 8))) as pool,
            Progress(total=len(starts), desc=f"hashing {self.bin.name}", unit="block", delay=1) as bar,
        ):
            for block_digest, block_largest in pool.map(read, starts):
                digest.update(block_digest)
                largest = max(largest, block_largest)
                bar.update()
        if self.is_signed and largest >= 1 << 8 * self.dtype.itemsize - 1:
            raise ConfigError(f"{self.bin}: it has token ids below 0; the file is damaged", "path")
        return Content(digest.hexdigest(), largest)

    def check_index(self) -> None:
        """Raise ConfigError unless every sequence begins where the one before ends, and so does every
        document."""
        lengths, pointers, documents = self.lengths(), self.pointers(), self.documents()
        end = 0
        for begin in range(0, self.num_sequences, CHECKED_SEQUENCES):
            sizes = lengths[begin : begin + CHECKED_SEQUENCES].astype(np.int64) * self.dtype.itemsize
            expected = end + np.cumsum(sizes) - sizes
            wrong = (sizes < 0) | (pointers[begin : begin + CHECKED_SEQUENCES] != expected)
            if wrong.any():
                raise ConfigError(
                    f"{self.idx}: sequence {begin + int(wrong.argmax())} does not begin where the one before "
                    "it ends, or has a length below 0: the index is damaged",
                    "path",
                )
            end = int(expected[-1] + sizes[-1])
        for begin in range(0, self.num_documents, CHECKED_SEQUENCES):
            if (np.diff(documents[begin : begin + CHECKED_SEQUENCES + 1]) < 0).any():
                raise ConfigError(f"{self.idx}: its documents are not in order: the index is damaged", "path")

    def record(self, cache_dir: Path) -> Path:
        """Return the folder of what was recorded about the files as they are now."""
        stats = [os.stat(file) for file in (self.bin, self.idx)]
        state = [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
        key = hashlib.sha256(repr((str(self.bin.resolve()), state)).encode()).hexdigest()[:16]
        return cache_dir / f"megatron-{key}"


def _read_block(file: Path, dtype: np.dtype, num_bytes: int, start: int) -> tuple[bytes, int]:
    """Return the SHA-256 and the largest id of `num_bytes` of a .bin file, or of those to its end."""
    with open_regular(file) as opened:
        opened.seek(start)
        data = opened.read(num_bytes)
    return hashlib.sha256(data).digest(), int(np.frombuffer(data, dtype).max())


class DocumentOffsets:
    """Where the documents of a file start, in tokens, then the file's number of tokens: behaves like a uint64
    array [num_documents + 1].

    Items are computed from the index. An array of them would take 8 bytes per document in every loader
    worker, and numpy.searchsorted would copy the index's arrays, which are not aligned, for each search."""

    def __init__(self, file: MegatronFile):
        self._pointers, self._documents = file.pointers(), file.documents()
        self._width, self._num_tokens = file.dtype.itemsize, file.num_tokens

    def __getitem__(self, key: slice) -> np.ndarray:
        first_sequence, last = self._documents[key], len(self._pointers) - 1
        starts = self._pointers[np.minimum(first_sequence, last)] // self._width
        return np.where(first_sequence > last, self._num_tokens, starts).astype(np.uint64)

    def searchsorted(self, positions: np.ndarray, side: str = "left") -> list[int]:
        """As numpy's method."""
        bisect, numbers = bisect_left if side == "left" else bisect_right, range(len(self._documents))
        return [bisect(numbers, position, key=self._start) for position in positions.tolist()]

    def _start(self, document: int) -> int:
        sequence = int(self._documents[document])
        at_end = sequence == len(self._pointers)
        return self._num_tokens if at_end else int(self._pointers[sequence]) // self._width


class MegatronTokens(ShardedTokens):
    """The files of one or more prefixes as one dataset, with one shard per prefix.

    Opening checks headers and sizes; raises ConfigError. `cache_dir`: for what the first use records."""

    def __init__(self, prefixes: Sequence[str], vocab_size: int, cache_dir: Path):
        self._files = [MegatronFile(prefix) for prefix in prefixes]
        self._cache_dir = cache_dir
        more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
        super().__init__(
            Path(f"{prefixes[0]}{more}"),
            vocab_size,
            tokens_by_shard=[file.num_tokens for file in self._files],
            documents_by_shard=[file.num_documents for file in self._files],
        )

    @cached_property
    def _contents(self) -> list[Content]:
        return [file.content(self._cache_dir) for file in self._files]

    @property
    def fingerprint(self) -> str:
        """A hash of all files. The first use of the files reads them completely."""
        hashes = "".join(content.sha256 for content in self._contents)
        return hashlib.sha256(f"megatron {hashes}".encode()).hexdigest()[:16]

    def check_vocabulary(self) -> None:
        """Raise ConfigError for ids outside the vocabulary. The first use of the files reads them
        completely."""
        for file, content in zip(self._files, self._contents):
            if content.largest_id >= self.vocab_size:
                raise ConfigError(
                    f"{file.bin}: its largest id is {content.largest_id}, the tokenizer has ids below "
                    f"{self.vocab_size}: select the tokenizer that made the file, in [tokenizer]",
                    "path",
                )

    def verify(self) -> None:
        for file in self._files:
            file.verify(self._cache_dir)

    def bin_file(self, shard: int) -> Path:
        return self._files[shard].bin

    def _open_tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.bin_file(shard), self._files[shard].dtype, mode="r"))

    def _open_offsets(self, shard: int) -> DocumentOffsets:
        return DocumentOffsets(self._files[shard])

    def _advice(self) -> str:
        return "another tokenizer made the file, or it was damaged after the run began"


@dataclass(frozen=True, kw_only=True)
class Megatron(Source, name="megatron"):
    """`PREFIX.bin` and `PREFIX.idx` of Megatron-LM's `preprocess_data.py`, read in place. The files decide
    which special tokens frame a document."""

    path: list[PathText]
    """Prefixes without `.bin` and `.idx`, read as one source in this order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError("no prefix: give the path of a .bin file without .bin", "path")
        files = [os.path.realpath(f"{prefix}.bin") for prefix in self.path]
        if twice := [prefix for i, prefix in enumerate(self.path) if files[i] in files[:i]]:
            raise ConfigError(
                f"{twice[0]} is named twice; to read it more often, make it a source with a weight", "path"
            )

    def check(self, tokenizer: Tokenizer) -> bool:
        MegatronTokens(self.path, tokenizer.vocab_size, Path())
        return False  # `build` hashes the files

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> MegatronTokens:
        tokens = MegatronTokens(self.path, tokenizer.vocab_size, cache_dir)
        tokens.check_vocabulary()
        if tokens.read(tokens.num_tokens - 1, 1).item() != tokenizer.eos:
            logger.warning(
                f"{tokens.path}: the last document does not end with the tokenizer's EOS, {tokenizer.eos}; "
                "a model does not learn to end a text from files without EOS (Megatron's --append-eod)"
            )
        return tokens
