"""Pins how long a rank waits for a batch: one rank stops at once if it is asked to; several have some time
for a step that all can finish; a rank that waits nearly as long as collectives may take names its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.errors import LoaderError
from titanlite.runtime import data_wait as module
from titanlite.runtime.data_wait import STOP_S, DataWait
from titanlite.runtime.process_group import Comm
from titanlite.runtime.signals import Stopped


class Case:
    """A rank that resumed from step 7, its clock and its requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int):
        self.now, self.requests = 500.0, SimpleNamespace(stop=False)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        comm = Comm(init_timeout_seconds=1000, train_timeout_seconds=100)
        self.is_first_step = True
        rt: Any = SimpleNamespace(rank=ranks - 1, world_size=ranks, comm=comm)
        requests: Any = self.requests
        self.wait = DataWait(rt, requests, lambda: self.is_first_step)

    def waits(self, seconds: float, already: float = 0.0) -> None:
        """Two looks a second."""
        for look in range(int(2 * seconds)):
            self.now += 0.5
            self.wait(already + (look + 1) / 2, "loader worker 1 (pid 42)")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_batch_has_the_time_of_the_start(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    case = Case(monkeypatch, ranks)
    case.waits(899)
    with pytest.raises(LoaderError):
        case.waits(902)
    case.is_first_step = False
    case.waits(89)
    with pytest.raises(LoaderError) as e:
        case.waits(92)
    assert str(e.value).startswith(
        f"rank {ranks - 1}: loader worker 1 (pid 42) has delivered no batch for 90 s"
    )
    assert "\n" not in str(e.value)


def test_one_rank_stops_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 1)
    case.waits(80)
    case.requests.stop = True
    with pytest.raises(Stopped):
        case.waits(0.5)


def test_several_ranks_have_a_while_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 2)
    case.is_first_step = False
    case.requests.stop = True
    for _ in range(5):  # batches that come, slowly
        case.waits(STOP_S - 1)
    with pytest.raises(LoaderError, match="no batch for 20 s"):
        case.waits(STOP_S + 1)


def test_a_stop_late_in_a_wait_has_its_own_while(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 2)
    case.is_first_step = False
    case.waits(30)
    case.requests.stop = True
    with pytest.raises(LoaderError, match="no batch for 51 s"):
        case.waits(60, already=30)
    assert STOP_S < 30  # launchers kill then
