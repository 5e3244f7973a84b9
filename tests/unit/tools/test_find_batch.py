"""`titanlite tune --find-batch`: which sizes are trained, and real runs with a made-up GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import make_job, tiny_arguments
from titanlite import cli
from titanlite.tools.find_batch import MAX_SHARE, MAX_STARTS, Trial, find, micro_batches

CARD_GIB = 100.0
POWERS = [2**i for i in range(8)]


def card(reserved_gib: Callable[[int], float]) -> Callable[[int], Trial]:
    """Trains on a GPU of 100 GiB on which a size reserves so much; more than that is out of memory."""

    def train(size: int) -> Trial:
        gib = reserved_gib(size)
        if gib > CARD_GIB:
            return Trial(size, out_of_memory="out of memory in step 1, backward")
        return Trial(size, 0.9 * gib, gib, 100.0 + size)

    return train


@pytest.mark.parametrize(
    ("needs", "tried", "largest"),
    [
        (lambda n: 10 + 5 * n, [8, 16, 32], 16),  # as planned; 8: to compare the speed
        (lambda n: 11 + 5.3 * n, [4, 8, 16], 8),  # 95.8 GiB for 16 are more than 95% of the GPU
        (lambda n: 10 + 6 * n, [4, 8, 16], 8),  # 16 runs out of memory
        (lambda n: 5 + 2 * n, [16, 32, 64], 32),
        (lambda n: 50 + 30 * n, [1, 2, 4, 8, 16], 1),
        (lambda n: 1.0, [16, 128], 128),
        (lambda n: 200.0, [1, 2, 4, 8, 16], None),
    ],
)
def test_the_largest_size_that_fits_is_found(
    needs: Callable[[int], float], tried: list[int], largest: int | None
) -> None:
    trials = find(POWERS, lambda n: 10 + 5 * n, CARD_GIB, card(needs))
    assert [trial.size for trial in trials] == tried
    assert max((t.size for t in trials if t.fits(CARD_GIB)), default=None) == largest


@given(st.floats(0.5, 80), st.floats(0.1, 40), st.floats(0.5, 2), st.floats(0.5, 2), st.integers(1, 200))
def test_what_fits_is_between_neighbours_or_the_starts_are_used_up(
    base: float, slope: float, base_error: float, slope_error: float, num: int
) -> None:
    sizes = list(range(1, num + 1))

    def needs(n: int) -> float:
        return base + slope * n

    trials = find(sizes, lambda n: base * base_error + slope * slope_error * n, CARD_GIB, card(needs))
    fits = [n for n in sizes if needs(n) <= MAX_SHARE * CARD_GIB]
    largest = max((t.size for t in trials if t.fits(CARD_GIB)), default=0)
    assert len({t.size for t in trials}) == len(trials)
    assert largest == max(fits, default=0) or (largest and len(trials) >= MAX_STARTS)
    if math.isclose(base_error, 1) and math.isclose(slope_error, 1):
        assert len(trials) <= 3


def test_sizes_divide_the_global_batch(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.global_batch_size=24")
    assert list(micro_batches(job, 1)) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert list(micro_batches(job, 2)) == [1, 2, 3, 4, 6, 12]
    ramp = "--training.batch_ramp=[{until='8 sequences', global_batch_size=8}]"
    job = make_job(tmp_path, corpus, "--training.global_batch_size=24", ramp)
    assert list(micro_batches(job, 1)) == [1, 2, 4, 8]


def test_a_global_batch_that_follows_allows_all_sizes(tmp_path: Path, corpus: Path) -> None:
    words = ["--training.global_batch_size=-1", "--training.local_batch_size=33"]
    sizes = micro_batches(make_job(tmp_path, corpus, *words), 1)
    assert [next(sizes) for _ in range(23)] == [*range(1, 17), 18, 20, 22, 24, 26, 28, 30]
    assert [next(sizes) for _ in range(4)] == [32, 33, 36, 40]


def test_without_a_gpu_it_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tune", *tiny_arguments(tmp_path, corpus), "--find-batch"]) == 2
    said = "titanlite: command line, --find-batch: it measures the memory of a GPU, and there is none here\n"
    assert capsys.readouterr().err == said
    assert cli.run(["tune", *tiny_arguments(tmp_path, corpus), "--find-batch", "--coordinate-check"]) == 2
    assert "--find-batch: not together with --coordinate-check" in capsys.readouterr().err
