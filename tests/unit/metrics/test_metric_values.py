"""Pins which values a metric may return, and that another one is refused in a line that names the metric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from titanlite.config.component import ConfigError
from titanlite.metrics.metric import OpenMetric, StepResult, values_of

STEP: Any = object()


class Given(OpenMetric):
    def __init__(self, values: Any):
        self.values = values

    def measure(self, step: StepResult) -> dict[str, Any]:
        return self.values


def test_numbers_and_tensors_of_one_element_become_values() -> None:
    given = {"a": 1, "b": 0.5, "c": "text", "d": torch.tensor(2.0), "e": np.float32(0.25), "f": torch.ones(1)}
    values = values_of(Given(given), STEP)
    assert values == {"a": 1, "b": 0.5, "c": "text", "d": 2.0, "e": 0.25, "f": 1.0}
    assert all(type(value) in (int, float, str) for value in values.values())


@pytest.mark.parametrize(
    "values",
    [None, 1.0, {"a": None}, {"a": [1, 2]}, {"a": torch.ones(2)}, {"a": np.ones(2)}, {"step": 1}, {3: 1.0}],
)
def test_other_values_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"Given\.measure returned .*; expected a") as error:
        values_of(Given(values), STEP)
    assert "\n" not in str(error.value)
