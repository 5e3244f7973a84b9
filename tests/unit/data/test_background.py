"""Pins the wait for a batch: it can be ended wherever a worker is stuck, names the worker, leaves no process
behind, and changes nothing if the batch comes in time; a worker that dies is named with its signal."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling

from titanlite.config.component import ConfigError
from titanlite.data import background, dataset, loader
from titanlite.data.batch import MicroBatch
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.step_sizes import StepSizes
from titanlite.errors import LoaderError

LIMIT_S = 120


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks often. What a loader leaves to the end of the process is done after the test, without a wait of
    10 s for each thread that is stuck."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(background, "POLL_S", 0.02)
    monkeypatch.setattr(background, "atexit", SimpleNamespace(register=ends.append, unregister=ends.remove))
    yield
    monkeypatch.setattr(background, "EXIT_TIMEOUT_S", 0.1)
    for end in ends:
        end()


class Numbers(Dataset):
    """Gives the numbers it is asked for, with `size` bytes; `act` is called for each micro-batch, in the
    worker."""

    def __init__(self, act: Callable[[int], Any] = lambda first: None, size: int = 1):
        self.act, self.size, self.made = act, size, multiprocessing.Value("i", 0)

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        self.act(micro_batch.numbers[0])
        self.made.value += 1  # one worker where it is read
        return micro_batch.numbers, bytes(self.size)


class GivenUp(Exception):
    pass


class Waiting:
    """Records the workers that are waited for, and raises GivenUp once they are all stopped."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []

    def __call__(self, waited_s: float, worker: str) -> None:
        self.seen.append((waited_s, worker))
        pids = re.findall(r"\d+", worker.partition("(pid ")[2])
        if pids and all(state(int(pid)) == {"T"} for pid in pids):
            raise GivenUp


def made(dataset: Any, num_workers: int, waiting: Any = None) -> SequenceLoader:
    """A loader of micro-batches of two sequences."""
    made = SequenceLoader(
        dataset, MicroBatches(0, StepSizes.constant(2), 2, 0, 1), num_workers, pin_memory=False
    )
    made.while_waiting = waiting
    return made


def until(condition: Callable[[], Any]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(0.01)


def state(pid: int) -> set[str]:
    """The states of a process's threads: S sleeps, T is stopped."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return {task.read_text().rpartition(")")[2].split()[0] for task in tasks}


def workers() -> list[Any]:
    return multiprocessing.active_children()


def test_a_stopped_worker_is_named_and_the_wait_can_end() -> None:
    """The second of three workers should send the fifth micro-batch, but is stopped."""
    waiting, others, taken = Waiting(), set(workers()), multiprocessing.Event()

    def act(first: int) -> None:
        if first == 8:  # its earlier micro-batch has been sent
            taken.wait(LIMIT_S)
            os.kill(os.getpid(), signal.SIGSTOP)

    stream = made(Numbers(act), 3, waiting)
    assert [next(stream)[0] for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    taken.set()
    started = set(workers()) - others
    with pytest.raises(GivenUp):
        next(stream)
    assert waiting.seen[-1][1] in {f"loader worker 1 (pid {worker.pid})" for worker in started}
    assert stream.state_dict() == {"sequences": 8}
    until(lambda: not set(workers()) & started)


def test_a_worker_that_is_stopped_in_the_middle_of_a_message() -> None:
    """Reading the rest of the message would block forever, so a thread reads it."""
    dataset, waiting, others = Numbers(size=1 << 22), Waiting(), set(workers())
    stream = made(dataset, 1, waiting)
    next(stream)
    (worker,) = set(workers()) - others
    # all are made that may be: those read ahead, and four that wait behind a pipe of 64 KiB
    until(lambda: dataset.made.value == background.PREFETCH + 4 and state(worker.pid) == {"S"})
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: state(worker.pid) == {"T"})
    for _ in range(background.PREFETCH - 1):
        next(stream)
    with pytest.raises(GivenUp):
        next(stream)
    assert waiting.seen[-1][1] == f"loader worker 0 (pid {worker.pid})"
    until(lambda: worker not in workers())


def test_a_worker_that_is_killed_in_the_middle_of_a_message() -> None:
    """The thread keeps waiting for the rest of the message."""
    dataset, others = Numbers(size=1 << 22), set(workers())

    def give_up(waited_s: float, worker: str) -> None:
        assert waited_s < LIMIT_S

    stream = made(dataset, 1, give_up)
    next(stream)
    (worker,) = set(workers()) - others
    until(lambda: dataset.made.value == background.PREFETCH + 4 and state(worker.pid) == {"S"})
    worker.kill()
    worker.join(LIMIT_S)
    for _ in range(background.PREFETCH - 1):
        next(stream)
    with pytest.raises(LoaderError, match=r"^loader worker 0 \(pid \d+\) was ended by SIGKILL"):
        next(stream)


def test_workers_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_set_up_worker", lambda worker: os.kill(os.getpid(), signal.SIGSTOP))
    waiting, others = Waiting(), set(workers())
    with pytest.raises(GivenUp):
        next(made(Numbers(), 2, waiting))
    assert waiting.seen[-1][1].startswith("loader worker 0 (pid ")
    until(lambda: set(workers()) <= others)


def test_a_closed_loader_leaves_nothing_for_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    stub = SimpleNamespace(register=left.append, unregister=left.remove)
    monkeypatch.setattr(background, "atexit", stub)
    monkeypatch.setattr(background, "EXIT_TIMEOUT_S", LIMIT_S)
    stream = made(Numbers(), 1)
    next(stream)
    assert len(left) == 1
    stream.close()
    assert not left


def test_a_slow_worker_that_answers_in_time_changes_nothing() -> None:
    waited = multiprocessing.Event()

    def act(first: int) -> None:
        if first == 8:
            waited.clear()
            waited.wait(LIMIT_S)

    slow = made(Numbers(act), 2, lambda waited_s, worker: waited.set())
    assert [next(slow)[0] for _ in range(9)] == [[n, n + 1] for n in range(0, 18, 2)]
    assert waited.is_set()
    assert slow.state_dict() == {"sequences": 18}


def test_the_handler_of_sigchld_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handler would raise at any place in the process if a worker is killed. torch sets it once per
    process."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    next(made(Numbers(), 1))
    assert signal.getsignal(signal.SIGCHLD) == before


def test_a_killed_worker_is_named_with_its_signal() -> None:
    stream = made(Numbers(lambda first: os.kill(os.getpid(), signal.SIGKILL) if first == 10 else None), 2)
    with pytest.raises(LoaderError) as e:
        list(islice(stream, 6))
    assert str(e.value).startswith("loader worker 1 (pid ")
    assert str(e.value).endswith(") was ended by SIGKILL, perhaps because memory ran out")


def test_a_mistake_that_a_worker_finds_is_one_line() -> None:
    """Errors that are not a ConfigError have the worker's traceback."""

    class SequenceDataset(dataset.SequenceDataset):
        def __init__(self, error: Exception):
            self.error = error

        def training(self, numbers: Any) -> Any:
            raise self.error

    for num_workers in (0, 1):
        with pytest.raises(ConfigError) as e:
            next(made(SequenceDataset(ConfigError("a token too large", "data.sources")), num_workers))
        assert (str(e.value), e.value.key) == ("a token too large", "data.sources")
    with pytest.raises(ZeroDivisionError, match=r"worker process 0(.|\n)*Traceback"):
        next(made(SequenceDataset(ZeroDivisionError()), 1))


def test_no_room_in_dev_shm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream = made(Numbers(), 2)
    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", full)
    with pytest.raises(ConfigError, match=r"/dev/shm has no room .* 2 loader workers.*num_workers=0") as e:
        iter(stream)
    assert e.value.key == "data.num_workers"


def test_a_loader_that_is_dropped_ends_its_workers() -> None:
    others = set(workers())
    stream = made(Numbers(), 2)
    next(stream)
    assert len(set(workers()) - others) == 2
    del stream
    until(lambda: set(workers()) <= others)
