"""The launcher's agent with ranks that are shell scripts: what is restarted, and which rank is blamed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from titanlite.runtime import agent
from titanlite.runtime.agent import Agent, Ending, RanksFailed, blame
from titanlite.runtime.environment import _RESTART_BEGAN, NOTES
from titanlite.runtime.rendezvous import OneNode
from titanlite.runtime.signals import SAVE, STOP, handled_signals

NOTE = '"$TITANLITE_NOTES/rank-$RANK"'
BEGIN, DONE = "echo $RANK >> starts;", f"rm {NOTE};"
UNTIL_ENDED = "for i in $(seq 3000); do sleep 0.05; done"
GLOO = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2188"


@pytest.fixture
def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Iterator[Callable[..., tuple[int, str]]]:
    """`launch(script, restarts)`: the exit code and what the agent of two ranks said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NOTES, "")  # restored after the agent has set it
    numbers = (*STOP, *SAVE, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}

    def launch(script: str, restarts: int = 0, rendezvous: type[OneNode] = OneNode) -> tuple[int, str]:
        Path("rank.sh").write_text(BEGIN + script)
        one_node = rendezvous(RendezvousParameters("titanlite", "localhost:0", "test", 1, 1))
        spec = WorkerSpec(
            role="default", local_world_size=2, entrypoint="sh", args=("rank.sh",),
            rdzv_handler=one_node, max_restarts=restarts, monitor_interval=0.02,
        )  # fmt: skip
        try:
            Agent(spec, DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))).run()
            code = 0
        except RanksFailed as failed:
            code = failed.exit_code
        said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("titanlite:")]
        return code, "\n".join(line.removeprefix("titanlite: ") for line in said)

    yield launch
    for number, handler in before.items():
        signal.signal(number, handler)


def starts() -> int:
    """How many ranks were started."""
    return len(Path("starts").read_text().splitlines())


def test_ranks_that_are_done_are_no_failure(launch: Callable) -> None:
    assert launch(DONE) == (0, "")


class LosesANode(OneNode):
    """A rendezvous of two nodes, of which the other one is lost as soon as it has joined; then of one."""

    stores: ClassVar[list[Store]] = []

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        self.stores.append(info.store)
        return RendezvousInfo(info.store, 0, 2 if len(self.stores) == 1 else 1, info.bootstrap_store_info)


def test_nodes_meet_again_if_one_is_lost_while_they_meet(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "COUNT_S", (0.2, 15.0))
    monkeypatch.setattr(LosesANode, "stores", [])
    assert launch(DONE, rendezvous=LosesANode) == (0, "a node was lost while the nodes met; they meet again")
    assert starts() == 2  # both ranks, once
    assert [store.timeout.total_seconds() for store in LosesANode.stores] == [300, 300]


def test_a_rank_that_leaves_with_0_is_blamed_and_the_others_are_not_waited_for(launch: Callable) -> None:
    code, said = launch(f'[ $RANK = 1 ] || {{ trap "echo {GLOO!r} > {NOTE}; exit 1" TERM; {UNTIL_ENDED}; }}')
    assert (code, said) == (1, "rank 1 left with exit code 0 before training was done")


def test_a_note_that_is_lost_is_no_traceback(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something empties the folder for temporary files while a rank leaves."""
    notes = Agent._note

    def last_time(self: Agent, rank: int) -> str | None:
        note = notes(self, rank)
        if rank == 1 and 1 in self._ended:
            Path(str(self._notes), "rank-1").unlink(missing_ok=True)
        return note

    monkeypatch.setattr(Agent, "_note", last_time)
    code, said = launch(f"[ $RANK = 1 ] || {UNTIL_ENDED}")
    assert (code, said) == (1, "rank 1 left with exit code 0 before training was done")


def test_a_rank_that_waits_for_one_that_failed_is_no_hang(launch: Callable) -> None:
    """The one that failed has left a note, and is still ending."""
    failed = f"[ $RANK = 1 ] && {{ echo 'ValueError: bad' > {NOTE}; : > failed; {UNTIL_ENDED}; }};"
    wait = "until [ -e failed ]; do sleep 0.02; done;"
    code, said = launch(f"{failed} {wait} echo 'RuntimeError: Timed out' > {NOTE}; exit 1")
    assert (code, said) == (
        1,
        "rank 0 ended with exit code 1: RuntimeError: Timed out; its message is above",
    )


def test_the_rank_that_failed_is_blamed_with_its_error(launch: Callable) -> None:
    code, said = launch(f"[ $RANK = 0 ] && {UNTIL_ENDED}; echo 'ValueError: bad\nmore' > {NOTE}; exit 1")
    assert (code, said) == (1, "rank 1 ended with exit code 1: ValueError: bad; its message is above")


@pytest.mark.parametrize("cause", ["", "kill -9 $$"])
def test_the_traceback_of_a_lost_connection_is_printed_unless_there_is_a_cause(
    launch: Callable, cause: str
) -> None:
    leave = f"echo 'titanlite: traceback' > $TITANLITE_NOTES/traceback-0; echo {GLOO!r} > {NOTE}; exit 1"
    _, said = launch(f"[ $RANK = 1 ] && {{ {cause or 'true'}; {UNTIL_ENDED}; }}; {leave}")
    start = "rank 1 was ended by SIGKILL" if cause else f"traceback\nrank 0 ended with exit code 1: {GLOO}"
    assert said.startswith(start)


@pytest.mark.parametrize("code", [2, 3, 4, 6, 75])
def test_what_a_restart_would_meet_again_is_not_restarted(launch: Callable, code: int) -> None:
    ended, said = launch(f"[ $RANK = 0 ] && {UNTIL_ENDED}; exit {code}", 2)
    assert ended == code
    assert starts() == 2  # both ranks, once
    assert said == ("" if code == 75 else f"rank 1 ended with exit code {code}; its message is above")


@pytest.mark.parametrize("end", ["exit 1", "exit 7", "kill -9 $$", "exit 0"])
def test_a_crash_is_restarted_and_said(launch: Callable, end: str) -> None:
    code, said = launch(f"[ $RANK = 0 ] && {UNTIL_ENDED}; {end}", 1)
    assert code == (7 if end == "exit 7" else 1)
    assert starts() == 4
    first, last = said.splitlines()
    assert first == f"{last}; starting all ranks again (1 of 1)"


def test_a_rank_that_is_told_to_end_after_a_crash_does_not_stop_the_restart(launch: Callable) -> None:
    """Before the first step SIGTERM ends a rank with 75, which was not asked of the run."""
    told = "{ trap 'exit 75' TERM; : > ready; " + UNTIL_ENDED + "; }"
    code, said = launch(
        f"[ $RANK = 0 ] && {told}; until [ -e ready ]; do sleep 0.02; done; rm ready; kill -9 $$", 1
    )
    assert code == 1
    assert starts() == 4
    assert said.splitlines()[-1].startswith("rank 1 was ended by SIGKILL")


def test_a_restarted_rank_knows_when_the_failure_was_seen(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_RESTART_BEGAN, "")  # restored after the agent has set it
    began = time.monotonic()
    launch("echo $TITANLITE_RESTART_BEGAN >> began-$RANK; sleep 0.2; exit 1", 1)
    for rank in range(2):
        first, second = Path(f"began-{rank}").read_text().splitlines()
        assert first == ""
        assert began + 0.2 < float(second) < time.monotonic() - 0.2, "before the second start"


def test_a_rank_that_cannot_end_is_killed_soon_if_a_restart_follows(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits in a kernel of NCCL; torchrun waits for it for 30 s."""
    monkeypatch.setattr(agent, "END_S", 1)
    began = time.monotonic()
    first = "[ -e again ] && exit 7;"
    stuck = f"[ $RANK = 0 ] && {{ trap '' TERM; : > ready; {UNTIL_ENDED}; }};"
    code, said = launch(f"{first} {stuck} until [ -e ready ]; do sleep 0.02; done; : > again; exit 7", 1)
    assert code == 7
    assert said.splitlines()[0].startswith(
        "rank 1 ended with exit code 7; its message is above; starting all"
    )
    assert time.monotonic() - began < 20


def test_a_rank_gets_time_to_end_if_no_restart_follows(
    launch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop that is saved, the first rank may still write records when the others have ended."""
    monkeypatch.setattr(agent, "END_S", 0.1)
    slow = "{ trap '' TERM; : > ready; sleep 1; : > written; exit 75; }"
    code, _ = launch(f"[ $RANK = 0 ] && {slow}; until [ -e ready ]; do sleep 0.02; done; exit 75", 1)
    assert code == 75
    assert Path("written").exists()


def test_nohup_is_heeded(launch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher, and by the ranks, which it starts with the signals ignored that are ignored here."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    names = ",".join(number.name for number in handled_signals())
    assert names == "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", names)  # as torchrun's option does
    assert launch(f"kill -HUP $$; {DONE}") == (0, "")
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_nohup_a_hangup_is_passed_on(launch: Callable, hangups: None) -> None:
    assert signal.SIGHUP in handled_signals()
    assert launch(f"kill -HUP $$; {DONE}")[1].startswith("rank 0 was ended by SIGHUP")


# ---- whom to blame


def test_an_error_that_follows_from_a_peers_is_not_blamed_if_there_is_another() -> None:
    endings = [Ending(0, 1, GLOO), Ending(1, -9, "")]
    assert blame(endings, 1)[1].startswith("rank 1 was ended by SIGKILL (the kernel sends it when memory")


def test_an_abort_of_nccls_watchdog_points_at_the_rank_that_does_not_answer() -> None:
    code, text = blame([Ending(0, -6, ""), Ending(1, None, is_stuck=True)], 1)
    assert code == 1
    assert text.startswith("rank 1 did not end when told to; rank 0 was ended by")


def test_a_rank_that_is_slow_to_end_is_not_blamed_for_a_peers_own_error() -> None:
    endings = [Ending(0, 1, "ValueError: bad"), Ending(1, None, is_stuck=True)]
    assert blame(endings, 1)[1] == "rank 0 ended with exit code 1: ValueError: bad; its message is above"


def test_of_several_nodes_another_may_be_the_first() -> None:
    assert blame([Ending(4, 1, GLOO)], 2)[1].endswith("; it may have begun on another node: see its log")
    assert "node" not in blame([Ending(4, 1, "ValueError: bad")], 2)[1]
