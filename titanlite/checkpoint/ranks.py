"""Ranks: work of rank 0 whose result or error all ranks get, over a gloo group that training does not use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.checkpoint.commit import CheckpointError
from titanlite.config.component import ConfigError
from titanlite.files import REFUSALS

TIMEOUT = timedelta(hours=1)  # long, because a slow disk is not a hang
T = TypeVar("T")


class Ranks:
    """This rank among the ranks that share the checkpoints in `folder`. Its construction and its methods are
    collective. With `alone`, this process uses the folder without the other ranks of its job."""

    def __init__(self, folder: Path, alone: bool = False):
        self.folder = folder
        self.distributed = dist.is_initialized() and not alone
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT) if self.distributed else None

    def from_rank_zero(self, act: Callable[[], T]) -> T:
        """Call `act()` on rank 0, and return its result, or raise its error, on all ranks."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [act()]
            except (CheckpointError, ConfigError) as e:
                box = [e]
            except OSError as e:
                box = [e if e.errno in REFUSALS else RuntimeError(f"rank 0, {self.folder}: {e}")]
            except Exception as e:  # every error must reach the other ranks, which wait for the result
                box = [RuntimeError(f"rank 0, {self.folder}: {type(e).__name__}: {e}")]
        if self.distributed:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of the ranks, on every rank."""
        values: list[Any] = [value]
        if self.distributed:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
        return values

    def distinct(self, value: T) -> list[T]:
        """The different values of all ranks, each once, in the order of the lowest ranks that have them, on
        every rank. `value`: strings, numbers, None, and lists and dicts of these, as JSON has them.

        Only the lowest rank that has a value sends it. The ranks of a pipeline stage have the same names: a
        gather of the names of a 30B model from 16,384 ranks would take 1.6 GB on every rank."""
        if not self.distributed:
            return [value]
        sha256 = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        digest = torch.frombuffer(bytearray(sha256), dtype=torch.int64)
        digests = list(torch.empty(self.size, len(digest), dtype=torch.int64).unbind())
        dist.all_gather(digests, digest, group=self.group)
        senders = dict[tuple[int, ...], int]()
        for rank, other in enumerate(torch.stack(digests).tolist()):
            senders.setdefault(tuple(other), rank)
        values = []
        for rank in senders.values():
            box: list[Any] = [value if rank == self.rank else None]
            dist.broadcast_object_list(box, group=self.group, group_src=rank)
            values.append(box[0])
        return values

    def union(self, names: Collection[str]) -> list[str]:
        """The names that any rank has, sorted, on every rank."""
        return sorted(set().union(*self.distinct(sorted(names))))
