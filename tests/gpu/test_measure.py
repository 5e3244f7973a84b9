"""`titanlite tune --measure` on a GPU: times are the device's, not those of launching kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanlite import cli
from titanlite.job import load_job
from titanlite.lab.calibration import read_measurement

pytestmark = pytest.mark.gpu


def test_times_are_not_those_of_launching_kernels(tmp_path: Path) -> None:
    """They are no shorter than the products at the peak of the data sheet, however many other tests run."""
    file = tmp_path / "measured.json"
    shape = ["--model.flavor=125M", "--training.seq_len=1024", "--training.local_batch_size=64"]
    words = ["tune", "llama3_1b", "--measure", f"--output={file}", *shape, "--training.global_batch_size=-1"]
    assert cli.run(words) == 0
    measurement = read_measurement(file)
    assert measurement.device == torch.cuda.get_device_name()
    assert not measurement.card.is_cpu
    model = load_job("llama3_1b", shape, world_size=1).model
    seconds = model.config.n_layers * measurement.measured.block + measurement.measured.head
    assert seconds > model.build_on_meta().flops_per_token(1024) * 64 * 1024 / measurement.card.flops
