"""The guard's state in train.json is read back, and nothing else is."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch

from tests.support.checkpoints import GUARD
from titanlite.checkpoint.guard_state import check_guard
from titanlite.metrics.guard import Guard, StepGuard


def written() -> dict[str, Any]:
    """The state of a guard after 320 steps, with a spike that was not reported yet."""
    guard, norm = (
        StepGuard(Guard(skip_sigma=6.0, window=16, min_window=8), torch.device("cpu")),
        torch.ones(()),
    )
    for step in range(1, 321):
        loss = torch.tensor(3 + step % 3 / 100 + (step > 277))
        targets = torch.tensor(16)
        guard.judge(loss, norm, guard.summands(norm), step, 8 * step, 8 * step + 8, targets)
    return json.loads(json.dumps(guard.state_dict()))


STATE = written()


def test_what_a_guard_writes_is_accepted() -> None:
    check_guard(GUARD)
    check_guard(STATE)
    assert (len(STATE["spikes"]["losses"]), len(STATE["unreported_spikes"])) == (272, 1)


WRONG: list[tuple[str, Any, str]] = [
    ("streak", -1, "out of range"),
    ("streak", 1, "streak_steps has 0 numbers, not 2"),
    ("skipped_steps", 1 << 63, "out of range"),
    ("skipped_steps", True, "not an integer"),
    ("outliers", [], "not an object"),
    ("outliers.streak", 1.0, "not an integer"),
    ("outliers.losses", [math.nan] * 16, "nan is not finite"),
    ("outliers.losses", [1.0] * 15, "log_norms has 16 numbers, not 15"),
    ("outliers.log_norms", [math.inf] * 16, "inf is not finite"),
    ("outliers.log_norms", ["1"] * 16, "not a list of numbers"),
    ("outliers.log_norms", {}, "not a list"),
    ("spikes.losses", [1.0] * 273, "more than 272"),
    ("spikes.losses", [1] * 272, "not a list of numbers of type float"),
    ("spikes.losses", [], "steps has 16 numbers, not 0"),
    ("spikes.steps", [1.5] * 16, "not a list of numbers of type int"),
    ("spikes.steps", [-1] * 16, "out of range"),
    ("spikes.level", math.nan, "nan is not finite"),
    ("spikes.is_reported", 1, "not true or false"),
    ("unreported_spikes", [3], "is not an object"),
    ("unreported_spikes", [{"start_step": 1, "detected_step": 2, "level": 3.0}], "height is missing"),
    ("unreported_spikes", [STATE["unreported_spikes"][0] | {"other": 1}], "unknown key"),
    ("sequences", [], "empty"),
    ("sequences", [[1, 0]], "2 numbers, not 3"),
    ("sequences", [[9, 64, 8], [1, 0, 8]], "do not ascend"),
    ("sequences", [[1, 0, -8]], "out of range"),
    ("sequences", [7], "not a list"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_garbage_is_refused(key: str, value: Any, message: str) -> None:
    state = copy.deepcopy(STATE)
    section, _, name = key.rpartition(".")
    (state[section] if section else state)[name] = value
    with pytest.raises(ValueError, match=message):
        check_guard(state)


def test_each_key_is_needed() -> None:
    for section in ("", "outliers", "spikes"):
        for name in STATE[section] if section else STATE:
            state = copy.deepcopy(STATE)
            del (state[section] if section else state)[name]
            with pytest.raises(ValueError, match=f"{name} is missing"):
                check_guard(state)
