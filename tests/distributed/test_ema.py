"""The average of the weights on every layout: equal, bit by bit, to the average that follows from the weights
in the checkpoints, also with skipped steps and with resumes on other layouts. Keeping it and validating with
it changes nothing about training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.averages import AVERAGED, check_by_hand, sha_of
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import Part, combined
from tests.support.non_finite import bad_steps
from tests.support.runs import FOUR_MICRO_BATCHES, UNTIED, history, state_of
from tests.support.spikes import garbage_sequences
from tests.support.tiers import full
from titanlite import cli
from titanlite.metrics import spikes
from titanlite.optim.ema import WeightAverage
from titanlite.train import train

STEPS = 6
EVERY_STEP = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", FOUR_MICRO_BATCHES, UNTIED]
VALIDATED = ["--validation.enable", "--validation.freq=2"]
LAYOUTS = {
    "one process": Part(1, []),
    "dp_shard 2": combined("dp_shard"),
    "dp_shard 3": Part(3, ["--training.local_batch_size=1", "--training.global_batch_size=9"]),
    "dp_replicate 2 x dp_shard 2": combined("dp_replicate", "dp_shard"),
    "dp_shard 2 x tp 2": combined("dp_shard", "tp"),
    "cp 2": combined("cp"),
    "pp 2": combined("pp"),
    "pp interleaved": combined("pp interleaved"),
    "dp_shard 2, float8": combined("dp_shard", "float8 tensorwise"),
    "dp_shard 2, CPU offload": combined("dp_shard", "CPU offload"),
    "dp_shard 2, compiled": combined("dp_shard", "compile"),
    "dp_shard 2, Muon": Part(2, ["--optimizer={name = 'muon'}"]),
}
DEFAULT_TIER = {"dp_shard 2"}


def on_rank(
    folder: Path, corpus: Path, ranks: int, keys: list[str], name: str, bad: Collection[int] = ()
) -> None:
    torch._dynamo.reset()  # after several models in a process, the compiler would use symbolic sizes
    with bad_steps(bad):
        train(make_job(folder, corpus, *keys, name=name, world_size=ranks))


def start(run_on: Callable[..., Any], folder: Path, corpus: Path, ranks: int, *rest: Any) -> None:
    """Start the program on `ranks` ranks."""
    if ranks == 1:
        on_rank(folder, corpus, ranks, *rest)
    else:
        run_on(ranks, on_rank, folder, corpus, ranks, *rest)


@pytest.mark.full
@pytest.mark.parametrize("name", [name if name in DEFAULT_TIER else full(name) for name in LAYOUTS])
def test_the_average_equals_one_kept_by_hand(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    """With steps 3 and 4 skipped, and a validation."""
    part = LAYOUTS[name]
    keys = [*EVERY_STEP, *AVERAGED, *VALIDATED, *part.keys, f"--training.steps={STEPS}"]
    start(run_on, tmp_path, corpus, part.ranks, keys, "run", {3, 4})
    check_by_hand(tmp_path / "run", STEPS - 2)


@pytest.mark.full
@pytest.mark.parametrize("freq", [1, 3])
def test_the_average_crosses_layouts(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], freq: int
) -> None:
    """Each start has another layout. The average goes on from the one that was saved, bit by bit."""
    names = ["dp_shard 2", "dp_shard 2 x tp 2", "pp 2", "one process", "dp_replicate 2 x dp_shard 2"]
    for steps, name in zip((2, 4, 6, 8, 10), names):
        part = LAYOUTS[name]
        keys = [*EVERY_STEP, *AVERAGED, f"--ema.freq={freq}", *part.keys, f"--training.steps={steps}"]
        start(run_on, tmp_path, corpus, part.ranks, keys, "run")
    check_by_hand(tmp_path / "run", 10, freq)


@pytest.mark.parametrize("name", ["one process", full("dp_shard 2 x tp 2"), full("dp_shard 2, float8")])
def test_the_average_and_its_validation_change_nothing_about_training(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    part = LAYOUTS[name]
    keys = [FOUR_MICRO_BATCHES, UNTIED, *part.keys, f"--training.steps={STEPS}"]
    start(run_on, tmp_path, corpus, part.ranks, keys, "plain")
    start(run_on, tmp_path, corpus, part.ranks, [*keys, *AVERAGED, *VALIDATED], "averaged")
    plain, averaged = (make_job(tmp_path, corpus, name=name) for name in ("plain", "averaged"))
    assert history(averaged) == history(plain)
    for section in ("model", "optimizer"):
        assert sha_of(averaged.folder, section) == sha_of(plain.folder, section)
    nothing = hashlib.sha256().hexdigest()
    assert sha_of(plain.folder, "ema") == nothing != sha_of(averaged.folder, "ema")


@pytest.mark.full
def test_control_weights_that_are_not_put_back_are_noticed(tmp_path: Path, corpus: Path) -> None:
    @contextmanager
    def only_there(average: WeightAverage) -> Iterator[None]:
        average._swap()
        yield

    keys = [f"--training.steps={STEPS}", *AVERAGED]
    on_rank(tmp_path, corpus, 1, keys, "plain")
    with patch.object(WeightAverage, "as_weights", only_there):
        on_rank(tmp_path, corpus, 1, [*keys, *VALIDATED], "averaged")
    plain, averaged = (make_job(tmp_path, corpus, name=name) for name in ("plain", "averaged"))
    assert history(averaged)[:2] == history(plain)[:2]
    assert history(averaged)[2:] != history(plain)[2:]


@pytest.mark.parametrize(
    "name", ["one process", full("dp_shard 2"), full("pp 2"), full("dp_shard 2, float8")]
)
def test_the_validation_is_of_the_average(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    """A run that starts from the exported average, and moves it by nothing, has its loss."""
    part = LAYOUTS[name]
    keys = [FOUR_MICRO_BATCHES, UNTIED, *part.keys, *VALIDATED]
    start(run_on, tmp_path, corpus, part.ranks, [*keys, *AVERAGED, "--training.steps=4"], "run")
    export = ["export", str(tmp_path / "run"), str(tmp_path / "average"), "--dtype=float32", "--ema"]
    assert cli.run(export) == 0
    still = ["--optimizer.lr=1e-30", "--optimizer.weight_decay=0", "--training.steps=1"]
    still.append(f"--checkpoint.initial_load_path={tmp_path / 'average'}")
    start(run_on, tmp_path, corpus, part.ranks, [*keys, *still], "still")
    ran, reference = (metrics_of(make_job(tmp_path, corpus, name=name))[-1] for name in ("run", "still"))
    assert ran["eval/ema_loss"] == reference["eval/loss"] != ran["eval/loss"]
    assert ran["eval/ema_perplexity"] == reference["eval/perplexity"]


@pytest.mark.full
def test_a_rewound_run_has_the_average_of_one_that_skipped_the_sequences(
    tmp_path: Path, corpus: Path
) -> None:
    keys = [
        "--training.seq_len=16", "--training.local_batch_size=2", "--training.steps=150",
        "--optimizer.lr=1e-3", "--lr_scheduler.total_steps=2000", "--checkpoint.interval=20",
        "--model.overrides.n_layers=1", "--ema.enable", "--ema.decay=0.9",
        "--guard.on_spike=rewind", "--guard.rewind_margin=15",
    ]  # fmt: skip
    with garbage_sequences(800, 991), patch.object(spikes, "BEFORE", 64):
        on_rank(tmp_path, corpus, 1, keys, "rewound")
    lines = (tmp_path / "rewound/events.jsonl").read_text().splitlines()
    (event,) = [event for line in lines if (event := json.loads(line))["event"] == "rewound"]
    skip = f"--data.skip_sequences=[[{event['first_sequence']}, {event['last_sequence']}]]"
    on_rank(tmp_path, corpus, 1, [*keys, skip], "skipped")
    rewound, skipped = (make_job(tmp_path, corpus, name=name) for name in ("rewound", "skipped"))
    assert state_of(rewound, 150) == state_of(skipped, 150) != {}
