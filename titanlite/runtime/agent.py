"""The launcher's agent: starts and watches the ranks of this node, and names the rank with which a failure
began."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousGracefulExitError

from titanlite.errors import PEER_ERRORS, TRACEBACK
from titanlite.log import tell, write_error
from titanlite.runtime.environment import set_notes_folder, set_restart_began
from titanlite.runtime.hang import describe_hang, name_ranks
from titanlite.runtime.nodes import Nodes
from titanlite.runtime.signals import AGAIN_S, END, SAVE, STOP, Stopped, handled_signals
from titanlite.runtime.slow_node import read_slow_node

FINAL_CODES = {2, 3, 4, 6, Stopped.exit_code}  # exit codes that a restart would only repeat
MARGIN_S = 2.0  # seconds before the end of the grace period at which the launcher ends the ranks
END_S = 5  # seconds in which ranks end before a restart; one that waits in a kernel of NCCL cannot
# Seconds in which all nodes that have met say how many ranks they have, in the first try and in later ones. A
# node that is lost meanwhile says nothing, and very many nodes may be slow.
COUNT_S = (15.0, 30.0, 60.0)
ANSWER_S = 3.0  # seconds in which the other ranks' collectives fail, too, after the first one timed out


class RanksFailed(Exception):
    """A rank has failed and no restart is left."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ending:
    """How a rank has ended, or that it still runs."""

    rank: int
    code: int | None
    """Exit code, or the negative number of the signal that ended it; None: still running when the failure was
    seen."""
    note: str | None = None
    """The rank's error note in the launcher's folder: the error, "" if the rank wrote none, None if its work
    was done."""
    is_stuck: bool = False
    """Whether a rank that was still running did not end when it was told to."""

    @property
    def left_early(self) -> bool:
        """Whether the rank ended with exit code 0 before its work was done."""
        return self.code == 0 and self.note is not None

    @property
    def timed_out(self) -> bool:
        """Whether the rank may have ended because it waited too long in a collective."""
        return self.code == -signal.SIGABRT or (self.code == 1 and "imed out" in (self.note or ""))

    @property
    def follows_another(self) -> bool:
        """Whether the rank's end may be a consequence of another rank's end."""
        return self.code == -signal.SIGABRT or (self.code == 1 and bool(PEER_ERRORS.search(self.note or "")))


def blame(endings: Sequence[Ending], nodes: int) -> tuple[int, str]:
    """The exit code of a failure, and one line about the rank with which it began.

    `endings`: the ranks of this node in the order in which they ended. At least one has failed or left early.
    """
    for ending in endings:
        if ending.left_early:
            return 1, f"rank {ending.rank} left with exit code 0 before training was done"
    first = first_failure(endings)
    code = first.code if first.code and first.code > 0 else 1
    text = f"rank {first.rank} {_describe(first)}"
    if first.follows_another:
        stuck = [ending.rank for ending in endings if ending.is_stuck]
        if stuck:
            return code, f"{name_ranks(stuck)} did not end when told to; {text}"
        if nodes > 1:
            text += "; it may have begun on another node: see its log"
    return code, text


def first_failure(endings: Sequence[Ending]) -> Ending:
    """The rank with which a failure began: the first rank that recorded an error, else the first rank."""
    failed = [ending for ending in endings if ending.code]
    return min(failed, key=lambda ending: ending.follows_another)


def _describe(ending: Ending) -> str:
    code = ending.code or 0
    if code > 0:
        lines = (ending.note or "").strip().splitlines() if code == 1 else []
        error = f": {lines[0][:200]}" if lines else ""
        return f"ended with exit code {code}{error}; its message is above"
    cause = " (the kernel sends it when memory is short)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{cause}; messages of other ranks came after it"


class Agent(LocalElasticAgent):
    """torchrun's agent with four differences: it passes signals to the ranks and gives them the time they
    need to save; it restarts ranks only after a crash, and does not wait long for ranks that cannot end; it
    meets the other nodes again if one is lost meanwhile; and it reports a failure in one line that names the
    rank with which the failure began."""

    grace_s: float | None = None
    """Seconds after a signal to stop at which this node is killed; None: it waits for the ranks."""
    max_nodes = 1
    """The most nodes that may train the run."""
    _count_s = COUNT_S[0]
    _stop_at: float | None = None
    _ended_at: float | None = None
    _notes: Path | None = None
    _failed_at: float | None = None
    _exit_code = 1

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ended: dict[int, int] = {}  # exit codes by local rank, in the order in which they ended

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Raises RanksFailed, and RendezvousGracefulExitError if the run has ended without this node."""
        result = super().run(*args, **kwargs)
        if result is None:  # torchrun swallows the error
            raise RendezvousGracefulExitError
        if result.is_failed():
            raise RanksFailed(self._exit_code)
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        for self._count_s in chain(COUNT_S, repeat(COUNT_S[-1])):
            try:
                return super()._rendezvous(worker_group)
            except DistStoreError:
                tell("a node was lost while the nodes met; they meet again")
            except DistNetworkError as error:  # the first node was lost, which has the store
                raise RendezvousConnectionError(str(error)) from error

    def _assign_worker_ranks(self, store: Any, *args: Any) -> list[Worker]:
        """Raises DistStoreError if a node does not answer: it was lost after it had joined. torch would wait
        60 s and end the launchers of all nodes."""
        timeout = store.timeout
        store.set_timeout(timedelta(seconds=self._count_s))
        try:
            return super()._assign_worker_ranks(store, *args)
        finally:
            store.set_timeout(timeout)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop_at is not None:
            raise Stopped("stopped before the ranks were started again; nothing is lost")
        self._ended, self._failed_at = {}, None
        self._notes = Path(tempfile.mkdtemp(dir=self._logs_specs.root_log_dir))
        set_notes_folder(str(self._notes))
        for worker in worker_group.workers:  # the rank deletes it when its work is done
            (self._notes / f"rank-{worker.global_rank}").touch()
        forwarded = handled_signals()
        # Ranks inherit the mask and lift it when they have handlers: a signal that comes earlier waits and
        # kills no rank.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
        try:
            pids = super()._start_workers(worker_group)
            for number in forwarded:  # after torchrun has set its own handlers
                signal.signal(number, self._forward)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, *SAVE))
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        set_restart_began(self._failed_at or time.monotonic())  # now: another node was lost, or joins
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, Nodes) and self._notes:
            ranks = [worker.global_rank for worker in worker_group.workers]
            handler.slow = read_slow_node(self._notes, ranks)
        if worker_group.group_world_size == self.max_nodes and self._pcontext is not None:
            # A node can only join a run of all nodes if one was lost. Ranks that wait for the lost one cannot
            # save, and some cannot end: torch would wait 30 s.
            self._pcontext.close(signal.SIGTERM, END_S)
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if self._grace_is_over():
            return self._end_unsaved()
        if any(self._ended.values()):
            self._tell_hang(worker_group)
        endings = self._endings(worker_group)
        left_early = any(ending.left_early for ending in endings)
        if (left_early or any(self._ended.values())) and self._will_restart():
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGTERM, END_S)  # torch would wait 30 s
        if left_early:  # the other ranks might wait minutes for this rank
            result = RunResult(WorkerState.FAILED)
        elif any(self._ended.values()) or len(self._ended) == len(worker_group.workers):
            result = super()._monitor_workers(worker_group)
            endings = self._endings(worker_group)
        else:
            return RunResult(WorkerState.HEALTHY)
        if self._stop_at is not None:
            self._remaining_restarts = 0
        if result.state is WorkerState.FAILED:
            if {ending.code for ending in endings} & FINAL_CODES:
                self._remaining_restarts = 0
                # Other nodes end with the same code. The first node may host the store: wait for them.
                self._exit_barrier_timeout = 30
                self._exit_barrier()
            self._tell(endings, worker_group)
        return result

    def _will_restart(self) -> bool:
        """Whether ranks are started again if they have failed."""
        is_final = bool(set(self._ended.values()) & FINAL_CODES)
        return self._remaining_restarts > 0 and self._stop_at is None and not is_final

    def _grace_is_over(self) -> bool:
        if self._stop_at is None or self.grace_s is None:
            return False
        return time.monotonic() - self._stop_at > max(self.grace_s - MARGIN_S, self.grace_s / 2)

    def _end_unsaved(self) -> RunResult:
        """End the ranks before the node is killed, so that the launcher still returns the exit code that asks
        to run the job again."""
        assert self._pcontext is not None
        self._pcontext.close(signal.SIGKILL)
        self._remaining_restarts, self._exit_code = 0, Stopped.exit_code
        tell(
            f"the grace period of {self.grace_s:g} s ends, and the ranks have not saved: they are ended; the "
            "same command continues from the newest checkpoint"
        )
        return RunResult(WorkerState.FAILED)

    def _tell_hang(self, worker_group: WorkerGroup) -> None:
        """If a collective has timed out, print one line on the rank for which the others wait. The other
        ranks get a few seconds to come to the end of their collectives, too."""
        ranks = [worker.global_rank for worker in worker_group.workers]
        until = time.monotonic() + ANSWER_S
        while True:
            ended = [Ending(ranks[r], code, self._note(ranks[r])) for r, code in self._ended.items()]
            notes = {rank: self._note(rank) for r, rank in enumerate(ranks) if r not in self._ended}
            failed = [*ended, *(Ending(rank, 1, note) for rank, note in notes.items() if note)]
            silent = [rank for rank, note in notes.items() if note == ""]
            if not any(ending.timed_out for ending in failed):
                return
            if not all(ending.follows_another for ending in failed if ending.code):
                return  # the others wait for a rank that has failed
            if not silent or time.monotonic() > until:
                break
            time.sleep(0.05)
            self._look()
        said_so = any(ending.note for ending in failed if ending.timed_out)
        if self._notes and (text := describe_hang(self._notes, ranks, silent, said_so)):
            tell(text)

    def _look(self) -> None:
        """Note which ranks have ended since the last call."""
        for local_rank, code in self._codes().items():
            if code is not None:
                self._ended.setdefault(local_rank, code)
                self._failed_at = self._failed_at or time.monotonic()

    def _codes(self) -> dict[int, int | None]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}

    def _pids(self) -> dict[int, int]:
        return self._pcontext.pids() if self._pcontext is not None else {}

    def _note(self, rank: int) -> str | None:
        try:
            assert self._notes is not None
            return (self._notes / f"rank-{rank}").read_text("utf-8", errors="replace")
        except OSError:
            return None

    def _endings(self, worker_group: WorkerGroup) -> list[Ending]:
        """The endings of this node's ranks in the order in which they ended; ranks that were still running
        when the first one failed come last."""
        ranks = [worker.global_rank for worker in worker_group.workers]
        endings = [Ending(ranks[r], code, self._note(ranks[r])) for r, code in self._ended.items()]
        for local_rank, code in self._codes().items():
            if local_rank not in self._ended:
                endings.append(Ending(ranks[local_rank], None, is_stuck=code == -signal.SIGKILL))
        return endings

    def _tell(self, endings: list[Ending], worker_group: WorkerGroup) -> None:
        self._exit_code, text = blame(endings, worker_group.group_world_size or 1)
        if self._exit_code == Stopped.exit_code:
            return
        if not any(ending.left_early for ending in endings):
            with suppress(OSError):  # its error is a consequence, but nobody else's is the cause
                path = f"{self._notes}/{TRACEBACK}-{first_failure(endings).rank}"
                write_error(Path(path).read_text("utf-8", errors="replace"))
        if self._remaining_restarts > 0:
            total = worker_group.spec.max_restarts
            text += f"; starting all ranks again ({total - self._remaining_restarts + 1} of {total})"
        tell(text)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number)
        if number in END:
            if self._ended_at is not None and now - self._ended_at > AGAIN_S:
                raise SignalException(f"{name.name} again: not waiting any longer", sigval=name)
            self._ended_at = self._ended_at or now
        if number in STOP:
            self._stop_at = self._stop_at or now
            if self._worker_group.state is not WorkerState.HEALTHY and not self._in_exit_barrier:
                raise Stopped(f"stopped by {name.name} while no ranks were running; nothing is lost")
        for pid in self._pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
