"""Ranks of tests answer, fail and end as they should, and each test is in one part of the full tier."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.tiers import in_part


def answer(offset: int) -> tuple[int, int, bool, str]:
    preloaded = "tests.support.preload" in sys.modules  # the fork server passes over a module with an error
    return dist.get_rank() + offset, dist.get_world_size(), preloaded, os.environ["COLOUR"]


def test_results_come_by_rank_with_the_environment_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for colour in ("red", "blue"):
        monkeypatch.setenv("COLOUR", colour)
        assert ranks.run(2, answer, 10) == [(10, 2, True, colour), (11, 2, True, colour)]


def crash_or_fail(folder: Path, crash: bool) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        if crash:
            os.abort()
        raise ValueError("this rank only")
    dist.barrier()  # would wait for ever


@pytest.mark.parametrize(
    ("crash", "message"),
    [
        (False, "(?s)rank 1:.*ValueError: this rank only"),
        (True, "rank 1 has crashed in native code: SIGABRT"),
    ],
)
def test_a_rank_that_fails_or_crashes_ends_all_and_is_named(
    tmp_path: Path, crash: bool, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, crash_or_fail, tmp_path, crash)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_each_test_is_in_one_part() -> None:
    tests = [f"tests/test_it.py::test_it[{number}]" for number in range(1000)]
    sizes = [sum(in_part(test, k, 4) for test in tests) for k in (1, 2, 3, 4)]
    assert sum(sizes) == 1000
    assert min(sizes) > 200
