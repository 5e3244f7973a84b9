"""Requests from outside: what a handler notes, what the loop reads of it, and when a second one ends the
process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlite.runtime import signals as module
from titanlite.runtime.signals import AGAIN_S, END, LOOK_S, STOP, Stopped, StopRequests, stop_requests

pytestmark = pytest.mark.usefixtures("hangups")
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


class Clock:
    """The time that the module sees; it stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def exit_code_of(act: Callable[[], object]) -> int:
    """The exit code, or the negative signal, of a forked process that does `act`."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end_of(act: Callable[[StopRequests], object]) -> int:
    """The exit code, or the negative signal, of a forked process that does `act` while it trains."""

    def train() -> None:
        with stop_requests() as requests:
            requests.begin(None)
            act(requests)

    return exit_code_of(train)


@pytest.mark.parametrize("number", STOP)
def test_while_training_a_stop_is_noted_and_nothing_else(number: int) -> None:
    with stop_requests() as requests:
        requests.begin(None)
        assert not requests.stop
        signal.raise_signal(number)
        assert requests.stop
        assert requests.stop, "a stop is taken back once it is read"
        assert not requests.take_save_request()


def test_a_save_is_taken_once() -> None:
    with stop_requests() as requests:
        requests.begin(None)
        assert not requests.take_save_request()
        signal.raise_signal(USR2)
        signal.raise_signal(USR2)
        assert [requests.take_save_request(), requests.take_save_request()] == [True, False]
        assert not requests.stop
        signal.raise_signal(USR2)
        assert requests.take_save_request()


@pytest.mark.parametrize("number", STOP)
def test_before_the_first_step_a_stop_is_raised(number: int) -> None:
    with pytest.raises(Stopped, match=f"{signal.Signals(number).name} before the first step") as stopped:  # noqa: SIM117
        with stop_requests():
            signal.raise_signal(number)
    assert stopped.value.exit_code == 75


class Dropped:
    """Python drops what a signal handler raises in its destructor."""

    def __del__(self) -> None:
        signal.raise_signal(TERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [None, RuntimeError("half an import")])
def test_a_stop_that_python_drops_is_raised_before_the_first_step(error: Exception | None) -> None:
    def start() -> None:
        with stop_requests() as requests:
            Dropped()
            if error:
                raise error
            requests.begin(None)

    with pytest.raises(Stopped, match="SIGTERM before the first step"):
        start()


def test_during_imports_a_stop_leaves_from_within_the_handler(capfd: pytest.CaptureFixture[str]) -> None:
    def leave() -> None:
        with stop_requests(leaves=True):
            Dropped()

    assert exit_code_of(leave) == 75
    assert capfd.readouterr().err == "titanlite: stopped by SIGTERM before the first step; nothing is lost\n"


def test_after_the_run_a_stop_changes_nothing() -> None:
    def train() -> None:
        with stop_requests(leaves=True):
            with stop_requests() as requests:
                requests.begin(None)
            signal.raise_signal(TERM)

    assert exit_code_of(train) == 0


def test_before_the_first_step_a_save_waits() -> None:
    with stop_requests() as requests:
        signal.raise_signal(USR2)
        requests.begin(None)
        assert requests.take_save_request()


# ---- again


@pytest.mark.parametrize("number", END)
@pytest.mark.parametrize("first", END)
def test_the_same_again_after_a_while_ends_the_process(clock: Clock, first: int, number: int) -> None:
    def twice(requests: StopRequests) -> None:
        signal.raise_signal(first)
        clock.now += AGAIN_S + 0.01
        signal.raise_signal(number)

    assert end_of(twice) == -number


@pytest.mark.parametrize("number", END)
def test_the_same_again_at_once_is_one_request(clock: Clock, number: int) -> None:
    def twice(requests: StopRequests) -> None:
        signal.raise_signal(number)
        for _ in range(3):
            clock.now += AGAIN_S / 3 - 0.01
            signal.raise_signal(number)
        assert requests.stop

    assert end_of(twice) == 0


def test_the_time_runs_from_the_first_one(clock: Clock) -> None:
    def thrice(requests: StopRequests) -> None:
        for _ in range(3):
            signal.raise_signal(TERM)
            clock.now += AGAIN_S * 0.6

    assert end_of(thrice) == -TERM


@pytest.mark.parametrize("number", [USR1, USR2])
def test_what_only_asks_never_ends_the_process(clock: Clock, number: int) -> None:
    def ask(requests: StopRequests) -> None:
        for _ in range(5):
            signal.raise_signal(TERM if number == USR2 and not requests.stop else number)
            clock.now += 10 * AGAIN_S
        assert requests.stop

    assert end_of(ask) == 0


def test_the_first_sigterm_after_a_warning_does_not_end_the_process(clock: Clock) -> None:
    """Slurm sends the signal of --signal=USR1@120 first, and SIGTERM when the time is up: half a minute
    before SIGKILL, in which a save may still become whole."""

    def warn(requests: StopRequests) -> None:
        signal.raise_signal(USR1)
        clock.now += 100 * AGAIN_S
        signal.raise_signal(TERM)
        assert requests.stop

    assert end_of(warn) == 0


def test_the_first_sigterm_after_a_stop_file_does_not_end_the_process(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()

    def stop(requests: StopRequests) -> None:
        requests.begin(tmp_path / "STOP")
        assert requests.stop
        clock.now += 100 * AGAIN_S
        signal.raise_signal(TERM)

    assert end_of(stop) == 0


# ---- the file


def test_the_file_is_seen_where_it_is_looked_for_and_taken_away_when_it_is_done(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    file.touch()
    rank0, rank1 = StopRequests(), StopRequests()
    assert not rank0.stop
    rank0.begin(file)
    rank1.begin(None)
    assert rank0.stop
    assert not rank1.stop
    rank1.done()
    assert file.exists()
    rank0.done()
    assert not file.exists()
    rank0.done()  # as after a stop by a signal


def test_the_file_is_looked_for_once_a_second(clock: Clock, tmp_path: Path) -> None:
    requests = StopRequests()
    requests.begin(tmp_path / "STOP")
    assert not requests.stop
    (tmp_path / "STOP").touch()
    clock.now += LOOK_S * 0.9
    assert not requests.stop
    clock.now += LOOK_S * 0.2
    assert requests.stop


def test_no_folder_is_needed(tmp_path: Path) -> None:
    requests = StopRequests()
    requests.begin(tmp_path / "no such folder" / "STOP")
    assert not requests.stop
    requests.done()


# ---- the handlers


def test_handlers_are_put_back() -> None:
    def ours(number: int, frame: object) -> None:
        pass

    numbers = (TERM, INT, HUP, USR1, USR2)
    before = {number: signal.signal(number, ours) for number in numbers}
    try:
        with stop_requests():
            assert all(signal.getsignal(number) is not ours for number in numbers)
        assert all(signal.getsignal(number) is ours for number in numbers)
        with pytest.raises(Stopped), stop_requests():
            signal.raise_signal(TERM)
        assert all(signal.getsignal(number) is ours for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_nohup_is_heeded() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with stop_requests() as requests:
            requests.begin(None)
            signal.raise_signal(HUP)
            assert not requests.stop
    finally:
        signal.signal(HUP, before)


@pytest.mark.parametrize("rank_zero", [True, False])
def test_one_rank_answers_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: Clock, rank_zero: bool
) -> None:
    """A step may take a minute: who presses Ctrl-C must see that it was heard, or presses it again."""

    def twice(requests: StopRequests) -> None:
        requests.begin(tmp_path / "STOP" if rank_zero else None)
        signal.raise_signal(INT)
        clock.now += 0.1
        signal.raise_signal(TERM)
        clock.now += AGAIN_S
        signal.raise_signal(INT)

    assert end_of(twice) == -INT
    heard, *rest = capfd.readouterr().err.splitlines()
    if rank_zero:
        assert (
            heard
            == "titanlite: SIGINT: finishing this step and saving; repeat it after 3 s to quit without saving"
        )
        (heard,) = rest
    assert heard == "titanlite: SIGINT again: quitting without saving"


def test_a_thread_goes_without() -> None:
    """Python runs handlers in the main thread, and lets no other one set them."""
    seen: list[bool] = []

    def body() -> None:
        before = signal.getsignal(TERM)
        with stop_requests() as requests:
            requests.begin(None)
            seen.append(signal.getsignal(TERM) is before and not requests.stop)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [True]
