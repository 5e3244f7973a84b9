"""ShardedTokens: documents of token ids in files on disk, read as one array. What a data source returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np

from titanlite.config.component import ConfigError

MAX_MAPS = 256  # files mapped at a time: each uses a file descriptor, and a process may have only 1024


class Offsets(Protocol):
    """Where the documents of a shard start, in tokens, then the shard's number of tokens: a uint64 array
    [documents + 1], or an object that computes such an array's items."""

    def __getitem__(self, key: slice) -> np.ndarray: ...

    def searchsorted(self, positions: np.ndarray, side: Any = "left") -> Sequence[int] | np.ndarray:
        """As numpy's method, for `positions` of type uint64."""
        ...


class ShardedTokens(ABC):
    """Token ids on disk as one array of `num_tokens` ids, in `num_documents` documents.

    Token positions count over the concatenation of all shards; no document spans two shards. Files are
    memory-mapped on first use. Picklable: each loader worker maps the files itself. `path`: for messages.
    `vocab_size`: every id must be below it."""

    has_loss_mask = False
    """Whether the dataset says for each token if it counts as a target."""
    num_trained: int | None = None
    """The number of tokens that count as targets; None without a loss mask, or if it is not recorded."""
    is_remote = False
    """Whether the files are on a storage that is not the local disk."""
    warning = ""
    """A warning about the loss masks, for messages; empty if there is none."""

    def __init__(
        self,
        path: PurePath,
        vocab_size: int,
        tokens_by_shard: Sequence[int],
        documents_by_shard: Sequence[int],
    ):
        self.path, self.vocab_size = path, vocab_size
        self.num_tokens, self.num_documents = sum(tokens_by_shard), sum(documents_by_shard)
        self.documents_by_shard = list(documents_by_shard)
        self._starts = np.cumsum([0, *tokens_by_shard]).tolist()
        self._maps: dict[tuple[str, int], Any] = {}

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the tokens and of the documents' boundaries."""

    @abstractmethod
    def verify(self) -> None:
        """Compare the content of every file with the hashes that the fingerprint was made of. Raises
        ConfigError, which names the first file that differs."""

    @abstractmethod
    def bin_file(self, shard: int) -> PurePath:
        """Return the file of a shard's token ids."""

    def counts(self) -> str:
        """Return the numbers of documents, tokens and trained tokens, for messages."""
        counts = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens"
        if self.num_trained is None:
            return counts
        share = self.num_trained / max(self.num_tokens, 1)
        return f"{counts}, {self.num_trained:,} ({share:.1%}) of them trained"

    @abstractmethod
    def _open_tokens(self, shard: int) -> np.ndarray:
        """Map the token ids of a shard that has tokens, as a plain array of unsigned integers, which is
        sliced faster than a memmap."""

    @abstractmethod
    def _open_offsets(self, shard: int) -> Offsets:
        """Map the offsets of a shard's documents."""

    def _open_loss_mask(self, shard: int) -> np.ndarray:
        """Map the loss mask of a shard that has tokens, uint8; only called if `has_loss_mask`."""
        raise NotImplementedError

    @abstractmethod
    def _advice(self) -> str:
        """Return the end of the message about an id outside the vocabulary: its cause, and what to do."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) of the concatenated shards: int64 [count]. Raises ConfigError
        for an id outside the vocabulary, because an embedding on a GPU would abort the process without naming
        the file."""
        out = np.empty(count, dtype=np.int64)
        for shard, offset, place in self._ranges(start, count):
            tokens = self._slice("tokens", shard, offset, place.stop - place.start)
            if (largest := tokens.max()) >= self.vocab_size:
                raise ConfigError(
                    f"{self.bin_file(shard)}: token {offset + int(tokens.argmax())} is {largest}, the "
                    f"tokenizer has ids below {self.vocab_size}: {self._advice()}"
                )
            out[place] = tokens
        return out

    def loss_mask(self, start: int, count: int) -> np.ndarray | None:
        """Return which of the tokens [start, start + count) count as targets: bool [count]; None if all do,
        because the dataset has no loss mask."""
        if not self.has_loss_mask:
            return None
        out = np.empty(count, dtype=np.bool_)
        for shard, offset, place in self._ranges(start, count):
            out[place] = self._slice("mask", shard, offset, place.stop - place.start)
        return out

    def _slice(self, kind: str, shard: int, offset: int, count: int) -> np.ndarray:
        """Return a range of a shard's token ids (kind "tokens") or of its loss mask ("mask")."""
        open_file = self._open_tokens if kind == "tokens" else self._open_loss_mask
        array: np.ndarray = self._mapped(kind, shard, open_file)
        return array[offset : offset + count]

    def _ranges(self, start: int, count: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the ranges of tokens [start, start + count) by shard: the shard, the first token in it, and
        the place of the range in the result."""
        done, shard = 0, bisect_right(self._starts, start) - 1
        while done < count:
            offset = start + done - self._starts[shard]
            end = min(count, done + self._starts[shard + 1] - self._starts[shard] - offset)
            if end > done:
                yield shard, offset, slice(done, end)
            done, shard = end, shard + 1

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Return the positions in tokens [start, start + count) at which documents start: int64, ascending,
        relative to `start`."""
        by_shard, shard = [], bisect_right(self._starts, start) - 1
        while shard < len(self._starts) - 1 and self._starts[shard] < start + count:
            offsets = self._offsets(shard)
            begin, end = int(start) - self._starts[shard], int(start) + count - self._starts[shard]
            # The bounds have the offsets' dtype: otherwise searchsorted converts a copy of all offsets.
            low, high = offsets.searchsorted(np.array([max(begin, 0), end], dtype=np.uint64))
            high = min(high, self.documents_by_shard[shard])  # the last offset is the shard's end
            by_shard.append(self._ascending(offsets[low:high], shard).astype(np.int64) - begin)
            shard += 1
        starts = by_shard[0] if len(by_shard) == 1 else np.concatenate(by_shard)
        return starts[np.diff(starts, prepend=-1) > 0]  # an empty document starts where the next one does

    def locate(self, token: int) -> tuple[int, int]:
        """Return the number of the document that contains a token, and the token's position in it."""
        shard = bisect_right(self._starts, token) - 1
        offsets, place = self._offsets(shard), token - self._starts[shard]
        document = int(offsets.searchsorted(np.array([place], dtype=np.uint64), side="right")[0]) - 1
        first = int(offsets[document : document + 1][0])
        return sum(self.documents_by_shard[:shard]) + document, place - first

    def token_offsets(self, shard: int, first: int = 0, end: int | None = None) -> np.ndarray:
        """Return the positions in the concatenated shards at which documents [first, end) of a shard start,
        and the end of the last of them: uint64 [end - first + 1]. `end`: by default all documents."""
        end = self.documents_by_shard[shard] if end is None else end
        offsets = self._ascending(self._offsets(shard)[first : end + 1], shard)
        return offsets + np.uint64(self._starts[shard])

    def num_longer_than(self, num_tokens: int) -> int:
        """Return how many documents have more than `num_tokens` tokens."""
        shards = range(len(self.documents_by_shard))
        return sum(int((np.diff(self.token_offsets(shard)) > num_tokens).sum()) for shard in shards)

    def document(self, number: int) -> np.ndarray:
        """Return the token ids of a document, by its number over all shards: int64 [tokens]. Raises
        IndexError."""
        for shard, num_documents in enumerate(self.documents_by_shard):
            if number < num_documents:
                begin, end = self.token_offsets(shard, number, number + 1).tolist()
                return self.read(begin, end - begin)
            number -= num_documents
        raise IndexError(number)

    def _offsets(self, shard: int) -> Offsets:
        return self._mapped("offsets", shard, self._map_offsets)

    def _map_offsets(self, shard: int) -> Offsets:
        offsets, num_documents = self._open_offsets(shard), self.documents_by_shard[shard]
        ends = [int(offsets[i : i + 1][0]) for i in (0, num_documents)]
        if ends != [0, self._starts[shard + 1] - self._starts[shard]]:
            raise self._damaged_offsets(shard)
        return offsets

    def _ascending(self, offsets: np.ndarray, shard: int) -> np.ndarray:
        """Return some offsets of a shard. Raises ConfigError if they do not ascend, as in a dataset whose
        recorded hashes are right and whose maker is not to be trusted."""
        if (offsets[1:] < offsets[:-1]).any():
            raise self._damaged_offsets(shard)
        return offsets

    def _damaged_offsets(self, shard: int) -> ConfigError:
        return ConfigError(
            f"{self.bin_file(shard).with_suffix('.idx')}: its documents do not follow one another from the "
            "first token to the last: the index is damaged; make or get the dataset again"
        )

    def _mapped(self, kind: str, shard: int, open_file: Callable[[int], Any]) -> Any:
        if (kind, shard) not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[kind, shard] = open_file(shard)
        return self._maps[kind, shard]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}
