"""Ranks that train the tiny job and fail at a named call: with kill -9, an error, or lost state.

titanlite has no code for this: a rank wraps the named functions before it trains."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.ranks import Ranks, leave, write_output_to

TIMEOUT_S = 300  # for one wait in a run that takes seconds
FILE_BYTES = 1 << 17  # instead of 2 GiB, so that a rank writes several files at a time


@dataclass(frozen=True)
class Fault:
    """A fault that happens once, at the `call`-th call of `target` whose arguments contain `match`."""

    target: str
    """`module:attribute`; the module below titanlite.checkpoint, or by its full name."""
    when: Literal["before", "half", "after", "instead"] = "before"
    """`half`: when half of the call's data is written or half of its files are deleted."""
    call: int = 1
    """0: every call."""
    match: str = ""
    during: Literal["write", "save", "start"] = "write"
    """Calls are counted while `step` is written by the writer's thread, or is saved by the loop, or from the
    start of the process."""
    step: int = 4
    rank: int = 0
    """The rank with the fault; -1: every rank."""
    action: str = "kill"
    """A name in ACTIONS."""
    victim: int = -1
    """The rank that `kill` kills; -1: the rank with the fault."""


@dataclass
class Outcome:
    """The end of a run."""

    exits: list[int]
    """Exit codes by rank; a signal is its negative number."""
    fired: list[tuple[int, str]] = field(default_factory=list)
    """(rank, target) of the faults that happened."""
    logs: list[str] = field(default_factory=list)
    """Logs by rank."""

    @property
    def resumed(self) -> list[int]:
        """The steps that rank 0 reports to have resumed from."""
        return [int(step) for step in re.findall(r"resumed from .*/step-(\d+)\n", self.logs[0])]

    @property
    def reached(self) -> int:
        """The last logged step."""
        return max((int(step) for step in re.findall(r" step +(\d+)/", self.logs[0])), default=0)


class Trainer:
    """Runs jobs on ranks, one job at a time."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._runs = 0

    def run(
        self,
        toml: Path,
        overrides: Sequence[str],
        size: int = 1,
        faults: Sequence[Fault] = (),
        signal_peers: bool = True,
    ) -> Outcome:
        """Run a job on `size` ranks to its end. `signal_peers`: when a rank dies, the other ranks get
        SIGTERM, as from torchrun; otherwise they have to end by themselves."""
        self._runs += 1
        scratch = self._scratch / str(self._runs)
        scratch.mkdir(parents=True)
        ranks = Ranks(size, _train, toml, list(overrides), list(faults), scratch)
        logs = [scratch / f"log-{rank}" for rank in range(size)]
        try:
            outcome = Outcome(ranks.exits(signal_peers=signal_peers))
        except AssertionError as error:
            texts = [log.read_text() for log in logs if log.exists()]
            warnings.warn("\n".join([str(error), *texts]), stacklevel=2)
            raise
        for rank in range(size):
            outcome.logs.append(logs[rank].read_text())
            for line in _lines(scratch / f"fired-{rank}"):
                outcome.fired.append((rank, line))
        return outcome


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _train(toml: Path, overrides: list[str], faults: list[Fault], scratch: Path) -> None:
    """Plant the faults in this rank, train, and end with the exit code that the program would have."""
    import torch.distributed as dist

    from titanlite.checkpoint import writer
    from titanlite.job import load_job
    from titanlite.train import train

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    code = 1
    try:
        write_output_to(scratch / f"log-{rank}")
        (scratch / f"pid-{rank}").write_text(str(os.getpid()))
        writer.FILE_BYTES = FILE_BYTES
        for fault in faults:
            if fault.rank in (rank, -1):
                _Planted(fault, rank, scratch).plant()
        code = train(load_job(toml, overrides, size, allow_imports=True))
    except BaseException as e:
        traceback.print_exc()
        code = getattr(e, "exit_code", 1)
    leave(code)


class _Planted:
    """A fault in this process."""

    def __init__(self, fault: Fault, rank: int, scratch: Path):
        self.fault, self.rank, self.scratch = fault, rank, scratch
        self._armed = fault.during == "start"
        self._calls = 0
        self._lock = threading.Lock()  # shards are written by several threads
        self._owner, self._name = find_target(fault.target)
        self.original = getattr(self._owner, self._name)
        self.stopped_at: float | None = None  # of a loader worker, by time.monotonic()

    def plant(self) -> None:
        """Wrap the target, and the function that arms the fault."""
        _wrap(self._owner, self._name, self._call)
        where = {"write": "saver:Saver._save", "save": "checkpointer:Checkpointer.save"}
        if self.fault.during in where:
            _wrap(*find_target(where[self.fault.during]), self._arm)

    def _arm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = args[1].step  # of a snapshot, or of the state
        self._armed = step == self.fault.step
        try:
            return original(*args, **kwargs)
        finally:
            self._armed = False

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._due(args):
            return original(*args, **kwargs)
        if self.fault.when == "half":
            return _halves(self.fault.target, original, lambda: self._act(args), *args, **kwargs)
        if self.fault.when == "after":
            result = original(*args, **kwargs)
            self._act(args)
            return result
        result = self._act(args)
        return result if self.fault.when == "instead" else original(*args, **kwargs)

    def _due(self, args: tuple[Any, ...]) -> bool:
        if not self._armed or (self.fault.match and self.fault.match not in _text(args)):
            return False
        with self._lock:
            self._calls += 1
            return self.fault.call in (0, self._calls)

    def _act(self, args: tuple[Any, ...]) -> Any:
        with open(self.scratch / f"fired-{self.rank}", "a") as f:
            f.write(self.fault.target + "\n")
        return ACTIONS[self.fault.action](self, args)


def find_target(target: str) -> tuple[Any, str]:
    """The object that has the target's function, and the function's name."""
    module, _, path = target.partition(":")
    full = module if "." in module or module in sys.stdlib_module_names else f"titanlite.checkpoint.{module}"
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(full)), name


def _wrap(owner: Any, name: str, by: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kw: by(original, *args, **kw)))


def _text(args: tuple[Any, ...]) -> str:
    """The arguments as text, to match. A HashingFile is represented by its path."""
    from titanlite.checkpoint.digest import HashingFile

    return " ".join(str(arg.path if isinstance(arg, HashingFile) else arg) for arg in args)


def _halves(
    target: str, original: Callable[..., Any], act: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    """Do half of a call, then the fault, and the rest of the call if the fault returned."""
    name = re.split("[.:]", target)[-1]
    if name == "write":  # of a HashingFile
        file, view = args[0], memoryview(args[1]).cast("B")
        written = original(file, view[: len(view) // 2])
        file.flush()
        act()
        return written + original(file, view[len(view) // 2 :])
    if name == "rmtree":
        for path in sorted(Path(args[0]).iterdir())[::2]:
            path.unlink()
    else:
        assert name == "write_new", f"half of {target} is not known"
        original(args[0], args[1][: len(args[1]) // 2], **kwargs)
    act()
    return original(*args, **kwargs)


# ---- actions of faults: called with the fault and the arguments of the call


def _kill(planted: _Planted, args: tuple[Any, ...]) -> None:
    victim = planted.fault.victim
    itself = victim in (-1, planted.rank)
    os.kill(os.getpid() if itself else int((planted.scratch / f"pid-{victim}").read_text()), signal.SIGKILL)
    if itself:
        time.sleep(TIMEOUT_S)  # the kernel may end this thread last


def _error(planted: _Planted, args: tuple[Any, ...]) -> None:
    raise OSError(errno.EIO, "injected")


def _no_memory(planted: _Planted, args: tuple[Any, ...]) -> None:
    from titanlite.checkpoint.commit import CheckpointError

    raise CheckpointError("injected")


def _lose_moments(planted: _Planted, args: tuple[Any, ...]) -> None:
    for moments in args[1].optimizer.state.values():
        moments["exp_avg"].zero_()


def _shift_sequence(planted: _Planted, args: tuple[Any, ...]) -> None:
    args[1].num_sequences += 1


def _stop(planted: _Planted, args: tuple[Any, ...]) -> None:
    time.sleep(0.2)  # a loader worker sends its earlier batches by a thread
    os.kill(os.getpid(), signal.SIGSTOP)


def _let_the_run_wait(planted: _Planted, args: tuple[Any, ...]) -> None:
    """Wait, in a loader worker, until the rank has asked for the batch without success, which a second fault
    notes."""
    fired, until = planted.scratch / f"fired-{planted.rank}", time.monotonic() + TIMEOUT_S
    while "DataWait" not in fired.read_text() and time.monotonic() < until:
        time.sleep(0.05)


def _wait_for_an_hour(planted: _Planted, args: tuple[Any, ...]) -> None:
    """Replace DataWait: once the worker has been stopped for 2 s, add an hour to the rank's wait."""
    wait, waited_s, worker = args
    pid = re.findall(r"pid (\d+)", worker)[0]
    if ") T " in Path(f"/proc/{pid}/stat").read_text():
        planted.stopped_at = planted.stopped_at or time.monotonic()
        if time.monotonic() - planted.stopped_at > 2:  # its earlier batches have arrived
            waited_s += 3600
    planted.original(wait, waited_s, worker)


_scribbled = threading.Event()


def _scribble(planted: _Planted, args: tuple[Any, ...]) -> None:
    """Run after Checkpointer.save: overwrite all state, and restore it when the checkpoint is written."""
    import torch

    from titanlite.checkpoint.state import flattened
    from titanlite.mesh import local_shard

    checkpointer, state = args[:2]
    tensors = list(flattened(state.tensors()).values())
    local = [*map(local_shard, tensors), state.tokens]
    kept, small = [t.clone() for t in local], (state.step, state.num_sequences)
    with torch.no_grad():
        for t in local:
            t.fill_(7)
        state.step, state.num_sequences = 7, 7
        _scribbled.set()
        checkpointer.saver.task.result()
        for t, before in zip(local, kept):
            t.copy_(before)
        state.step, state.num_sequences = small


ACTIONS: dict[str, Callable[[_Planted, tuple[Any, ...]], Any]] = {
    "kill": _kill,
    "error": _error,
    "no_memory": _no_memory,
    "lose_moments": _lose_moments,
    "shift_sequence": _shift_sequence,
    "scribble": _scribble,
    "wait_for_scribble": lambda planted, args: _scribbled.wait(TIMEOUT_S),
    "nothing": lambda planted, args: None,
    "stop": _stop,
    "terminate": lambda planted, args: os.kill(os.getpid(), signal.SIGTERM),
    "let_the_run_wait": _let_the_run_wait,
    "wait_for_an_hour": _wait_for_an_hour,
    "return_argument": lambda planted, args: args[1],
}
