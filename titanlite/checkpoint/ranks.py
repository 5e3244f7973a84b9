"""Ranks: work of rank 0 whose result or error all ranks get, over a gloo group that training does not use.

Values for rank 0 go up a binomial tree, one message per rank and at most log2(ranks) messages to any
rank, so that neither time nor connections of a rank grow with the number of ranks. A collective that gives
every value to every rank would: at 16,384 ranks, 1 kB per rank is 16 MB on each of them."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import PurePath
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.files import is_file_error

TIMEOUT = timedelta(hours=1)  # long, because a slow disk is not a hang
T = TypeVar("T")


class Ranks:
    """This rank among the ranks that share the checkpoints in `folder`. Its construction and its methods are
    collective. With `alone`, this process uses the folder without the other ranks of its job."""

    def __init__(self, folder: PurePath, alone: bool = False, timeout: timedelta = TIMEOUT):
        self.folder = folder
        self.distributed = dist.is_initialized() and not alone
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.group = dist.new_group(backend="gloo", timeout=timeout) if self.distributed else None

    def from_rank_zero(self, act: Callable[[], T]) -> T:
        """Call `act()` on rank 0, and return its result, or raise its error, on all ranks."""
        result = self._broadcast(self._result(act) if self.rank == 0 else None)
        if isinstance(result, Exception):
            raise result
        return result

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the other ranks, which then find the files that rank 0 has written,
        or raise its error."""
        if self.rank > 0 and (error := self._broadcast(None)) is not None:
            raise error
        try:
            yield
        except BaseException as e:
            if self.rank == 0:
                with suppress(RuntimeError):  # the other ranks may have been stopped as well
                    self._broadcast(self._as_told(e) if isinstance(e, Exception) else None)
            raise
        if self.rank == 0:
            self._broadcast(None)

    def scatter(self, act: Callable[[], list[T]]) -> T:
        """Call `act()` on rank 0, which returns one value per rank, and return this rank's value, or raise
        the error of rank 0 on all ranks."""
        values: Any = None
        if self.rank == 0:
            values = self._result(act)
            values = [values] * self.size if isinstance(values, Exception) else values
        value = self._scatter(values)
        if isinstance(value, Exception):
            raise value
        return value

    def all_reduce(self, value: T, merge: Callable[[T, T], T]) -> T:
        """The values of all ranks, merged in the order of the ranks by the associative function `merge`, on
        every rank."""
        return self._broadcast(self.reduce(value, merge))

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """The same as all_reduce() on rank 0; None on every other rank.

        A rank merges what the ranks after it have merged, up to the next rank that does the same for more
        ranks: equal values of many ranks, such as names, stay as small as one on their way."""
        step = 1
        while step < self.size:
            if self.rank & step:
                self._send(value, self.rank - step)
                return None
            if self.rank + step < self.size:
                value = merge(value, self._receive(self.rank + step))
            step *= 2
        return value

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks, in the order of the ranks, on rank 0; None on every other rank."""
        if not self.distributed:
            return [value]
        pickles = self.reduce([pickle.dumps(value)], operator.add)  # passed on unread
        return None if pickles is None else [pickle.loads(data) for data in pickles]

    def first(self, value: T | None) -> T | None:
        """The value of the lowest rank whose value is not None, on every rank; None if all are None."""
        return self.all_reduce(value, lambda a, b: b if a is None else a)

    def union(self, names: Collection[str]) -> list[str]:
        """The names that any rank has, sorted, on every rank."""
        return sorted(self.all_reduce(frozenset(names), operator.or_))

    def _result(self, act: Callable[[], T]) -> T | Exception:
        """The result of `act()`, or its error as the other ranks are to raise it."""
        try:
            return act()
        except Exception as e:  # every error must reach the other ranks, which wait for the result
            return self._as_told(e)

    def _as_told(self, error: Exception) -> Exception:
        """An error of rank 0 in the form in which the other ranks raise it."""
        if hasattr(error, "exit_code") or is_file_error(error):
            return error
        return RuntimeError(f"rank 0, {self.folder}: {type(error).__name__}: {error}")

    def _broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        box = [value]
        if self.distributed:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def _scatter(self, values: Any) -> Any:
        """This rank's value of the list of rank 0, which goes down the tree of reduce()."""
        step = 1
        while step < self.size and not self.rank & step:
            step *= 2
        if self.rank:
            values = self._receive(self.rank - step)
        while step := step // 2:
            if self.rank + step < self.size:
                self._send(values[step:], self.rank + step)
            values = values[:step]
        return values[0]

    def _send(self, value: Any, rank: int) -> None:
        dist.send_object_list([value], group=self.group, group_dst=rank)

    def _receive(self, rank: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self.group, group_src=rank)
        return box[0]
