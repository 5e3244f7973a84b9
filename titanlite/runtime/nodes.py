"""The rendezvous of several nodes: torch's c10d rendezvous, with nodes that wait because the job cannot train
on all that have joined, and with slow nodes that leave.

The nodes that wait are participants of torch's round without processes. They go to the next round when the
others do, or when one of the others is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from titanlite.log import tell
from titanlite.runtime.slow_node import SlowNode
from titanlite.torch_compat import is_spare, leave_rendezvous, node_of, rendezvous_state

NODES = "titanlite-nodes"  # torchrun's name for this rendezvous
POLL_S = 0.2
LOOK_S = 2.0  # seconds in which a slow node looks for enough other nodes
# Seconds after which a slow node joins again: since the others were enough to train, and in any case.
TOO_FEW_S, OUT_S = 5.0, 120.0
END_S = 15.0  # seconds that the first node, host of the store, waits until the others know of the end


class LeftRun(Exception):
    """This node has left the run, which goes on without it. The message says why."""

    exit_code = 0


class Nodes(RendezvousHandler):
    """The rendezvous of several nodes. The launcher sets the attributes of the class."""

    numbers: Sequence[int] = (1,)
    """The numbers of nodes on which the job can train, in ascending order."""
    is_first = False
    """Whether this node is the first one, which hosts the store of the rendezvous."""
    excludes_slow = False
    """Whether a slow node leaves the run."""

    def __init__(self, parameters: RendezvousParameters):
        backend, store = create_backend(parameters)
        self._c10d = create_handler(store, backend, parameters)
        self.slow: SlowNode | None = None
        """This node's slow rank before the restart, as the agent has read it."""
        self._num_training = 0
        self._is_out = False  # whether the others go on without this node
        self._told = set[str]()

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet over the agents' store."""
        return self._c10d.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """The next rendezvous of which this node trains. Raises LeftRun if the others go on without this
        node, RendezvousGracefulExitError if the run ends while this node waits."""
        if self.excludes_slow and self.slow is not None:
            self._leave(self.slow)
        while True:
            with self._told_if_spare():
                info = self._c10d.next_rendezvous()
            if info.world_size <= max(info.rank, self.numbers[0] - 1):
                continue  # torch counts the nodes that are left, and some have already gone to the next round
            self._num_training = max(number for number in self.numbers if number <= info.world_size)
            self._is_out = info.rank >= self._num_training
            if not self._is_out:
                if info.rank == 0 and self._num_training < info.world_size:
                    self._tell_once(f"{self._joined(info)}; the others wait until the nodes change")
                assert info.bootstrap_store_info is not None
                return RendezvousInfo(info.store, info.rank, self._num_training, info.bootstrap_store_info)
            self._tell_once(f"this node waits: {self._joined(info)}; it takes part when the nodes change")
            self._wait_for_change()

    def _joined(self, info: RendezvousInfo) -> str:
        return (
            f"{info.world_size} nodes have joined, of which {self._num_training} train, because the job "
            f"trains on {', '.join(map(str, self.numbers))} nodes only"
        )

    def _wait_for_change(self) -> None:
        """Wait until a node joins, or one that trains has left or is lost."""
        while True:
            state = rendezvous_state(self._c10d)
            if state.is_closed:
                raise RendezvousGracefulExitError
            num_training = sum(rank < self._num_training for rank in state.participants.values())
            is_lost = node_of(self._c10d) not in state.participants  # it was suspended, for example
            if state.waiting or num_training < self._num_training or is_lost:
                return
            time.sleep(POLL_S)

    @contextmanager
    def _told_if_spare(self) -> Iterator[None]:
        """Say so if this node is a spare one in the body, in which torch says nothing."""
        done = Event()

        def watch() -> None:
            while not done.wait(POLL_S):
                if is_spare(self._c10d):
                    self._tell_once("this node waits: enough nodes train; it takes part when one is lost")
                    return

        Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    # ---- slow nodes

    def _leave(self, slow: SlowNode) -> None:
        """Let the other nodes begin the next round without this node. If they do, raises LeftRun. If they are
        too few, this node is to join them."""
        who = (
            f"rank {slow.rank} of this node is slow: without waiting for other ranks, its steps take "
            f"{slow.own_s:.3f} s, the median over ranks is {slow.median_s:.3f} s"
        )
        if self.is_first:
            reason = "the other nodes meet at it, because it is the first"
        elif not self._would_be_enough(slow):
            reason = "too few nodes would be left"
        elif self._go_on_without():
            raise LeftRun(f"{who}; the node leaves the run, and the other nodes go on")
        else:
            reason = "too few other nodes have come"
        self._tell_once(f"{who}; the node stays in the run: {reason}", reason)

    def _would_be_enough(self, slow: SlowNode) -> bool:
        """Whether enough nodes to train would be left without this node and the nodes that are slower."""
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            if self._num_others() - slow.num_slower >= self.numbers[0]:
                return True
            time.sleep(POLL_S)
        return False

    def _num_others(self) -> int:
        """The number of other nodes that train or wait. The state may be a second old, and nodes that go from
        one set to another are in none for a moment."""
        state = rendezvous_state(self._c10d)
        return len((state.participants.keys() | state.waiting | state.spare) - {node_of(self._c10d)})

    def _go_on_without(self) -> bool:
        """Leave the round, and wait until the others have completed the next one. Returns False if they
        cannot: nodes that were lost at the restart are noticed only now."""
        self._is_out = True
        last_round = rendezvous_state(self._c10d).round
        leave_rendezvous(self._c10d, announce=True)  # only a rank of this node may have failed
        began = were_enough_at = time.monotonic()
        while True:
            state = rendezvous_state(self._c10d)
            now = time.monotonic()
            if state.is_closed:
                raise RendezvousClosedError
            is_waiting = node_of(self._c10d) in state.waiting
            if is_waiting and (state.round > last_round or len(state.waiting) > 1):
                leave_rendezvous(self._c10d)  # the others have begun the next round
            elif state.is_complete and state.round > last_round:
                return True
            if self._num_others() >= self.numbers[0]:
                were_enough_at = now
            if now > min(were_enough_at + TOO_FEW_S, began + OUT_S):
                self._is_out = False
                return False
            time.sleep(POLL_S)

    # ---- the rest of torchrun's interface

    def get_backend(self) -> str:
        """The name under which the rendezvous is registered."""
        return NODES

    def get_run_id(self) -> str:
        """The id of the run that torchrun was given."""
        return self._c10d.get_run_id()

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._c10d.is_closed()

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self._c10d.set_closed()

    def num_nodes_waiting(self) -> int:
        """The number of nodes that wait for the next round."""
        return self._c10d.num_nodes_waiting()

    def shutdown(self) -> bool:
        """End the run for all nodes, unless the others go on without this one."""
        try:
            state = rendezvous_state(self._c10d)
            takes_part = not state.is_complete or node_of(self._c10d) in state.participants
            closed = self._is_out or not takes_part or self._c10d.shutdown()
            leave_rendezvous(self._c10d)
            if self.is_first:
                self._wait_for_others()
            return closed
        except RendezvousError:  # the first node has ended
            return False

    def _wait_for_others(self) -> None:
        """Wait until the nodes that only look at the store have seen that the run has ended."""
        until = time.monotonic() + END_S
        while time.monotonic() < until:
            state = rendezvous_state(self._c10d)
            ranks = state.participants.values()
            if not state.spare and all(rank < self._num_training and not self._is_out for rank in ranks):
                return
            time.sleep(POLL_S)

    def _tell_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._told:
            self._told.add(key or text)
            tell(text)


def register_nodes() -> None:
    """Make `--rdzv-backend=titanlite-nodes` known to torchrun."""
    rendezvous_handler_registry.register(NODES, Nodes)
