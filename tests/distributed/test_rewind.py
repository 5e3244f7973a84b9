"""A spike of the loss that bad data or bad gradients cause: the run finds it, goes back once, and never
trains on its sequences again. It is then equal, bit by bit, to a run that skipped these sequences from the
start, on every number of ranks and with resumes in between."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.support.checkpoints import archived
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import assert_same, history, state_of
from tests.support.spikes import garbage_sequences, wrong_gradients
from tests.support.staged import staged
from tests.support.tiers import full
from titanlite.checkpoint.saver import Saver
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.metrics import spikes
from titanlite.run import Run
from titanlite.train import train

BATCH = 8
BASE = [
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--optimizer.lr=1e-3",
    "--model.overrides.n_layers=1",
    "--lr_scheduler.total_steps=2000",
    "--checkpoint.interval=20",
    "--checkpoint.async_mode=disabled",
    "--validation.enable=false",
    "--metrics.detail_freq=0",
]
REWIND = ["--guard.on_spike=rewind", "--guard.rewind_margin=15"]


class Case(NamedTuple):
    """A run on `ranks` ranks whose spike detector compares with `num_before` losses. The sequences of 24
    steps after step `good_steps` are bad, as `plant` makes them."""

    ranks: int
    num_before: int
    good_steps: int
    plant: Callable[[int, int], AbstractContextManager[None]] = garbage_sequences
    lr: float = 1e-3

    @property
    def steps(self) -> int:
        return self.good_steps + 50

    @property
    def bad(self) -> tuple[int, int]:
        """The first and the last of the bad sequences."""
        return self.good_steps * BATCH, (self.good_steps + 24) * BATCH - 1


WHOLE = Case(1, spikes.BEFORE, 300)
SHORT = Case(1, 64, 100)  # for the default tier
GRADIENTS = SHORT._replace(plant=wrong_gradients, lr=1e-2)


def on_rank(
    folder: Path, corpus: Path, case: Case, name: str, keys: list[str], stops: tuple[int, ...] = ()
) -> None:
    """Train a run whose loss spikes, with a new start of the program after each step of `stops`."""
    for last in (*stops, case.steps):
        changed = [f"--optimizer.lr={case.lr}", f"--training.steps={last}"]
        with case.plant(*case.bad), patch.object(spikes, "BEFORE", case.num_before):
            train(make_job(folder, corpus, *BASE, *changed, *keys, name=name, world_size=case.ranks))


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def window_of(folder: Path) -> tuple[int, int]:
    """The sequences that the run `rewound` skips."""
    (event,) = [e for e in events_of(folder, "rewound") if e["event"] == "rewound"]
    return event["first_sequence"], event["last_sequence"]


@pytest.mark.parametrize(
    "case",
    [
        SHORT,
        full(WHOLE),
        full(WHOLE._replace(ranks=2)),
        full(SHORT._replace(ranks=4)),
        full(GRADIENTS),
        full(GRADIENTS._replace(ranks=2)),
    ],
)
def test_a_rewound_run_equals_one_that_skipped_the_sequences_from_the_start(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], case: Case
) -> None:
    run_on(case.ranks, on_rank, tmp_path, corpus, case, "rewound", REWIND)
    first, last = window_of(tmp_path)
    late = 4 if case.plant is garbage_sequences else 8  # wrong gradients raise the loss step by step
    assert abs(first - case.bad[0]) < late * BATCH
    assert abs(last - case.bad[1]) < late * BATCH
    skip = [f"--data.skip_sequences=[[{first}, {last}]]"]
    run_on(case.ranks, on_rank, tmp_path, corpus, case, "skipped", skip)
    rewound, skipped = (make_job(tmp_path, corpus, *BASE, name=name) for name in ("rewound", "skipped"))
    assert history(rewound) == history(skipped)
    assert [line["step"] for line in metrics_of(rewound)] == list(range(1, case.steps + 1))
    assert state_of(rewound, case.steps) == state_of(skipped, case.steps) != {}
    assert archived(tmp_path / "rewound") == [[case.good_steps, case.good_steps + 20]]


@pytest.mark.full
def test_the_sequences_of_a_spike_do_matter(tmp_path: Path, corpus: Path, run_on: Callable[..., Any]) -> None:
    for name, keys in (("rewound", REWIND), ("spiked", [])):
        run_on(1, on_rank, tmp_path, corpus, WHOLE, name, keys)
    rewound, spiked = (make_job(tmp_path, corpus, *BASE, name=name) for name in ("rewound", "spiked"))
    assert state_of(rewound, WHOLE.steps) != state_of(spiked, WHOLE.steps)
    kinds = [event["event"] for event in events_of(tmp_path, "spiked")]
    assert [kind for kind in kinds if kind != "saved"] == ["started", "spike", "ended"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumes_before_in_and_after_the_spike_change_nothing(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], ranks: int
) -> None:
    case = WHOLE._replace(ranks=ranks)
    run_on(ranks, on_rank, tmp_path, corpus, case, "whole", REWIND)
    run_on(ranks, on_rank, tmp_path, corpus, case, "hops", REWIND, (280, 311, 330))
    jobs = {name: make_job(tmp_path, corpus, *BASE, name=name) for name in ("whole", "hops")}
    assert history(jobs["hops"]) == history(jobs["whole"])
    assert state_of(jobs["hops"], case.steps) == state_of(jobs["whole"], case.steps) != {}


@pytest.mark.full
def test_without_an_old_checkpoint_or_after_the_last_rewind_the_run_ends(
    tmp_path: Path, corpus: Path
) -> None:
    for name, key, reason in (
        ("old", "--guard.rewind_margin=90", "no healthy checkpoint of step 1[0-9] or earlier"),
        ("last", "--guard.max_rewinds=0", "the loss has spiked"),
    ):
        with pytest.raises(
            Diverged, match=rf"training has diverged: .*{reason}.*the next start goes back to step 80"
        ):
            on_rank(tmp_path, corpus, SHORT, name, [*REWIND, key])
        assert archived(tmp_path / name) == [[100, 120]]


@pytest.mark.full
def test_a_run_that_is_killed_or_stopped_at_each_rewind_ends_equally(tmp_path: Path, corpus: Path) -> None:
    """Two spikes, on loader workers, and a stop request or a kill at the end of each rewind."""
    rewind, num_rewinds = Run.rewind, 0

    def interrupted(run: Run) -> None:
        nonlocal num_rewinds
        rewind(run)
        num_rewinds += 1
        if num_rewinds in (1, 3):
            raise KeyboardInterrupt
        if num_rewinds == 2:
            (run.job.folder / "STOP").touch()
            time.sleep(1.5)  # more than the time between two looks at that file

    def start(name: str, *keys: str) -> int:
        second = garbage_sequences(180 * BATCH, 204 * BATCH - 1)
        with second, garbage_sequences(*SHORT.bad), patch.object(spikes, "BEFORE", SHORT.num_before):
            job = make_job(tmp_path, corpus, *BASE, *REWIND, *keys, "--training.steps=260", name=name)
            return train(job)

    assert start("whole") == 0
    codes = list[object]()
    with patch.object(Run, "rewind", interrupted):
        while not codes or codes[-1] != 0:
            try:
                codes.append(start("hops", "--data.num_workers=2"))
            except KeyboardInterrupt:
                codes.append("killed")
            (tmp_path / "hops/STOP").unlink(missing_ok=True)
    assert codes == ["killed", 75, "killed", 0]
    whole, hops = (make_job(tmp_path, corpus, *BASE, name=name) for name in ("whole", "hops"))
    assert history(hops) == history(whole)
    assert state_of(hops, 260) == state_of(whole, 260) != {}


@pytest.mark.full
def test_the_advice_after_the_last_rewind_keeps_what_was_skipped(tmp_path: Path, corpus: Path) -> None:
    def start(*keys: str) -> int:
        second = garbage_sequences(180 * BATCH, 204 * BATCH - 1)
        with second, garbage_sequences(*SHORT.bad), patch.object(spikes, "BEFORE", SHORT.num_before):
            return train(make_job(tmp_path, corpus, *BASE, *keys, "--training.steps=260", name="run"))

    with pytest.raises(Diverged, match="allows no further rewind") as e:
        start(*REWIND, "--guard.max_rewinds=1")
    options = re.findall(r"--[a-z_.]+=\S+ ?(?:[\d, \[\]]+')?", str(e.value))
    skipped = re.findall(r"\[(\d+), (\d+)\]", str(e.value))
    assert len(skipped) == 2
    assert start(*(option.replace("'", "").strip() for option in options)) == 0
    state = json.loads((tmp_path / "run/checkpoint/step-260/train.json").read_text())
    assert state["skipped"] == [[int(first), int(last)] for first, last in skipped]


@pytest.mark.full
def test_a_save_in_flight_is_reported_before_the_rewind(tmp_path: Path, corpus: Path) -> None:
    commit = Saver._commit

    def slow(*arguments: Any) -> None:
        time.sleep(0.4)
        commit(*arguments)

    with patch.object(Saver, "_commit", slow):
        on_rank(tmp_path, corpus, SHORT, "rewound", [*REWIND, "--checkpoint.async_mode=async"])
    events = [(event["event"], event["step"]) for event in events_of(tmp_path, "rewound")]
    at = events.index(("rewound", 80))
    assert ("saved", 120) in events[:at]
    saved = [("saved", step) for step in (100, 120, 140, 150)]
    assert events[at + 1 :] == [*saved, ("ended", 150)]


@pytest.mark.full
def test_a_rewind_that_reads_more_than_max_epochs_ends_the_run(tmp_path: Path, corpus: Path) -> None:
    """1,200 sequences are 1.53 epochs of a.jsonl, and with the skipped ones 1.76."""

    def sources(max_epochs: float) -> str:
        a = f'{{name = "text", path = ["{corpus}/a.jsonl"], weight = 3, max_epochs = {max_epochs}}}'
        return f'--data.sources=[{a}, {{name = "text", path = ["{corpus}/b.txt"]}}]'

    on_rank(tmp_path, corpus, SHORT, "enough", [*REWIND, sources(1.8)])
    for _ in range(2):  # a second start comes to the same end
        with pytest.raises(ConfigError, match=r"after the rewind to step 80: .*more than max_epochs = 1\.6"):
            on_rank(tmp_path, corpus, SHORT, "short", [*REWIND, sources(1.6)])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rewind_over_the_edge_of_a_stage(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], ranks: int
) -> None:
    """The second stage begins amid the bad sequences, and the run rewinds into the first one. Its losses are
    compared with those of the first, because it has the same sources and sequence length."""
    case, edge = SHORT._replace(ranks=ranks), SHORT.bad[0] + 40
    second = 'until = "end", lr_factor = 0.5'
    keys = [staged(f'until = "{edge} sequences"', second)]
    run_on(ranks, on_rank, tmp_path, corpus, case, "rewound", [*REWIND, *keys])
    first, last = window_of(tmp_path)
    assert first < edge < last
    skip = f"--data.skip_sequences=[[{first}, {last}]]"
    run_on(ranks, on_rank, tmp_path, corpus, case, "skipped", [*keys, skip])
    rewound, skipped = (make_job(tmp_path, corpus, *BASE, name=n) for n in ("rewound", "skipped"))
    assert_same(rewound, skipped)
