"""The example of a metric: runs on one rank and on two report the same share as the sequences have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import make_job, metrics_of
from tests.support.metric_tables import is_described
from tests.support.runs import train_on_rank
from tests.support.tiers import full
from titanlite.checkpoint.start import New
from titanlite.config.component import ConfigError
from titanlite.start import open_data

KEYS = [
    "--job.imports=['tests.examples.repeated_tokens']",
    "--training.steps=3",
    "--metrics.detail_freq=2",
    "--metrics.probe_freq=2",
]


@pytest.mark.parametrize("world_size", [1, full(2)])
def test_the_share_is_that_of_the_sequences(
    tmp_path: Path, corpus: Path, run_on: Any, world_size: int
) -> None:
    extra = "--metrics.extra=[{ name = 'repeated_tokens', distance = 2 }]"
    run_on(world_size, train_on_rank, tmp_path, corpus, [*KEYS, extra], "run", world_size)
    job = make_job(tmp_path, corpus, *KEYS, extra, name="run")
    sequences = open_data(job, job.tokenizer.build(), New())
    size, lines = 8, metrics_of(job)
    for k, line in enumerate(lines):
        numbers = np.arange(k * size, (k + 1) * size)
        tokens = sequences.batch(numbers.tolist(), sequences.training(numbers)).inputs.numpy()
        before = [np.roll(tokens, shift, axis=1)[:, 2:] == tokens[:, 2:] for shift in (1, 2)]
        second = tokens[:, 1] == tokens[:, 0]
        expected = ((before[0] | before[1]).sum() + second.sum()) / tokens.size
        assert line["text/repeated_tokens"] == pytest.approx(expected)
    undescribed = {name for line in lines for name in line if not is_described(name)}
    assert undescribed == {"step", "text/repeated_tokens"}


def test_a_wrong_distance_and_a_name_that_exists_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match="0 is below 1"):
        make_job(tmp_path, corpus, *KEYS, "--metrics.extra=[{ name = 'repeated_tokens', distance = 0 }]")
    twice = "--metrics.extra=[{ name = 'repeated_tokens' }, { name = 'repeated_tokens' }]"
    with pytest.raises(ConfigError, match="two metrics report the name 'text/repeated_tokens'"):
        train_on_rank(tmp_path, corpus, [*KEYS, twice], "twice", 1)
