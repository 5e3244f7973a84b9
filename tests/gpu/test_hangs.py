"""A rank that hangs on NCCL: its flight records name the rank and the collective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.gpu import LAUNCHER, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_the_rank_that_hangs_is_named(tmp_path: Path, corpus: Path, how: str) -> None:
    """Two micro-batches per step: it hangs in step 3. A rank that is stopped leaves no record of its own."""
    options = ["--comm.train_timeout_seconds=15", '--job.imports=["tests.support.hanging"]']
    log = trained(tmp_path, corpus, *options, code=1, ngpu=2, program=LAUNCHER, HANG=f"1 forward 5 {how}")
    line = next((one for one in log.splitlines() if "missing from" in one), log)
    assert re.match(
        r"titanlite: rank 1 is missing from \w+ number \d+ \([\w, ]*ranks 0 and 1\), in which rank 0 waits: "
        "rank 1 is in step 3, in the forward; rank 0 is in step 3, ",
        line,
    ), log
