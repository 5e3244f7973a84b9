"""The contract of a learning-rate schedule: a pure function of the step, without state to save."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from titanlite.config.component import Component, ConfigError
from titanlite.config.imports import error_with_place


@dataclass(frozen=True, kw_only=True)
class LRScheduler(Component, kind="learning-rate schedule"):
    """Base of schedules: `[lr_scheduler] name = "..."` selects a subclass by its name. The learning rate of a
    parameter group is its peak learning rate times `factor`."""

    @abstractmethod
    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ..., in a run of `training_steps` steps.

        Must depend only on the arguments and the schedule's keys. Steps may come in any order, and may be
        steps that are not trained.
        """

    def checked_factor(self, step: int, training_steps: int) -> float:
        """`factor` as a Python number. Raises ConfigError if it fails, is negative or is not finite."""
        try:
            factor = float(self.factor(step, training_steps))
        except Exception as e:
            said = f"failed: {error_with_place(e)}"
        else:
            if 0 <= factor < math.inf:
                return factor
            said = f"is {factor}; it must be finite and at least 0"
        raise ConfigError(f"the factor of {self.name!r} at step {step} {said}", "lr_scheduler.name")

    def check_factors(self, training_steps: int) -> None:
        """Raises ConfigError for a wrong factor at the first step, the last step or a sample of the steps
        between them."""
        for step in {*range(1, training_steps, max(training_steps // 100, 1)), training_steps} - {0}:
            self.checked_factor(step, training_steps)

    def check(self, training_steps: int) -> None:
        """Raises ConfigError, with a full key such as "lr_scheduler.warmup_steps", if the schedule does not
        fit a run of `training_steps` steps. Default: every length fits."""

    def describe(self, training_steps: int) -> str:
        """The schedule of a run of `training_steps` steps in a few words, for the log."""
        return f"{self.name} over {training_steps:,} steps"
