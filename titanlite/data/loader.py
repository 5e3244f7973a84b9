"""From `[data]` to batches: builds the sources, holds out validation rows, hands each rank its micro-batches.

The only state is the number of rows consumed. torchdata's StatefulDataLoader does workers, prefetch and
pinning over a map-style dataset addressed by global row number; its own state is not used, so that ranks,
workers and micro-batches may change on resume and a resume costs nothing, however far in it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch, make_batch
from titanlite.data.order import BLOCK, Mixture, key_of, permute, quotas
from titanlite.data.packing import PACKINGS
from titanlite.data.sources import Source
from titanlite.data.tokenizer import TextCodec


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the run trains on: a weighted mixture of sources, cut into rows."""

    sources: list[Source]
    """The sources, one `[[data.sources]]` table each."""
    packing: Literal["chunk"] = "chunk"
    """How documents become rows: `chunk` cuts the concatenated documents every seq_len tokens."""
    holdout_rows: int = 0
    """Rows set aside for validation, split over the sources by weight; they are never trained on."""
    num_workers: int = 2
    """Loader processes a rank; 0 loads in the training process. Does not change what is loaded."""
    cache_dir: str = "outputs/cache"
    """Where sources of raw text keep their tokens."""
    verify: Literal["sizes", "full"] = "sizes"
    """Check of the shards at start: file sizes, or every byte against its SHA-256."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("empty: give at least one [[data.sources]]", "sources")
        for key in ("holdout_rows", "num_workers"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{getattr(self, key)} is below 0", key)

    def build(self, codec: TextCodec, *, seq_len: int, seed: int) -> Rows:
        """Open (on first use: tokenise) the sources. Raises ConfigError for unusable input."""
        shards = [source.build(codec, Path(self.cache_dir)) for source in self.sources]
        if self.verify == "full":
            for s in shards:
                s.verify()
        uids = [s.fingerprint for s in shards]
        if len(set(uids)) < len(uids):
            raise ConfigError(
                "two sources hold the same tokens; give one of them the sum of their weights", "data.sources"
            )
        by_uid = sorted(range(len(shards)), key=lambda k: uids[k])  # the order in the file must not matter
        packed = [PACKINGS[self.packing](shards[k], seq_len) for k in by_uid]
        weights = [self.sources[k].weight for k in by_uid]
        return Rows(
            packed, [uids[k] for k in by_uid], weights, self.holdout_rows, seed, self._recipe(seq_len, codec)
        )

    def _recipe(self, seq_len: int, codec: TextCodec) -> dict[str, Any]:
        return {
            "seq_len": seq_len,
            "packing": self.packing,
            "holdout_rows": self.holdout_rows,
            "tokenizer": codec.fingerprint,
        }


class Rows(Dataset):
    """Every row of the run by number: `training` row g (without end) and `held_out` row v.

    Which rows of a source are held out depends on its content alone, so runs with other seeds validate on the
    same rows. `recipe`: all that determines training row g, for refusing to resume with another one.
    """

    def __init__(
        self,
        packed: list,
        uids: list[str],
        weights: list[float],
        holdout: int,
        seed: int,
        recipe: dict[str, Any],
    ):
        self._packed, self._uids = packed, uids
        shares = quotas(weights, BLOCK)
        if 0 in shares:
            k = shares.index(0)
            raise ConfigError(
                f"weight {weights[k]:g} of {packed[k].shards.path} is too small of {sum(weights):g}: "
                f"the smallest share is 1/{BLOCK}; raise it, or leave the source out",
                "data.sources",
            )
        held = quotas(shares, holdout)  # from the shares, so that equal recipes hold out equal rows
        for rows, h in zip(packed, held):
            if h >= len(rows):
                raise ConfigError(
                    f"{h} rows are held out of {rows.shards.path}, which has {len(rows)}", "data.holdout_rows"
                )
        self._held = np.cumsum([0, *held])
        self.num_held_out = holdout
        self.sizes = [len(rows) - h for rows, h in zip(packed, held)]
        self._mixture = Mixture(self.sizes, uids, shares, seed)
        self.recipe = recipe | {"seed": seed, "sources": dict(zip(uids, shares))}

    @property
    def seq_len(self) -> int:
        """Targets a row."""
        return self._packed[0].seq_len

    def training(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Training rows by global number: int64 [seq_len + 1] each."""
        sources, rows = self._mixture.locate(numbers)
        return self._read(sources, rows + np.diff(self._held)[sources])

    def held_out(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Held-out rows by number in [0, num_held_out): int64 [seq_len + 1] each."""
        sources = np.searchsorted(self._held, numbers, side="right") - 1
        return self._read(sources, numbers - self._held[sources])

    def _read(self, sources: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        # One content-keyed shuffle of each source's rows: the first ones are held out, the rest are for
        # training.
        for k in np.unique(sources):
            here = sources == k
            rows[here] = permute(rows[here], len(self._packed[k]), key_of("holdout", self._uids[k]))
        return [self._packed[k][r] for k, r in zip(sources.tolist(), rows.tolist())]

    def __getitems__(self, numbers: list[int]) -> Batch:
        return make_batch(numbers, self.training(np.asarray(numbers)))

    def batches(self, order: MicroBatches, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
        """This rank's micro-batches from `order.from_row` on, without end."""
        loader = StatefulDataLoader(
            self, batch_sampler=order, num_workers=num_workers, collate_fn=_as_is, pin_memory=pin_memory,
            prefetch_factor=4 if num_workers else None, snapshot_every_n_steps=1 << 62,
        )  # fmt: skip
        return iter(loader)


def _as_is(batch: Batch) -> Batch:
    return batch


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
