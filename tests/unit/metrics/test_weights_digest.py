"""Pins the digests of weights in metrics.jsonl on one process: in which steps, and that they are those of the
checkpoints. tests/distributed/test_weights_digest.py has the layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import make_job, metrics_of
from tests.support.runs import TP
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint
from titanlite.config.component import ConfigError
from titanlite.train import train

NAME = "train/weights_digest"


def test_a_digest_is_that_of_the_checkpoint_of_its_step(tmp_path: Path, corpus: Path) -> None:
    keys = ["--metrics.digest_freq=2", "--metrics.log_freq=100", "--training.steps=5"]
    job = make_job(
        tmp_path, corpus, *keys, "--checkpoint.interval=2", "--metrics.sinks=[{name='tensorboard'}]"
    )
    assert train(job) == 0
    rows = metrics_of(job)
    digests = {row["step"]: row[NAME] for row in rows if NAME in row}
    assert list(digests) == [2, 4]
    assert [row["step"] for row in rows] == [1, 2, 4, 5]
    assert all(row["time/digest_s"] > 0 for row in rows if NAME in row)
    assert len(set(digests.values())) == 2, "other weights have another digest"
    for step, digest in digests.items():
        assert digest == combine(digests_of_checkpoint(job.folder / f"checkpoint/step-{step}"))["weights"]


def test_without_the_key_there_is_none(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=1", "--checkpoint.enable=false")
    assert train(job) == 0
    assert all(NAME not in row for row in metrics_of(job))


def test_tensor_parallel_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^[^\n]*tensor_parallel_degree = 2, which cuts rows[^\n]*$"
    ) as error:
        make_job(tmp_path, corpus, "--metrics.digest_freq=2", TP, world_size=2)
    assert error.value.key == "metrics.digest_freq"
    make_job(tmp_path, corpus, TP, world_size=2)
