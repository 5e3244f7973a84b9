"""A rank that hangs: when a collective of the other ranks times out, the launcher says which rank is missing
from which collective, and where it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.gpu import LAUNCHER, trained

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
TP = "--parallelism.tensor_parallel_degree=2"


@pytest.mark.parametrize(
    ("ranks", "hang", "overrides", "line"),
    [
        (
            2, "1 data 5 stop", [],
            r"rank 1 is missing from all_reduce number \d+ \(ranks 0 and 1\), in which rank 0 waits: "
            "rank 1 is in step 3, waiting for data; rank 0 is in step 3, before the forward",
        ),
        (
            4, "1 forward 3 sleep", [],
            r"rank 1 is missing from \w+ number \d+ \(\w*,? ?ranks 0, 1, 2 and 3\), in which "
            "ranks 0, 2 and 3 wait: rank 1 is in step 3, in the forward; rank 0 is in step 3, in the forward",
        ),
        (
            4, "1 forward 5 sleep", [TP],
            r"rank 1 is missing from \w+ number \d+ \(mesh_\w+, ranks \d and \d\), in which rank \d waits: "
            r"rank 1 is in step 3, in the forward; rank \d is in step 3, in the forward",
        ),
    ],
    ids=["data", "forward", "tp"],
)  # fmt: skip
def test_the_rank_that_hangs_is_named(
    tmp_path: Path, corpus: Path, ranks: int, hang: str, overrides: list[str], line: str
) -> None:
    options = ["--comm.train_timeout_seconds=10", '--job.imports=["tests.support.hanging"]', *overrides]
    log = trained(tmp_path, corpus, *options, code=1, ngpu=ranks, program=LAUNCHER, HANG=hang)
    lines = [one.removeprefix("titanlite: ") for one in log.splitlines() if "missing from" in one]
    assert len(lines) == 1, log
    assert re.fullmatch(line, lines[0]), lines[0]
