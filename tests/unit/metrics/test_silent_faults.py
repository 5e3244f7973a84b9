"""Which ranks are wrong, from the digests of what they computed, and the line that says so."""

from __future__ import annotations

import pytest
import torch

from titanlite.metrics.guard import Guard
from titanlite.metrics.silent_faults import Fault, WrongRank, describe_device, judge


def digests(results: str) -> list[list[dict[str, int]]]:
    """The digests of ranks, such as `ab aa`: rank 0 had the results a and b, rank 1 twice a. A capital letter
    has the same loss as the small one, and another gradient."""
    return [[{"loss": ord(c.lower()), "gradient": ord(c)} for c in rank] for rank in results.split()]


@pytest.mark.parametrize(
    ("results", "wrong", "is_certain"),
    [
        ("aa ab aa", [1], True),  # differs from itself
        ("aa bb aa", [1], True),  # differs from the majority
        ("aa bb aa cc aa", [1, 3], True),
        ("ab ba aa aa aa", [0, 1], True),
        ("ba", [0], True),  # a single rank
        ("aa ba", [1], True),
        ("aa bb", [0, 1], False),
        ("aa bb cc", [0, 1, 2], False),
        ("aa aa bb bb", [0, 1, 2, 3], False),
        ("ab ba", [0, 1], False),  # as kernels that are not deterministic
        ("ab bc ca aa", [0, 1, 2], False),
    ],
)
def test_which_ranks_are_wrong(results: str, wrong: list[int], is_certain: bool) -> None:
    verdict = judge(digests(results))
    assert verdict is not None
    assert list(verdict.wrong) == wrong
    assert verdict.is_certain == is_certain
    assert set(map(tuple, verdict.wrong.values())) == {("loss", "gradient")}


@pytest.mark.parametrize("results", ["aa", "a a", "aa aa aa"])
def test_equal_results_have_no_verdict(results: str) -> None:
    assert judge(digests(results)) is None


def test_the_verdict_names_the_results_that_differ() -> None:
    verdict = judge(digests("aa AA aa"))
    assert verdict is not None
    assert verdict.wrong == {1: ["gradient"]}


def test_one_line_for_a_tired_person() -> None:
    names, device = ["loss", "gradient of model.layers.0", "third"], "node7, GPU 3 (NVIDIA H200, GPU-5d2b)"
    ranks = [WrongRank(i, device, names, 14, True) for i in range(6)]
    assert str(Fault(400, 300, ranks[:1])) == (
        "silent fault: wrong results of rank 0 on node7, GPU 3 (NVIDIA H200, GPU-5d2b): 3 of 14 results "
        "differ (loss, gradient of model.layers.0 and 1 more); found after step 400, when all ranks computed "
        "the same micro-batch; the weights since step 300, the check before, may be wrong and are not saved"
    )
    several = str(Fault(400, 300, [rank._replace(is_certain=False) for rank in ranks]))
    assert several.startswith("silent fault: different results, of which some are wrong, of rank 0 on ")
    assert "rank 3 on " in several
    assert "rank 4 on " not in several
    assert "; and 2 more ranks; found" in several
    assert Fault(400, 300, ranks).about()["ranks"] == "0, 1, 2, 3, 4, 5"


def test_a_device_is_described_on_its_host() -> None:
    assert ", cpu (" in describe_device(torch.device("cpu"))


def test_checks_are_due_at_their_interval_and_at_the_last_step() -> None:
    guard = Guard(fault_check_freq=4)
    due = [step for step in range(1, 11) if guard.fault_check_is_due(step, 10)]
    assert due == [4, 8, 10]
    assert [guard.fault_check_before(step) for step in due] == [0, 4, 8]
    assert not Guard().fault_check_is_due(10, 10)
