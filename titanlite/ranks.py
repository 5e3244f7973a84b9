"""Ranks: this process among the ranks of a job, and the collectives of all ranks.

Scalars, flags and statistics go over the default process group, on the device. Work of rank 0, whose result
or error all ranks get, and values for rank 0 go over a separate gloo group, so that a save in the background
does not meet the collectives of training.

Values for rank 0 go up a binomial tree, one message per rank and at most log2(ranks) messages to any
rank, so that neither time nor connections of a rank grow with the number of ranks. A collective that gives
every value to every rank would: at 16,384 ranks, 1 kB per rank is 16 MB on each of them."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.files import is_file_error
from titanlite.host_copy import HostCopy
from titanlite.step_clock import StepClock

TIMEOUT = timedelta(hours=1)  # of the gloo group; long, because a slow disk is not a hang
CPU = torch.device("cpu")
T = TypeVar("T")


class Ranks:
    """This process among the ranks of its job, which share the checkpoints in `folder`. The constructor is
    collective, unless `alone`: then this process is rank 0 of one rank, also within a job of several ranks.

    `timeout`: of the gloo group. `device`: of this rank. `is_data_leader`: whether the sequences of this rank
    count in sums over the data-parallel ranks. `clock`: measures the waits for other ranks."""

    def __init__(
        self,
        folder: PurePath,
        alone: bool = False,
        timeout: timedelta = TIMEOUT,
        device: torch.device = CPU,
        is_data_leader: bool = True,
        clock: StepClock | None = None,
    ):
        self.folder, self.device, self.clock = folder, device, clock or StepClock(device)
        self._is_data_leader = is_data_leader
        is_one_of_many = dist.is_initialized() and not alone
        self.rank = dist.get_rank() if is_one_of_many else 0
        self.size = dist.get_world_size() if is_one_of_many else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value` summed over all ranks, in place. Collective."""
        if self.size > 1:
            with self.clock.waiting():
                dist.all_reduce(value)
        return value

    def max(self, value: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of `value` over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def sum_scalars(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """fp32 scalars, each summed over all ranks, in one all-reduce. Collective."""
        on_device = [value.to(self.device, torch.float32) for value in values]
        return list(self.sum(torch.stack(on_device)))

    def sum_u64(self, value: int) -> str:
        """The sum mod 2^64 of an unsigned integer over the data-parallel ranks, as 16 hex digits. Waits for
        the device. Collective."""
        value = value if self._is_data_leader else 0
        signed = (value + (1 << 63)) % (1 << 64) - (1 << 63)  # int64 addition wraps around, as it should
        total = self.sum(torch.tensor(signed, dtype=torch.int64, device=self.device))
        return f"{total.item() % (1 << 64):016x}"

    def count(self, number: int) -> torch.Tensor:
        """The sum of an integer over the data-parallel ranks, int64 on the device; no host sync.
        Collective."""
        number = number if self._is_data_leader else 0
        return self.sum(torch.full((), number, dtype=torch.int64, device=self.device))

    def vote(self, *flags: bool) -> Vote:
        """Start to combine flags over all ranks: each is true if it is true on any rank. Collective."""
        with self.clock.waiting():  # on a CPU, which has no collectives in the background
            return Vote(flags, self.device, self.size)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks, on every rank. Waits for the device.
        Collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The same number of floats (fp64) from each rank, in the order of the ranks, on every rank. Waits
        for the device. Collective."""
        if self.size == 1:
            return [list(values)]
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows).tolist()

    def from_rank_zero(self, act: Callable[[], T]) -> T:
        """Call `act()` on rank 0, and return its result, or raise its error, on all ranks. Collective."""
        result = self._broadcast(self._result(act) if self.rank == 0 else None)
        if isinstance(result, Exception):
            raise result
        return result

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the other ranks, which then find the files that rank 0 has written,
        or raise its error. Collective."""
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
        the error of rank 0 on all ranks. Collective."""
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
        every rank. Collective."""
        return self._broadcast(self.reduce(value, merge))

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """The same as all_reduce() on rank 0; None on every other rank. Collective.

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
        """The values of all ranks, in the order of the ranks, on rank 0; None on every other rank.
        Collective."""
        if self.size == 1:
            return [value]
        pickles = self.reduce([pickle.dumps(value)], operator.add)  # passed on unread
        return None if pickles is None else [pickle.loads(data) for data in pickles]

    def first(self, value: T | None) -> T | None:
        """The value of the lowest rank whose value is not None, on every rank; None if all are None.
        Collective."""
        return self.all_reduce(value, lambda a, b: b if a is None else a)

    def union(self, names: Collection[str]) -> list[str]:
        """The names that any rank has, sorted, on every rank. Collective."""
        return sorted(self.all_reduce(frozenset(names), operator.or_))

    def exchange(
        self, outgoing: torch.Tensor | None, target: int, incoming: torch.Tensor | None, source: int
    ) -> None:
        """Send a host tensor to the rank `target` and fill another one from the rank `source` meanwhile;
        None: nothing goes that way. These two ranks must call this, too."""
        works = []
        if outgoing is not None:
            works.append(dist.isend(outgoing, group=self._group, group_dst=target))
        if incoming is not None:
            works.append(dist.irecv(incoming, group=self._group, group_src=source))
        for work in works:
            if work is not None:
                work.wait()

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
        if self.size > 1:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
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
        dist.send_object_list([value], group=self._group, group_dst=rank)

    def _receive(self, rank: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self._group, group_src=rank)
        return box[0]


class Vote:
    """Flags combined over all ranks. The all-reduce starts when the object is made and is read later, so that
    no rank waits: on CUDA the device has finished it long before."""

    def __init__(self, flags: Sequence[bool], device: torch.device, world_size: int):
        votes = torch.tensor(flags, dtype=torch.int32)
        if world_size > 1:
            if device.type == "cuda":
                votes = votes.pin_memory().to(device, non_blocking=True)
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        self._votes = HostCopy(votes)

    def result(self) -> list[bool]:
        """Whether each flag is true on any rank; the same on all ranks."""
        return [bool(vote) for vote in self._votes.result()]
