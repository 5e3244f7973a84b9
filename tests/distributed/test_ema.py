"""The average of the weights on every layout: equal, bit by bit, to the average that follows from the weights
in the checkpoints, also with skipped steps and with resumes on other layouts. Keeping it and validating with
it changes nothing about training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job
from tests.support.layouts import Part, combined
from tests.support.non_finite import bad_steps
from tests.support.runs import FOUR_MICRO_BATCHES, UNTIED
from tests.support.tiers import full
from titanlite.checkpoint.commit import list_committed
from titanlite.interop.dcp import open_titanlite
from titanlite.train import train

STEPS = 6
DECAY = 0.8
AVERAGED = ["--ema.enable", f"--ema.decay={DECAY}", "--ema.start_step=1"]
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
}
DEFAULT_TIER = {"one process", "dp_shard 2"}


def on_rank(
    folder: Path, corpus: Path, ranks: int, keys: list[str], name: str, bad: Collection[int] = ()
) -> None:
    with bad_steps(bad):
        train(make_job(folder, corpus, *keys, name=name, world_size=ranks))


def weights_in(step: Path, average: bool = False) -> dict[str, torch.Tensor]:
    tensors = open_titanlite(step, average=average).tensors
    return {name: stored.read(tuple(slice(0, n) for n in stored.shape)) for name, stored in tensors.items()}


def check_by_hand(run: Path, num_saved: int, freq: int = 1, start_step: int = 1) -> None:
    """Compare the average in each checkpoint with one computed from the weights in the checkpoints up to it.
    The run has saved all steps but those that it skipped."""
    saved = list_committed(run / "checkpoint")
    assert len(saved) == num_saved
    average = dict[str, torch.Tensor]()
    for step, path in saved:
        weights = weights_in(path)
        if step <= start_step:
            average = weights
        elif (step - start_step) % freq == 0:
            average = {n: torch.lerp(average[n], w, 1 - DECAY**freq) for n, w in weights.items()}
        kept = weights_in(path, average=True)
        assert kept.keys() == average.keys()
        assert all(torch.equal(kept[n], average[n]) for n in kept), (step, path)
        assert step <= start_step or not torch.equal(kept["model.norm.weight"], weights["model.norm.weight"])


@pytest.mark.parametrize("name", [name if name in DEFAULT_TIER else full(name) for name in LAYOUTS])
def test_the_average_equals_one_kept_by_hand(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    """With steps 3 and 4 skipped, and a validation."""
    part = LAYOUTS[name]
    keys = [*EVERY_STEP, *AVERAGED, *VALIDATED, *part.keys, f"--training.steps={STEPS}"]
    run_on(part.ranks, on_rank, tmp_path, corpus, part.ranks, keys, "run", {3, 4})
    check_by_hand(tmp_path / "run", STEPS - 2)
