"""`titanlite tune --measure` on a GPU: times are the device's, not those of launching kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanlite import cli
from titanlite.lab.calibration import read_measurement

pytestmark = pytest.mark.gpu


def test_a_larger_micro_batch_takes_longer(tmp_path: Path) -> None:
    blocks = []
    for sequences in (32, 64):  # with 8, launches of kernels take longer than the kernels
        file = tmp_path / f"{sequences}.json"
        words = [f"--training.local_batch_size={sequences}", "--training.global_batch_size=-1"]
        shape = ["--model.flavor=125M", "--training.seq_len=1024", *words]
        assert cli.run(["tune", "llama3_1b", "--measure", f"--output={file}", *shape]) == 0
        measured = read_measurement(file)
        assert measured.device == torch.cuda.get_device_name()
        assert not measured.card.is_cpu
        blocks.append(measured.measured.block)
    assert 1.3 < blocks[1] / blocks[0] < 2.7  # beside other tests on the same GPU
