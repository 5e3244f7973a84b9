"""Downloads: brings the sequences of a run into the SequenceCache before they are needed.

Each node has one process that downloads, a child of its first rank. The data order is known, so it reads the
sequences that the ranks of its node take next, each by its own byte ranges, as far ahead as WINDOW_BYTES or a
quarter of the cache allows. It evicts the sequences that are needed latest (Belady's rule): the next use of
a sequence is computed, because the order can be inverted."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.dataset import SequenceDataset
from titanlite.data.loader import MicroBatches
from titanlite.data.order import NEVER
from titanlite.data.packing import PackedSequences
from titanlite.data.remote_shards import CONNECTIONS, RemoteTokens, delay_s, explain, is_final
from titanlite.data.sequence_cache import NUMBERS, OwnedCache
from titanlite.data.worker_pool import begin_worker
from titanlite.errors import LoaderError
from titanlite.log import tell

WINDOW_BYTES = 1 << 30  # downloaded ahead: minutes of training, so that a store may be away for as long
POLL_S = 0.02  # between two looks at the position and at what readers wait for
ADOPTED = 10_000  # entries of ended processes to take over at a time
LOOK_S = 2.0  # between two looks at which other runs use the cache


@dataclass(frozen=True)
class NodeOrder:
    """The sequences that the ranks of a node take, in order. `micro_batches`: of any rank, whose position and
    skipped sequences count. `ranks`: the data-parallel ranks of the node. `end`: the position after the
    run."""

    micro_batches: MicroBatches
    ranks: Sequence[int]
    end: int

    def __iter__(self) -> Iterator[int]:
        by_rank = [iter(replace(self.micro_batches, rank=rank)) for rank in self.ranks]
        for micro_batches in zip(*by_rank):
            numbers = list(chain.from_iterable(batch.numbers for batch in micro_batches))
            yield from (number for number in numbers if number < self.end)
            if numbers[0] >= self.end:
                return

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        """Return which training sequences the node takes, bool [n], as far as the batch sizes are known."""
        order = self.micro_batches
        if len(self.ranks) == order.num_ranks:
            return np.ones(len(numbers), dtype=bool)
        for first, last in reversed(order.skipped.ranges):  # numbers without the skipped sequences
            numbers = numbers - np.clip(numbers - first, 0, last - first + 1)
        sizes = order.step_sizes.without(order.skipped).sizes
        firsts = np.array([size.first_sequence for size in sizes])
        batch_sizes = np.array([size.global_batch_size for size in sizes])
        i = np.searchsorted(firsts, numbers, side="right") - 1
        place = (numbers - firsts[i]) % batch_sizes[i]
        return np.isin(place // order.micro_batch_size % order.num_ranks, self.ranks)


class Downloader:
    """The work of the process that downloads. `cycle` is called again and again, with the position of the run
    in the data order."""

    def __init__(self, sequences: SequenceDataset, order: NodeOrder, cache: OwnedCache):
        self._sequences, self._order, self._cache = sequences, order, cache
        held_out = [source.packed for source in sequences.for_validation.sources]
        packed = {p.content: p for p in (*held_out, *sequences.packed) if p.shards.is_remote}
        self._packed = {cache.first_id(content) // NUMBERS: p for content, p in packed.items()}
        sequence_bytes = max(_num_bytes(p) for p in packed.values())
        self._window_size = min(WINDOW_BYTES, cache.max_bytes // 4) // sequence_bytes
        node_batch = order.micro_batches.micro_batch_size * len(order.ranks)
        if self._window_size < node_batch:
            raise ConfigError(
                f"data.cache_gib: a micro-batch of the {len(order.ranks)} ranks of a node has "
                f"{node_batch * sequence_bytes:,} bytes, which must be less than a quarter of the cache"
            )
        self._batch = max(1, cache.batch_bytes // sequence_bytes)
        self._numbers, self._window = iter(order), deque[tuple[int, int]]()
        self._ahead: deque[int] = deque()  # ids to download
        self._flying: dict[int, Future[bytes]] = {}
        self._errors: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._stopped, self._pool = Event(), ThreadPoolExecutor(CONNECTIONS)
        self._horizon, self._last_adopted, self._looked = NEVER, -1, time.monotonic()
        self._failed: set[int] = set()
        cache.forget_errors()

    def cycle(self, position: int, timeout_s: float = POLL_S) -> bool:
        """Do what there is to do at a position, for about `timeout_s`. Returns whether nothing is left."""
        adopted = self._adopt(position)
        self._pass(position)
        self._look_ahead()
        wanted = self._cache.missing(self._cache.wanted())
        for id_ in wanted:
            if id_ // NUMBERS in self._packed:
                self._failed.discard(id_)
                self._fetch(id_)
        while self._ahead and len(self._flying) < CONNECTIONS:
            self._fetch(self._ahead.popleft())
        wait(self._flying.values(), timeout_s, FIRST_COMPLETED)
        self._store(position)
        if time.monotonic() - self._looked > LOOK_S:
            if self._cache.find_others():
                self._last_adopted = -1
            self._cache.share(self._horizon)
            self._looked = time.monotonic()
        return not (adopted or self._ahead or self._flying)

    def close(self) -> None:
        """End the downloads."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _adopt(self, position: int) -> int:
        """Take over some entries of ended processes that this run uses. Returns how many were looked at."""
        ids = self._cache.of_ended(self._last_adopted, ADOPTED)
        self._last_adopted = ids[-1] if len(ids) == ADOPTED else NEVER
        own = [id_ for id_ in ids if id_ // NUMBERS in self._packed]
        if own:
            self._cache.set_uses(self._next_uses(own, position))
        return len(ids)

    def _pass(self, position: int) -> None:
        """Say when the sequences before `position` are used next."""
        used = []
        while self._window and self._window[0][0] < position:
            used.append(self._window.popleft()[1])
        if used:
            self._cache.set_uses(self._next_uses(used, position))

    def _look_ahead(self) -> None:
        """Extend the window by the sequences that come next, and note which ones are to be downloaded."""
        new = list[tuple[int, int]]()
        while len(self._window) + len(new) < self._window_size:
            if (number := next(self._numbers, None)) is None:
                break
            packed, local = self._sequences.origin(number)
            if packed.shards.is_remote:
                new.append((number, self._cache.first_id(packed.content) + local))
        if new:
            self._window += new
            self._ahead += self._cache.missing([id_ for _, id_ in new])
        self._horizon = self._window[-1][0] + 1 if self._window else self._order.end

    def _next_uses(self, ids: Sequence[int], position: int) -> dict[int, int]:
        """Return when sequences are used next from `position` on, by id."""
        result, all_ids = dict[int, int](), np.array(ids, dtype=np.int64)
        for content in np.unique(all_ids // NUMBERS).tolist():
            own = all_ids[all_ids // NUMBERS == content]
            uses = self._sequences.next_uses(
                self._packed[content], own % NUMBERS, position, self._order.contains, self._order.end
            )
            result.update(zip(own.tolist(), uses.tolist()))
        return result

    def _fetch(self, id_: int) -> None:
        if id_ not in self._flying and id_ not in self._failed and self._cache.missing([id_]):
            packed, number = self._packed[id_ // NUMBERS], id_ % NUMBERS
            self._flying[id_] = self._pool.submit(self._download, id_, packed, number)

    def _download(self, id_: int, packed: PackedSequences, number: int) -> bytes:
        """In a thread: read a sequence, as often as it takes. A thread that waits after an error keeps its
        place, so that a store in trouble gets fewer requests."""
        shards, attempt = packed.shards, 0
        assert isinstance(shards, RemoteTokens)
        data = list[bytes]()
        for place in shards.ranges(packed, number):
            while True:
                try:
                    data.append(shards.read_range(place))
                    break
                except Exception as e:
                    message = explain(e, shards.bin_file(place.shard))
                    if is_final(e):
                        raise ConfigError(message) from None
                    self._errors.put((id_, message))
                    if self._stopped.wait(delay_s(attempt)):
                        raise
                    attempt += 1
        return b"".join(data)

    def _store(self, position: int) -> None:
        """Write what has arrived, and the errors, into the cache."""
        try:
            while True:
                self._cache.fail(*self._errors.get_nowait(), is_final=False)
        except Empty:
            pass
        arrived = dict[int, bytes]()
        for id_, future in list(self._flying.items()):
            if future.done() and future.exception() is not None:
                self._cache.fail(id_, str(future.exception()), is_final=True)
                self._failed.add(id_)
                del self._flying[id_]
            elif future.done() and len(arrived) < self._batch:
                arrived[id_] = future.result()
        if arrived:
            next_uses = self._next_uses(list(arrived), position)
            if self._cache.put({id_: (data, next_uses[id_]) for id_, data in arrived.items()}, self._horizon):
                for id_ in arrived:
                    del self._flying[id_]
            else:
                time.sleep(POLL_S)  # until another run has left its share, or this run has gone on


class Downloads:
    """The process that downloads, seen from the rank that starts it."""

    def __init__(self, sequences: SequenceDataset, order: NodeOrder, max_bytes: int):
        self._owner_pid, context = os.getpid(), get_context("spawn")
        self._position: Any = context.Value("q", order.micro_batches.first_sequence, lock=False)
        arguments = sequences, order, max_bytes, self._position
        self._process = context.Process(
            target=begin_worker, args=(_download_all, arguments), name="downloads", daemon=True
        )
        self._process.start()
        assert sequences.cache is not None
        sequences.cache.check = self.check

    def advance(self, position: int) -> None:
        """Say that the sequences before `position` were taken."""
        self._position.value = position

    def check(self) -> None:
        """Raise LoaderError if the process has ended. Does nothing in other processes."""
        if os.getpid() == self._owner_pid and (code := self._process.exitcode) is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise LoaderError(f"the process that downloads sequences (pid {self._process.pid}) {how}")

    def close(self) -> None:
        """End the process. What it has downloaded stays in the cache."""
        self._process.kill()
        self._process.join()


def _download_all(arguments: tuple[SequenceDataset, NodeOrder, int, Any]) -> None:
    """In the process that downloads."""
    for name in (
        "SIGTERM",
        "SIGHUP",
        "SIGUSR1",
        "SIGUSR2",
    ):  # the trainer finishes its step, which needs data
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sequences, order, max_bytes, position = arguments
    assert sequences.cache is not None
    try:
        downloader = Downloader(sequences, order, OwnedCache(sequences.cache.folder, max_bytes))
        while True:
            if downloader.cycle(position.value):
                time.sleep(POLL_S)
    except Exception as e:
        tell(f"the process that downloads sequences: {e or type(e).__name__}")
        os._exit(1)  # requests may hang, and their threads would be waited for


def _num_bytes(packed: PackedSequences) -> int:
    """The bytes of a sequence in the cache, with what the database needs for it."""
    assert isinstance(packed.shards, RemoteTokens)
    return (packed.seq_len + 1) * packed.shards.bytes_per_token * 5 // 4 + 256
