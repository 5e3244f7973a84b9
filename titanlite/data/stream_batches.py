"""Micro-batches of a stream, made while its documents are read in their order.

The documents are dealt out to shares, one per data-parallel rank and loader worker, and each share is
tokenised and packed by itself. So the sequences depend on the numbers of ranks and workers, and the state,
which has the place of every share in the stream, fits only the layout that it was saved on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from titanlite.config.component import ConfigError, Unreadable
from titanlite.data.batch import Batch, make_batch
from titanlite.data.loader import LoaderLayout
from titanlite.data.packing import TokenSequence
from titanlite.data.stream_source import Stream
from titanlite.log import logger
from titanlite.tokenizers.base import Tokenizer

TOKENIZED_AT_ONCE = 64  # documents; the state has the number, so it may change
MANY_SHARDS = 8  # per share: one more or less makes a difference of at most 1/8
State = dict[str, Any]


@dataclass(frozen=True)
class TokenStream:
    """A stream and the way in which it becomes sequences."""

    source: Stream
    tokenizer: Tokenizer
    seq_len: int
    mask_documents: bool = False


class _Block(NamedTuple):
    """Documents that were tokenised together. `before`: the state of the documents before the first one.
    `num_documents`: the number asked for. `num_tokens`: all of them have."""

    before: State
    num_documents: int
    num_tokens: int


class StreamedBatch(NamedTuple):
    """A micro-batch, or the error of the stream, and the state of its share after it."""

    batch: Batch | ConfigError
    state: State


class StreamedBatches(IterableDataset[StreamedBatch]):
    """The micro-batches of the shares of a rank, one share per loader worker, without end: after its last
    document a share begins again. The loader takes a micro-batch of each worker in turn.

    `num_returned`: micro-batches that this rank's loader has returned so far. `states`: the state of each of
    its shares after the last of them; {}: the share has returned none. A state is small: the place in the
    stream of the oldest documents that are not used up, how many of their tokens are, and the number of
    micro-batches. A resume reads these documents again."""

    def __init__(
        self,
        stream: TokenStream,
        layout: LoaderLayout,
        rank: int,
        num_returned: int = 0,
        states: Sequence[State] = (),
    ):
        self.stream, self.layout, self.rank = stream, layout, rank
        self.num_returned, self.states = num_returned, states

    def __iter__(self) -> Iterator[StreamedBatch]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        own = (worker + self.num_returned) % num_workers  # the first worker returns the next micro-batch
        share = self.rank * num_workers + own, self.layout.num_ranks * num_workers
        try:
            self._open(*share, self.states[own] if self.states else {})
            while True:
                batch = self._batch(self._count * num_workers + own)
                self._count += 1
                yield StreamedBatch(batch, self._state())
        except ConfigError as e:  # torch would add the worker's traceback, so StreamLoader raises it
            yield StreamedBatch(e, {})

    def _open(self, share: int, num_shares: int, state: State) -> None:
        """Begin the stream, or continue after the micro-batch of `state`."""
        self._documents = _Share(self.stream.source, share, num_shares)
        self._tokens, self._starts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._offset = self._count = 0
        self._blocks = deque[_Block]()  # of the tokens that are left
        if state:
            self._documents.load_state_dict(state["documents"])
            self._count = state["count"]
            self._read(state["num_documents"])
            self._use(state["offset"])

    def _batch(self, number: int) -> Batch:
        """Return micro-batch `number` of this rank."""
        size, seq_len = self.layout.micro_batch_size, self.stream.seq_len
        while len(self._tokens) < size * seq_len + 1:
            self._read(TOKENIZED_AT_ONCE)
        sequences = [self._sequence(i * seq_len) for i in range(size)]
        self._use(size * seq_len)
        first = (number * self.layout.num_ranks + self.rank) * size
        numbers = range(first, first + size)
        batch = make_batch(numbers, sequences, seq_len=seq_len, with_positions=self.stream.mask_documents)
        return replace(batch, source_ids=torch.zeros(size, dtype=torch.int64))  # the stream is source 0

    def _sequence(self, start: int) -> TokenSequence:
        end = start + self.stream.seq_len + 1
        starts = self._starts[(self._starts >= start) & (self._starts < end)] - start
        return TokenSequence(self._tokens[start:end], starts if self.stream.mask_documents else None)

    def _read(self, num_documents: int) -> None:
        """Append the tokens of the next documents: at most `num_documents`."""
        before = self._documents.state_dict()
        encoded = self.stream.tokenizer.encode_documents(self._documents.take(num_documents))
        ids = [tokens for tokens in encoded if len(tokens)]
        ends = np.cumsum([len(self._tokens), *map(len, ids)])
        self._blocks.append(_Block(before, num_documents, int(ends[-1] - ends[0])))
        self._starts = np.concatenate([self._starts, ends[:-1]])
        self._tokens = np.concatenate([self._tokens, *ids])

    def _use(self, count: int) -> None:
        """Drop the first `count` tokens."""
        self._tokens, self._starts = self._tokens[count:], self._starts[self._starts >= count] - count
        self._offset += count
        while self._blocks and self._offset >= self._blocks[0].num_tokens:
            self._offset -= self._blocks.popleft().num_tokens

    def _state(self) -> State:
        """Return the state after the last micro-batch."""
        if self._blocks:
            block = self._blocks[0]
        else:
            block = _Block(self._documents.state_dict(), TOKENIZED_AT_ONCE, 0)
        return {
            "count": self._count,
            "documents": block.before,
            "num_documents": block.num_documents,
            "offset": self._offset,
        }


def describe_document(number: int) -> str:
    """Name a document for messages by its number."""
    return f"document {number:,} of the stream"


def has_own_shards(source: Stream, documents: Any, num_shares: int) -> bool:
    """Return True if each of `num_shares` shares of the documents reads only its own shards of the stream,
    False if each reads the whole stream and uses its own documents. Shares with very different numbers of
    shards would read some documents far more often than others."""
    if source.stream.max_documents or not hasattr(documents, "num_shards"):
        return False  # the first `max_documents` documents are in the first shards
    num_shards = documents.num_shards
    return num_shards >= MANY_SHARDS * num_shares or (num_shards > 0 and num_shards % num_shares == 0)


@contextmanager
def _stream_errors(label: str) -> Iterator[None]:
    """Raise an error of a stream as Unreadable, in one line that begins with the stream's label. Any kind of
    error may come from a network, a server or the user's own code, so all are caught; the log has the
    traceback."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        logger.error(f"{label} has failed", exc_info=e)
        lines = str(e).strip().splitlines()
        raise Unreadable(f"{label}: {type(e).__name__}{f': {lines[0]}' if lines else ''}") from e


class _Share:
    """The documents of share number `share` of a stream, again and again: the documents of its own
    shards (see has_own_shards), or else every `num_shares`-th document. Empty documents are left out, and bad
    ones if the source says so."""

    def __init__(self, source: Stream, share: int, num_shares: int):
        self._source, self._share, self._num_shares = source, share, num_shares
        self._num_bad = 0
        self._begin()

    def _begin(self) -> None:
        with _stream_errors(self._source.label):
            documents: Any = self._source.documents()
            self._stride, self._first = self._num_shares, self._share
            if has_own_shards(self._source, documents, self._num_shares):
                documents = documents.shard(self._num_shares, self._share)
                self._stride, self._first = 1, 0
        self._documents, self._has_state = documents, hasattr(documents, "state_dict")
        self._iterator: Iterator[Any] | None = None
        self._place: State | None = None  # the stream's own state, before its next document
        self._number = 0  # of documents read in this epoch, including other shares

    def take(self, count: int) -> list[str]:
        """Return at most `count` texts; fewer at the end of the share, where it begins again. Raises
        ConfigError for a document without text, and if an epoch of this share has no text."""
        texts, at_start = list[str](), self._number == 0
        for document in self._rest():
            if self._number % self._stride == self._first:
                text = self._text(document)
                texts += [text] if text else []
            self._number += 1
            if len(texts) == count:
                return texts
        if at_start and not texts:
            raise ConfigError(
                f"the stream has too few documents: one of its {self._num_shares} shares, one per "
                "data-parallel rank and loader worker, has no text. Lower data.num_workers, or use fewer "
                "ranks"
            )
        self._begin()
        return texts

    def _rest(self) -> Iterator[Any]:
        """Read the documents that are left in this epoch, including other shares."""
        limit = self._source.stream.max_documents
        with _stream_errors(self._source.label):
            if self._iterator is None:
                self._iterator = iter(self._documents)
            yield from islice(self._iterator, limit - self._number if limit else None)

    def _text(self, document: Any) -> str:
        """Return the text of the document that was just read, "" for a bad one that is skipped."""
        share = f" (share {self._share} of {self._num_shares})" if self._stride < self._num_shares else ""
        try:
            return self._source.text(document, describe_document(self._number) + share)
        except ConfigError as e:
            if self._source.bad_documents == "stop":
                raise
            self._num_bad += 1
            if 10 ** (len(str(self._num_bad)) - 1) == self._num_bad:  # 1, 10, 100, ...
                logger.warning(
                    f"{self._source.label}: share {self._share} of {self._num_shares} has skipped "
                    f"{self._num_bad:,} bad document{'s' if self._num_bad > 1 else ''}, the last one: {e}"
                )
            return ""

    def state_dict(self) -> State:
        if self._has_state and self._iterator is not None:
            with _stream_errors(self._source.label):
                place = self._documents.state_dict()
            self._place = deepcopy(place)  # it may be the stream's own, which changes
        return {"number": self._number, "num_bad": self._num_bad, "stream": self._place}

    def load_state_dict(self, state: State) -> None:
        self._begin()
        self._number, self._num_bad = state["number"], state["num_bad"]
        if self._has_state and self._number:
            self._place = state["stream"]
            with _stream_errors(self._source.label):
                self._documents.load_state_dict(self._place)
        elif self._number:
            self._iterator = islice(self._documents, self._number, None)
