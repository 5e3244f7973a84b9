"""From `[data]` to batches: builds the sources, holds out validation rows, hands each rank its micro-batches.

The only state is the number of sequences consumed. torchdata's StatefulDataLoader runs the workers over a
map-style dataset addressed by global sequence number, so ranks, workers and micro-batches may change on
resume, and a resume costs nothing, however far in it is.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.component import ConfigError
from titanlite.data.background import Background
from titanlite.data.batch import Batch, make_batch
from titanlite.data.order import BLOCK, Mixture, key_of, permute, quotas
from titanlite.data.packing import PACKINGS, PackedRows, Row
from titanlite.data.sources import Source
from titanlite.tokenizers.base import TextCodec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the run trains on: a weighted mixture of sources, cut into rows."""

    sources: list[Source]
    """The sources, one `[[data.sources]]` table each."""
    validation_sources: list[Source] = field(default_factory=list)
    """Sources to validate on, one `[[data.validation_sources]]` table each; their weights do not count."""
    holdout_rows: int = 0
    """Or: rows set aside for validation, split over `sources` by weight; they are never trained on."""
    packing: Literal["chunk", "best_fit"] = "chunk"
    """How documents become rows: `chunk` cuts the concatenated documents every seq_len tokens; `best_fit`
    puts whole documents together and cuts only those longer than a row."""
    mask_documents: bool = False
    """Documents in a row do not see each other: attention and positions begin anew in each."""
    num_workers: int = 2
    """Loader processes a rank; 0 loads in the training process. Does not change what is loaded."""
    cache_dir: str = "outputs/cache"
    """Where sources of raw text keep their tokens."""
    verify: Literal["sizes", "full"] = "sizes"
    """Check of the shards at start: file sizes, or every byte against its SHA-256."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("empty: give at least one [[data.sources]]", "sources")
        if self.holdout_rows and self.validation_sources:
            raise ConfigError("there are validation_sources; choose one of the two", "holdout_rows")
        for key in ("holdout_rows", "num_workers"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{getattr(self, key)} is below 0", key)

    def build(self, codec: TextCodec, *, seq_len: int, seed: int) -> Rows:
        """Open (on first use: tokenise) the sources. Raises ConfigError for unusable input."""
        packed = self._open(self.sources, codec, seq_len, "data.sources")
        validation = self._open(self.validation_sources, codec, seq_len, "data.validation_sources")
        if both := {rows.uid for rows in packed} & {rows.uid for rows in validation}:
            path = next(rows.shards.path for rows in packed if rows.uid in both)
            raise ConfigError(f"{path} is trained on", "data.validation_sources")
        recipe = self.known(codec, seq_len=seq_len, seed=seed)
        by_uid = sorted(zip(packed, self.sources), key=lambda pair: pair[0].uid)  # not by place in the file
        return Rows(by_uid, validation, self.holdout_rows, seed, recipe)

    def known(self, codec: TextCodec, *, seq_len: int, seed: int) -> dict[str, Any]:
        """Rows.recipe as far as it is known before the sources are opened, with the list of their labels in
        the place of their contents."""
        return {
            "seed": seed,
            "seq_len": seq_len,
            "packing": self.packing,
            "mask_documents": self.mask_documents,
            "holdout_rows": self.holdout_rows,
            "tokenizer": codec.fingerprint,
            "sources": sorted(source.label for source in self.sources),
        }

    def check(self, codec: TextCodec, *, seq_len: int, seed: int) -> Rows | None:
        """Raises the ConfigErrors of `build` that can be found without tokenising, packing or hashing.
        Returns the result of `build`, or None where that takes one of these."""
        opens = _of_each(lambda source: source.check(codec), self.sources, "data.sources")
        opens += _of_each(
            lambda source: source.check(codec), self.validation_sources, "data.validation_sources"
        )
        if not all(opens) or self.packing != "chunk":
            return None
        return replace(self, verify="sizes").build(codec, seq_len=seq_len, seed=seed)

    def _open(self, sources: Sequence[Source], codec: TextCodec, seq_len: int, key: str) -> list[PackedRows]:
        shards = _of_each(lambda source: source.build(codec, Path(self.cache_dir)), sources, key)
        for s in shards if self.verify == "full" else []:
            s.verify()
        if len({s.fingerprint for s in shards}) < len(shards):
            raise ConfigError(
                "two sources hold the same tokens; give one of them the sum of their weights", key
            )
        pack = PACKINGS[self.packing]
        return [pack(s, seq_len, Path(self.cache_dir), self.mask_documents) for s in shards]


def _of_each(call: Callable[[Source], T], sources: Sequence[Source], key: str) -> list[T]:
    """The result of `call` for each source. A key of its ConfigErrors, which is the source's own, gets the
    source's place in front."""
    results = []
    for i, source in enumerate(sources):
        try:
            results.append(call(source))
        except ConfigError as e:
            raise ConfigError(str(e), e.key and f"{key}.{i}.{e.key}") from None
    return results


class Rows(Dataset):
    """Every row of the run by number: `training` row g (without end) and `held_out` row v.

    Which rows are held out depends on the sources' content alone, so runs with other seeds validate on the
    same ones. `recipe`: all that determines training row g, for refusing to resume with another one.
    """

    def __init__(
        self,
        sources: Sequence[tuple[PackedRows, Source]],
        validation: Sequence[PackedRows],
        holdout: int,
        seed: int,
        recipe: dict[str, Any],
    ):
        self._packed, self._sources = [p for p, _ in sources], [s for _, s in sources]
        shares = quotas([s.weight for s in self._sources], BLOCK)
        if 0 in shares:
            k, total = shares.index(0), sum(s.weight for s in self._sources)
            raise ConfigError(
                f"weight {self._sources[k].weight:g} of {self._packed[k].shards.path} is too small of "
                f"{total:g}: the smallest share is 1/{BLOCK}; raise it, or leave the source out",
                "data.sources",
            )
        held = quotas(shares, holdout)  # from the shares, so that equal recipes hold out equal rows
        for rows, h in zip(self._packed, held):
            if h >= len(rows):
                raise ConfigError(
                    f"{h} rows are held out of {rows.shards.path}, which has {len(rows)}", "data.holdout_rows"
                )
        self._held, self._validation = np.cumsum([0, *held]), sorted(validation, key=lambda rows: rows.uid)
        self._validation_ends = np.cumsum([0, *map(len, self._validation)])
        self.sizes = [len(rows) - h for rows, h in zip(self._packed, held)]
        uids = [rows.uid for rows in self._packed]
        self._mixture = Mixture(self.sizes, uids, shares, seed)
        self._blocks: dict[int, np.ndarray] = {}
        self.recipe = recipe | {"sources": dict(zip(uids, shares))}

    @property
    def names(self) -> dict[str, str]:
        """What the sources are called in messages, by the fingerprints that the recipe has of them."""
        return {rows.uid: source.label for rows, source in zip(self._packed, self._sources)}

    @property
    def seq_len(self) -> int:
        """Targets a row."""
        return self._packed[0].seq_len

    @property
    def num_held_out(self) -> int:
        """Rows to validate on."""
        return int(self._validation_ends[-1] if self._validation else self._held[-1])

    def describe(self, num_rows: int) -> list[str]:
        """What a run of `num_rows` rows takes from each source, a line each. Raises ConfigError if one would
        be passed through more often than its max_epochs."""
        lines = []
        for packed, source, size, taken in zip(
            self._packed, self._sources, self.sizes, self._mixture.taken(num_rows)
        ):
            epochs, share = taken / size, taken / max(num_rows, 1)
            padding = f", {packed.padding_share:.2%} padding" if packed.padding_share else ""
            lines.append(
                f"{packed.shards.path}: {share:.1%} of the rows, {epochs:.2f} epochs of {size:,}{padding}"
            )
            if source.max_epochs and epochs > source.max_epochs:
                enough = int(num_rows * source.max_epochs / epochs)
                raise ConfigError(
                    f"{packed.shards.path} would be passed through {epochs:.2f} times, more than "
                    f"max_epochs = {source.max_epochs:g}: train on at most {enough:,} of these {num_rows:,} "
                    "rows (fewer training.steps), or give it less weight",
                    "data.sources",
                )
        return lines

    def training(self, numbers: np.ndarray) -> list[Row]:
        """Training rows by global number."""
        places = [self._block(int(b))[:, p] for b, p in zip(*np.divmod(numbers, BLOCK))]
        return [self._read(self._packed[k], r, "", g) for g, (k, r) in zip(numbers, places)]

    def held_out(self, numbers: np.ndarray) -> list[Row]:
        """Held-out rows by number in [0, num_held_out)."""
        if not self._validation:
            sources = np.searchsorted(self._held, numbers, side="right") - 1
            rows = self._shuffled(sources, numbers - self._held[sources])
            packed = [self._packed[k] for k in sources.tolist()]
            return [self._read(p, r, "held-out ", v) for p, r, v in zip(packed, rows.tolist(), numbers)]
        key = key_of("validation", *(rows.uid for rows in self._validation))
        places = permute(np.asarray(numbers), self.num_held_out, key)
        sources = np.searchsorted(self._validation_ends, places, side="right") - 1
        return [
            self._read(self._validation[k], p - self._validation_ends[k], "held-out ", v)
            for k, p, v in zip(sources.tolist(), places.tolist(), numbers)
        ]

    def _read(self, packed: PackedRows, row: int, kind: str, number: int) -> Row:
        try:
            return packed[row]
        except ConfigError as e:
            raise ConfigError(f"{kind}sequence {number}: {e}") from None

    def origin(self, number: int) -> tuple[PackedRows, int]:
        """The source that a training row comes from, and which of its rows it is."""
        k, row = self._block(number // BLOCK)[:, number % BLOCK].tolist()
        return self._packed[k], row

    def _block(self, b: int) -> np.ndarray:
        """Source, and row in it, of each training row of a mixing block: int64 [2, BLOCK]. Permuting a
        thousand numbers costs little more than permuting one, so the last blocks are kept."""
        if b not in self._blocks:
            sources, rows = self._mixture.locate(np.arange(b * BLOCK, (b + 1) * BLOCK))
            self._blocks[b] = np.stack(
                [sources, self._shuffled(sources, rows + np.diff(self._held)[sources])]
            )
            if len(self._blocks) > 4:
                self._blocks.pop(next(iter(self._blocks)))
        return self._blocks[b]

    def _shuffled(self, sources: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # One content-keyed shuffle of each source's rows: the first ones are held out, the rest are for
        # training.
        shuffled = np.empty_like(rows)
        for k in np.unique(sources):
            here = sources == k
            shuffled[here] = permute(rows[here], len(self._packed[k]), key_of("holdout", self._packed[k].uid))
        return shuffled

    def batch(self, numbers: Sequence[int], rows: Sequence[Row], num_rows: int | None = None) -> Batch:
        """Rows with their numbers as a batch of `num_rows`."""
        return make_batch(
            numbers,
            rows,
            seq_len=self.seq_len,
            num_rows=num_rows,
            with_positions=self.recipe["mask_documents"],
        )

    def __getitems__(self, numbers: list[int]) -> Batch | ConfigError:
        try:
            return self.batch(numbers, self.training(np.asarray(numbers)))
        except ConfigError as e:  # raised where the batch is taken: torch would add a traceback
            return e


@dataclass(frozen=True)
class MicroBatches:
    """Which row numbers make up each of a rank's micro-batches.

    Step s of the run takes `rows` rows; within it, micro-batch a of rank r is rows (a * num_ranks + r) *
    micro_batch onward, so any split over ranks and accumulation covers the same rows.
    """

    from_row: int
    rows: int
    micro_batch: int
    rank: int
    num_ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch * self.num_ranks
        for step in count(self.from_row, self.rows):
            for begin in range(step + self.rank * self.micro_batch, step + self.rows, stride):
                yield list(range(begin, begin + self.micro_batch))


class SequenceLoader:
    """This rank's micro-batches, without end, and the place in the data that a checkpoint keeps.

    torchdata's StatefulDataLoader runs the workers, prefetches and pins; its own state counts batches of one
    rank, fits one number of workers and includes what is only prefetched, so it is never used. The state is
    `{"sequences": n}`: sequences [0, n) of the run's order have been handed out, over all ranks together.
    """

    def __init__(self, rows: Rows, order: MicroBatches, num_workers: int, pin_memory: bool):
        self._rows, self._order = rows, order
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._batches: Iterator[Batch] | Background[Batch] | None = None
        self._handed_out = 0
        self.while_waiting: Callable[[float, str], None] | None = None
        """Called twice a second while a worker gives no batch: see Background."""

    def state_dict(self) -> dict[str, int]:
        """The sequences of all micro-batches handed out so far. Each rank computes the same number, which
        counts the other ranks' micro-batches of equal place. It is exact within a step, too: a run may go on
        there, with other ranks, workers and batch sizes."""
        order = self._order
        return {"sequences": order.from_row + self._handed_out * order.micro_batch * order.num_ranks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with sequence `state["sequences"]`, at the same cost for any. Workers that were started end;
        the next `iter` or `next` starts others."""
        self.close()
        self._order = replace(self._order, from_row=state["sequences"])
        self._handed_out = 0

    def __iter__(self) -> SequenceLoader:
        """Starts the workers, unless they run. A second iterator goes on where the first one is."""
        if self._batches is None:
            self._batches = self._start()
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        if isinstance(batch, ConfigError):
            raise batch
        self._handed_out += 1
        return batch

    def close(self) -> None:
        """End the workers."""
        batches, self._batches = self._batches, None
        if isinstance(batches, Background):
            batches.close()

    def _start(self) -> Iterator[Batch] | Background[Batch]:
        loader = self._stateful_data_loader()
        if not self._num_workers:
            return iter(loader)
        _check_shared_memory(self._num_workers)
        device = torch.cuda.current_device() if self._pin_memory else None

        def start() -> Iterator[Batch]:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own, and torch pins memory for this one
            return iter(loader)

        return Background(start, self.while_waiting)

    def _stateful_data_loader(self) -> StatefulDataLoader:
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return StatefulDataLoader(
                self._rows,
                batch_sampler=self._order,
                num_workers=self._num_workers,
                collate_fn=_as_is,
                pin_memory=self._pin_memory,
                prefetch_factor=4 if self._num_workers else None,
                worker_init_fn=_set_up_worker,
                snapshot_every_n_steps=None,  # workers send no state with their batches
            )


def _set_up_worker(worker: int) -> None:
    """A stop is the trainer's business, which still needs its workers for the step it is in; so are the steps
    in which it collects garbage."""
    gc.enable()
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _check_shared_memory(num_workers: int) -> None:
    """Raises ConfigError unless there is room for the queues that the workers need. torch's error would name
    no file."""
    try:
        queues: list[Any] = [multiprocessing.Queue() for _ in range(num_workers + 2)]
        for queue in queues:
            queue.close()
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"/dev/shm has no room for the locks of {num_workers} loader workers: give it 1 MiB or more (for "
            "a container: --shm-size=1g), or load in the training process: --data.num_workers=0",
            "data.num_workers",
        ) from None


def _as_is(batch: Any) -> Any:
    return batch
