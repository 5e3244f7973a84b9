"""Averages of weights in checkpoints, compared with averages computed from the weights in the checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from titanlite.checkpoint.commit import list_committed
from titanlite.checkpoint.reader import read_metadata
from titanlite.interop.dcp import open_titanlite, stored_tensors
from titanlite.interop.weights import LazyTensor

DECAY, START_STEP = 0.8, 1
AVERAGED = ["--ema.enable", f"--ema.decay={DECAY}", f"--ema.start_step={START_STEP}"]


def check_by_hand(run: Path, num_saved: int, freq: int = 1, tolerance: float = 0.0) -> None:
    """Compare the average in each checkpoint of a run with one computed from the weights in the checkpoints
    up to it. The run has saved all steps except those that it skipped, and its keys are AVERAGED."""
    saved = list_committed(run / "checkpoint")
    assert len(saved) == num_saved
    average = dict[str, torch.Tensor]()
    for step, path in saved:
        weights, kept = weights_in(path), weights_in(path, average=True)
        if step <= START_STEP:
            average = weights
        elif (step - START_STEP) % freq == 0:
            average = {n: torch.lerp(average[n], w, 1 - DECAY**freq) for n, w in weights.items()}
        assert kept.keys() == average.keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, average[name], rtol=0, atol=tolerance)
        assert step <= START_STEP or not torch.equal(kept["model.norm.weight"], weights["model.norm.weight"])


def weights_in(step: Path, average: bool = False) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, or their average."""
    return {name: _whole(stored) for name, stored in open_titanlite(step, average=average).tensors.items()}


def sha_of(run: Path, section: str) -> str:
    """Hash of a section of a run's newest checkpoint."""
    _, path = list_committed(run / "checkpoint")[-1]
    metadata = read_metadata(path)
    names = {name: name for name in metadata.state_dict_metadata if name.startswith(f"{section}.")}
    content = hashlib.sha256()
    for name, stored in sorted(stored_tensors(path, metadata, names).items()):
        content.update(name.encode() + _whole(stored).numpy().tobytes())
    return content.hexdigest()


def _whole(stored: LazyTensor) -> torch.Tensor:
    return stored.read(tuple(slice(0, size) for size in stored.shape))
